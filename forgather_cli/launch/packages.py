"""Optional packages that a run needs, asked for before anything is started."""

from __future__ import annotations

from importlib.util import find_spec

from forgather_cli.config.schema import Config, FP8Settings, QATSettings
from forgather_cli.errors import SetupError


def check_packages(config: Config) -> None:
    """Raise SetupError, with the command that installs it, for a package that is missing here; imports none."""
    if isinstance(config.precision, FP8Settings | QATSettings) and find_spec("torchao") is None:
        what = f"precision={config.precision.type}"
        raise SetupError(f"{what}: needs the package torchao; pip install 'forgather[quantize]'")

"""Optional packages that a run needs, asked for before anything is started."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from forgather_cli.config.schema import Config, FP8Settings, KernelLoss, QATSettings
from forgather_cli.errors import SetupError

_KERNELS = {"liger": "liger-kernel", "cut_cross_entropy": "cut-cross-entropy"}
_THEIRS = ("triton",) if sys.platform == "linux" else ()
"""What both import, on a CPU too."""


def check_packages(config: Config) -> None:
    """Raise SetupError, with the command that installs it, for a package that is missing here; imports none."""
    if isinstance(config.precision, FP8Settings | QATSettings) and find_spec("torchao") is None:
        what = f"precision={config.precision.type}"
        raise SetupError(f"{what}: needs the package torchao; pip install 'forgather[quantize]'")
    if isinstance(config.loss, KernelLoss):
        for package in (_KERNELS[config.loss.type], *_THEIRS):
            if find_spec(package.replace("-", "_")) is None:
                what = f"loss={config.loss.type}"
                raise SetupError(f"{what}: needs the package {package}; pip install 'forgather[kernels]'")

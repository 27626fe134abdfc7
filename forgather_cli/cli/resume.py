"""``forgather resume``: go on with a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forgather_cli.cli.common import ConfigDir, Overrides, check_overrides
from forgather_cli.cli.train import start
from forgather_cli.launch.place import joined

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded


def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.", show_default=False)],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Go on with a run from its saved config and its newest valid checkpoint.

    Settings given here count from now on. Free to change are trainer, batch sizes per device, max_steps,
    logging, evaluation, saving and callbacks; [cyan]group=option[/] replaces the whole group.
    """

    def compose() -> Loaded:
        from forgather_cli.config.resume import reload_config

        return reload_config(run_dir, check_overrides(overrides), config_dir=config_dir)

    raise typer.Exit(start(joined(overrides or []), compose))

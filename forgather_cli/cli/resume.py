"""``forgather resume``: go on with a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forgather_cli.cli.common import ConfigDir, Overrides, check_overrides


def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.", show_default=False)],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Go on with a run from its saved config and its newest valid checkpoint.

    Settings given here count from now on. Free to change are trainer, batch sizes per device, max_steps,
    logging, evaluation, saving and callbacks; [cyan]group=option[/] replaces the whole group.
    """
    from forgather_cli.config.resume import reload_config
    from forgather_cli.launch import launch

    raise typer.Exit(launch(reload_config(run_dir, check_overrides(overrides), config_dir=config_dir)))

"""``forgather resume``: continue a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forgather_cli.cli.words import ConfigDir, Overrides, RunPath, check_overrides
from forgather_cli.documents.regular_files import read_yaml, set_aside
from forgather_cli.errors import CutOffError, SetupError
from forgather_cli.launch.place import joined
from forgather_cli.run_dir import CALLED_FROM, RunDir, shown
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded


def resume(
    run_dir: RunPath,
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Resume a run from its saved config and its newest valid checkpoint.

    Settings given here count from now on. Free to change are trainer, batch sizes per device, max_steps,
    logging, evaluation, saving and callbacks; [cyan]group=option[/] replaces the whole group.
    A DiLoCo server goes on serving. Relative paths count from where the run was first started,
    wherever this is called.
    """
    if RunDir(run_dir).note_set_aside() is not None:  # the run from before may be of another kind, and of elsewhere
        from forgather_cli.launch.run_lock import restore_overwritten

        restore_overwritten(RunDir(run_dir))
    directory = RunDir(run_dir).first_directory() or Path.cwd()
    if directory != Path.cwd():
        run_dir, config_dir = run_dir.absolute(), config_dir and config_dir.absolute()

    def compose() -> Loaded:
        from forgather_cli.checkpoint.retention import pending
        from forgather_cli.config.load import reload_config

        _mend(RunDir(run_dir))
        words = check_overrides(overrides)
        edited: dict[str, Any] = {}
        if found := pending(RunDir(run_dir)):  # what forgather checkpoint edit has written into the checkpoint
            path, edited = found
            tell(f"{', '.join(edited)}: as edited in {shown(path)}", sys.stderr)
        return reload_config(run_dir, words, config_dir=config_dir, edited=edited)

    if RunDir(run_dir).diloco.is_file():
        from forgather_cli.cli.diloco import resume_server

        with _working_in(directory):
            _mend(RunDir(run_dir))
            raise typer.Exit(resume_server(run_dir, check_overrides(overrides), config_dir))
    from forgather_cli.launch.start import launch
    from forgather_cli.worker import work

    with _working_in(directory):
        raise typer.Exit(launch(compose, work, joined(overrides or []), RunDir(run_dir)))


def _mend(run: RunDir) -> None:
    """Set aside what a start cannot read, and make a config that is cut off again from the newest whole checkpoint."""
    from forgather_cli.checkpoint.choice import would_resume
    from forgather_cli.checkpoint.rollbacks import read_rollbacks
    from forgather_cli.config.decode import dump_tree, load_tree

    read_rollbacks(run, mends=True)  # first: no checkpoint is chosen without them
    try:
        if run.origin.exists() and not isinstance(read_yaml(run.origin), dict):
            raise SetupError(f"{run.origin}: must be a mapping")
    except SetupError as error:
        set_aside(run.origin, f"{error}, so relative paths count from this directory")
    config = run.newest_config()
    try:
        if config.is_file():
            load_tree(config)
    except CutOffError:
        from forgather_cli.checkpoint.load import Reader

        chosen = would_resume(run)
        known = chosen and chosen.manifest and Reader(chosen.path, chosen.manifest).identity().get("config")
        if chosen and known:
            problem = f"{config}: is empty or cut off, so the settings are those of {shown(chosen.path)}"
            set_aside(config, problem, dump_tree(known).encode())


@contextlib.contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    """For all that the run reads, its own modules and its ranks too; paths are shown from where the user is."""
    os.environ[CALLED_FROM] = os.getcwd()
    try:
        with contextlib.chdir(directory):
            yield
    finally:
        del os.environ[CALLED_FROM]

"""``forgather checkpoint edit``: other optimizer and schedule settings in a saved state."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.output import AsJson, only_json, print_json
from forgather_cli.cli.source import TrustConfig
from forgather_cli.cli.words import Overrides, check_overrides, quoted
from forgather_cli.errors import CheckpointError, ConfigError
from forgather_cli.run_dir import run_of

if TYPE_CHECKING:
    from forgather_cli.checkpoint.load import Reader
    from forgather_cli.config.load import Loaded


def edit(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A checkpoint, or a run for its newest one.", show_default=False)
    ],
    overrides: Overrides = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:
    """Change the learning rate, weight decay, optimizer settings (betas, eps, ...) or schedule of a saved state.

    [cyan]forgather checkpoint edit RUN learning_rate=1e-4 lr_scheduler=linear[/]

    The next [cyan]forgather resume[/] goes on with the edited values, unless its command line has others; [cyan]train
    resume_from_checkpoint=...[/] takes those of its own config and says which differ. The checkpoint as it was stays
    beside it as [cyan]step-....backup-1[/]: to undo the edit, remove the edited one and move the backup back.
    """
    words = check_overrides(overrides)
    if not words:
        raise ConfigError("checkpoint edit: nothing to change; give settings as key=value, such as learning_rate=1e-4")
    with only_json(as_json):
        from forgather_cli.optim.edit import edit_checkpoint

        reader = _reader(source)
        loaded = _composed(reader, words, trust_config)
        made = edit_checkpoint(reader, loaded.config, loaded.tree)
    if as_json:
        print_json({"path": str(reader.path), "backup": str(made.backup), "changes": _document(made.changes)})
        return
    for name, (before, after) in made.changes.items():
        typer.echo(f"{name}: {_shown(before)} -> {_shown(after)}")
    typer.echo(f"as it was: {made.backup}")
    if how := _how_to_resume(reader.path, words):
        typer.echo(how)
    typer.echo(str(reader.path))


def _how_to_resume(path: Path, words: list[str]) -> str | None:
    """What to do where a resume of the run would go on from another checkpoint than the edited one, at ``path``."""
    from forgather_cli.checkpoint.retention import resumed

    run = run_of(path)
    newest = None if run is None else resumed(run)
    if run is None or newest is None or newest.resolve() == path.resolve():
        return None
    command = ["forgather", "resume", str(run.root), f"resume_from_checkpoint={quoted(path.resolve())}", *words]
    return f"a plain forgather resume goes on from {newest.name}; to go on from the edited one: {shlex.join(command)}"


def _reader(source: Path) -> Reader:
    """The checkpoint, verified."""
    from forgather_cli.checkpoint.load import newest_valid, open_whole
    from forgather_cli.run_dir import RunDir

    if not (source / "checkpoints").is_dir():
        return open_whole(source)
    newest = newest_valid(RunDir(source))
    if newest is None:
        raise CheckpointError(f"{source}: has no checkpoints; give the directory of a run that has saved one")
    return newest


def _composed(reader: Reader, words: list[str], trust_config: bool) -> Loaded:
    """The checkpoint's own config with the changes. Raises ConfigError, also for a setting that no state holds."""
    from forgather_cli.config.decode import dump_tree
    from forgather_cli.config.load import load_resumed
    from forgather_cli.optim.edit import EDITABLE, saved_config

    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "config.yaml"
        saved.write_text(dump_tree(saved_config(reader)), encoding="utf-8")
        loaded = load_resumed(saved, words, reads=None if trust_config else EDITABLE)
    outside = sorted(path for path in loaded.given if path.split(".")[0] not in EDITABLE)
    if outside:
        raise ConfigError(
            [f"{path}: is not in a saved state; give it to forgather resume. Here: {_EDITABLE}" for path in outside]
        )
    return loaded


_EDITABLE = "learning_rate, weight_decay, optimizer.* and lr_scheduler"


def _document(changes: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {name: {"before": before, "after": after} for name, (before, after) in changes.items()}


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

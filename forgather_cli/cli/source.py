"""SOURCE of ``eval`` and ``generate``: a run, a checkpoint, or a model directory; and the config that goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forgather_cli.cli.common import quoted
from forgather_cli.errors import SetupError
from forgather_cli.run_dir import RunDir, step_of

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded

SourcePath = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A run (its newest checkpoint), a checkpoint, or a model directory.",
        show_default=False,
    ),
]


def check_source(source: Path) -> None:
    """Raise SetupError unless ``source`` can be a run, a checkpoint or a model directory."""
    if not source.is_dir():
        raise SetupError(f"{source}: no such directory; give a run, a checkpoint or a model directory")
    marks = ("config.yaml", "manifest.json", "config.json")
    if not any((source / mark).is_file() for mark in marks):
        raise SetupError(
            f"{source}: is no run (config.yaml), no checkpoint (manifest.json) and no model directory (config.json)"
        )


def run_of(source: Path) -> RunDir | None:
    """The run that a run directory, a checkpoint, or a checkpoint's model directory belongs to."""
    source = source.resolve()
    candidates = [source]
    if step_of(source) is not None:
        candidates.append(source.parent.parent)
    elif step_of(source.parent) is not None:
        candidates.append(source.parent.parent.parent)
    return next((RunDir(root) for root in candidates if (root / "config.yaml").is_file()), None)


def config_for(source: Path, overrides: list[str]) -> Loaded:
    """The run's config with overrides; for a model directory the default recipe with that model and its tokenizer."""
    run = run_of(source)
    if run is not None:
        from forgather_cli.config.resume import recompose

        return recompose(run, overrides)
    from forgather_cli.config.load import load_config

    where = quoted(source.resolve())
    model = ["model=pretrained", f"model.path={where}", f"data.tokenizer={where}"]
    return load_config("default", [*model, *overrides])

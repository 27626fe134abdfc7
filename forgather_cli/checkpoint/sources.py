"""Which models may be averaged, as far as their names tell. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forgather_cli.checkpoint.manifest import NAME
from forgather_cli.errors import CheckpointError, ConfigError


def check_sources(sources: Sequence[Path]) -> None:
    """Raise ConfigError for fewer than two models or the same one twice, CheckpointError for what is no model."""
    if len(sources) < 2:
        raise ConfigError(f"an average needs two models or more, got {len(sources)}; name more checkpoints")
    seen: dict[Path, Path] = {}
    for source in sources:
        if not source.is_dir():
            raise CheckpointError(f"{source}: no such directory; give checkpoints or model directories")
        if (source / "checkpoints").is_dir() and not is_checkpoint(source):
            raise CheckpointError(
                f"{source}: is a run; name its checkpoints, {source}/checkpoints/step-..., or use --last K {source}"
            )
        place = model_directory(source).resolve()
        if place in seen:
            same = "" if seen[place] == source else f", as {seen[place]}"
            raise ConfigError(f"{source}: is named twice{same}; an average counts each model once, leave one out")
        seen[place] = source


def model_directory(source: Path) -> Path:
    """Where the weights are of a checkpoint, or of a model directory."""
    return source / "model" if is_checkpoint(source) else source


def is_checkpoint(source: Path) -> bool:
    """True unless ``source`` is a model directory, or nothing."""
    return (source / NAME).is_file()

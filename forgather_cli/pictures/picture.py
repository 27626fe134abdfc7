"""What ``forgather logs plot`` was asked for, checked, drawn and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

from forgather_cli.errors import ConfigError, SetupError, did_you_mean
from forgather_cli.pictures import style
from forgather_cli.pictures.curves import Look, draw_curves
from forgather_cli.pictures.heatmap import Kind, draw_heatmap
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.records import Axis

SUFFIXES = (".png", ".svg")
_DPI = 120


def draw(runs: Sequence[RunDir], look: Look, heatmap: str | None, out: Path | None) -> Path:
    """Draw runs into ``out``, whose directory is made; returns where the picture is. Raises ConfigError, SetupError."""
    problems = []
    if look.axis not in get_args(Axis):
        problems.append(f"--x: must be step, tokens or time, got {look.axis!r}")
    if not 0 <= look.smooth < 1:
        problems.append(f"--smooth: is the weight of what came before, from 0 to below 1, got {look.smooth:g}")
    if heatmap is not None:
        if heatmap not in get_args(Kind):
            near = did_you_mean(heatmap, get_args(Kind))
            kinds = f"must be one of {', '.join(get_args(Kind))}, got {heatmap!r}"
            problems.append(f"--heatmap: {kinds}{';' if near else ''}{near}")
        given = {"--x": look.axis != "step", "--metric": look.metrics, "--smooth": look.smooth, "--log-y": look.log_y}
        unread = [name for name, value in given.items() if value]
        problems += [f"{name}: says nothing to --heatmap; leave one of them out" for name in unread]
    if problems:
        raise ConfigError(problems)
    path = out
    if path is None and len(runs) > 1:
        path = Path(f"{heatmap or 'plot'}.png")
    elif path is None:
        path = runs[0].plots / f"{heatmap or 'metrics'}.png"
    check_name(path, "-o")
    with style.drawing():
        figure = draw_curves(runs, look) if heatmap is None else draw_heatmap(runs, cast("Kind", heatmap))
        save(figure, path, "-o")
    return path


def check_name(path: Path, option: str) -> None:
    """Raise ConfigError for a name that no picture has; ``option`` gave it."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{option}: the picture's name must end in {' or '.join(SUFFIXES)}, got {path.name!r}")


def save(figure: Any, path: Path, option: str) -> None:
    """Write a picture, whose directory is made. Raises SetupError."""
    options: dict[str, Any] = {"pil_kwargs": {"optimize": True}}
    if path.suffix.lower() == ".svg":
        options = {"metadata": {"Date": None}}  # the same picture is the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=_DPI, **options)
    except OSError as error:
        raise SetupError(f"{option}: {path} cannot be written: {error.strerror}; choose another place") from error

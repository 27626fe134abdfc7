"""What ``forgather logs plot`` was asked for, checked, drawn and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from forgather_cli.errors import ConfigError, did_you_mean
from forgather_cli.report import style
from forgather_cli.report.curves import Look, draw_curves
from forgather_cli.report.heatmap import Kind, draw_heatmap
from forgather_cli.report.records import Axis
from forgather_cli.run_dir import RunDir


@dataclass(frozen=True)
class Asked:
    """Options as they were typed."""

    x: str = "step"
    metrics: tuple[str, ...] = ()
    smooth: float = 0.0
    log_y: bool = False
    heatmap: str | None = None


def draw(runs: Sequence[RunDir], asked: Asked, out: Path | None) -> Path:
    """Draw runs into ``out``; returns where the picture is. Raises ConfigError and SetupError."""
    if problems := _problems(asked):
        raise ConfigError(problems)
    path = style.check_suffix(out or _default(runs, asked))
    with style.drawing():
        if asked.heatmap is not None:
            figure = draw_heatmap(runs, cast("Kind", asked.heatmap))
        else:
            figure = draw_curves(runs, Look(cast("Axis", asked.x), asked.metrics, asked.smooth, asked.log_y))
        style.write(figure, path)
    return path


def _problems(asked: Asked) -> list[str]:
    problems = []
    if asked.x not in get_args(Axis):
        problems.append(f"--x: must be step, tokens or time, got {asked.x!r}")
    if not 0 <= asked.smooth < 1:
        problems.append(f"--smooth: is the weight of what came before, from 0 to below 1, got {asked.smooth:g}")
    if asked.heatmap is None:
        return problems
    if asked.heatmap not in get_args(Kind):
        near = did_you_mean(asked.heatmap, get_args(Kind))
        kinds = f"must be one of {', '.join(get_args(Kind))}, got {asked.heatmap!r}"
        problems.append(f"--heatmap: {kinds}{';' if near else ''}{near}")
    for name, given in (
        ("--x", asked.x != "step"), ("--metric", asked.metrics), ("--smooth", asked.smooth), ("--log-y", asked.log_y),
    ):  # fmt: skip
        if given:
            problems.append(f"{name}: says nothing to --heatmap; leave one of them out")
    return problems


def _default(runs: Sequence[RunDir], asked: Asked) -> Path:
    if len(runs) > 1:
        return Path(f"{asked.heatmap or 'plot'}.png")
    return runs[0].root / "plots" / f"{asked.heatmap or 'metrics'}.png"

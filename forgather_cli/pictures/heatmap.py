"""Heatmaps of the norm loggers: parameters by steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from forgather_cli.errors import SetupError
from forgather_cli.pictures import style
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.find import labels
from forgather_cli.runs.records import is_number, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["grad_norms", "parameter_norms", "spectral"]
_TITLES = {
    "grad_norms": "gradient norm of each parameter, after clipping",
    "parameter_norms": "norm of each parameter",
    "spectral": "spectral norm of each matrix",
}
_ALL_NAMED = 160  # rows, up to which each has its name
_MAX_RUNS = 4
_LAYER = re.compile(r"^(.*?layers\.\d+)\.")


@dataclass(frozen=True)
class Norms:
    """Values of one run: a row for each parameter in the model's order, a column for each step, NaN where missing."""

    run: str
    names: list[str]
    steps: list[int]
    values: list[list[float]]


def norms_of(run: RunDir, kind: Kind, name: str) -> Norms:
    """Read a norm logger's file; steps that were rolled back are left out. Raises SetupError where there is none."""
    path = run.gradient_norms if kind == "grad_norms" else run.parameter_norms
    if not path.is_file():
        callback = "grad_norms" if kind == "grad_norms" else "parameter_norms"
        raise SetupError(f"{run.root}: has no {path.name}; train with callbacks=full, or '+callbacks.{callback}={{}}'")
    key = "spectral_norms" if kind == "spectral" else "norms"
    records = {int(r["step"]): r[key] for r in read_records(path) if r.get(key) and not r.get("abandoned")}
    if not records:
        raise SetupError(f"{path}: holds no {key} yet; they are written at evaluations, or as the callback is set")
    names = list(dict.fromkeys(each for norms in records.values() for each in norms))
    steps = sorted(records)
    rows = [
        [float(value) if is_number(value := records[step].get(each)) else math.nan for step in steps] for each in names
    ]
    return Norms(name, names, steps, rows)


def draw_heatmap(runs: Sequence[RunDir], kind: Kind) -> Figure:
    """The figure: runs beside each other with one scale. Call inside ``style.drawing``. Raises SetupError."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if len(runs) > _MAX_RUNS:
        raise SetupError(f"--heatmap: shows up to {_MAX_RUNS} runs beside each other, got {len(runs)}; name fewer")
    found = [norms_of(run, kind, name) for run, name in zip(runs, labels(runs), strict=True)]
    rows = max(len(each.names) for each in found)
    size = 0.17 if rows <= _ALL_NAMED else 0.075  # inches
    figure = Figure(figsize=(5.2 + 3.6 * len(found), max(3.2, min(1.6 + size * rows, 40.0))), layout="constrained")
    places = figure.subplots(1, len(found), squeeze=False)[0]
    # from the smallest positive value, but no more than six powers of ten below the largest
    values = [value for each in found for row in each.values for value in row]
    positive = sorted(value for value in values if value > 0 and math.isfinite(value)) or [0.1, 1.0]
    top = positive[-1]
    bottom = max(positive[0], top * 1e-6)
    scale = LogNorm(bottom, top if top > bottom else bottom * 1.1)
    for axes, each in zip(places, found, strict=True):
        mesh = _draw(axes, each, scale)
        if len(found) > 1:
            axes.set_title(fill(each.run, 45))
    for axes in places[1:]:
        if found[0].names == found[-1].names:
            axes.tick_params(labelleft=False)
    bar = figure.colorbar(mesh, ax=list(places), location="top", fraction=0.05, aspect=50, pad=0.01)
    bar.outline.set_visible(False)
    short = top < 1000 * bottom  # than powers of ten alone would tell much of
    bar.ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if short else (1,)))
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.ax.xaxis.set_major_formatter(FuncFormatter(style.plain))
    where = f"{runs[0].root}   " if len(runs) == 1 else ""
    figure.suptitle(fill(f"{where}{_TITLES[kind]}", int(11 * figure.get_figwidth())), x=0.01, ha="left")
    return figure


def _draw(axes: Axes, norms: Norms, scale: Any) -> Any:
    import numpy as np
    from matplotlib import colormaps

    colours = colormaps["viridis"].with_extremes(bad="#DDDDDD")  # nothing measured, or 0
    values = np.ma.masked_invalid(np.where(np.array(norms.values) > 0, norms.values, np.nan))
    steps = norms.steps
    first, last = (steps[1] - steps[0], steps[-1] - steps[-2]) if len(steps) > 1 else (1, 1)
    edges = [(a + b) / 2 for a, b in pairwise([steps[0] - first, *steps, steps[-1] + last])]
    mesh = axes.pcolormesh(edges, range(len(norms.names) + 1), values, norm=scale, cmap=colours,
                           rasterized=values.size > 5000)  # fmt: skip
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    axes.spines[:].set_visible(False)
    _name_rows(axes, norms.names)
    return mesh


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """The parameters' names; of very many only the layers'. Lines between layers."""
    layers = [(_LAYER.match(name) or [name, ""])[1] for name in names]
    borders = [n for n in range(1, len(names)) if layers[n] != layers[n - 1]]
    for border in borders:
        axes.axhline(border, color="white", linewidth=0.9)
    short = [re.sub(r"^model\.", "", name) for name in names]
    if all(name.endswith(".weight") for name in short):
        short = [name.removesuffix(".weight") for name in short]
    if len(names) <= _ALL_NAMED:
        axes.set_yticks([n + 0.5 for n in range(len(names))], short)
        axes.tick_params(axis="y", length=0, labelsize=7.5)
        return
    starts = [0, *borders]
    ends = [*borders, len(names)]
    told = [(_LAYER.match(f"{short[a]}.") or [short[a], short[a]])[1] if layers[a] else short[a] for a in starts]
    axes.set_yticks([(a + b) / 2 for a, b in zip(starts, ends, strict=True)], told)
    axes.tick_params(axis="y", length=0, labelsize=8)

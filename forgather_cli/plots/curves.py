"""The picture of runs' metrics: a panel for each kind of metric, a colour for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forgather_cli.config.options import did_you_mean
from forgather_cli.errors import ConfigError
from forgather_cli.plots import style
from forgather_cli.plots.history import History, histories
from forgather_cli.plots.panel import PANELS, Look, Panel, draw_panel, panel_of
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.differences import differing
from forgather_cli.runs.find import settings_of
from forgather_cli.runs.records import metric_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_curves(runs: Sequence[RunDir], look: Look) -> Figure:
    """The figure of one or several runs. Call inside ``style.drawing``. Raises ConfigError and SetupError."""
    from matplotlib.figure import Figure

    found = histories(runs, look.axis)
    panels = _panels(found, look)
    figure = Figure(figsize=_size(len(panels), len(found)), layout="constrained")
    places = _grid(figure, len(panels))
    for panel, axes in zip(panels, places, strict=True):
        draw_panel(axes, panel, found, look)
    _scale_x(places, found, look)
    _legend(figure, places, found, _title(runs, found))
    return figure


def _panels(found: Sequence[History], look: Look) -> list[Panel]:
    names = list(dict.fromkeys(name for each in found for name in metric_names(each.records)))
    if not look.metrics:
        return [panel for panel in PANELS if {*panel.metrics, *panel.points} & set(names)]
    if problems := [_unknown(wanted, names) for wanted in look.metrics if wanted not in names]:
        raise ConfigError(problems)
    return [panel_of(name) for name in look.metrics]


def _unknown(wanted: str, names: list[str]) -> str:
    near = did_you_mean(wanted, names)
    logged = f"{'Logged' if near else 'logged'}: {', '.join(names)}"
    return f"--metric: nothing was logged as {wanted!r};{near} {logged}"


# -------------------------------------------------------------------------------------------------------------- layout


def _size(panels: int, runs: int) -> tuple[float, float]:
    """Inches."""
    legend = 0.22 * math.ceil(runs / 3) if runs > 1 else 0.0
    if panels == 1:
        return 8.0, 4.6 + legend
    return 10.0, (3.6 if panels % 2 else 0.0) + 2.6 * (panels // 2) + 0.5 + legend


def _grid(figure: Figure, count: int) -> list[Axes]:
    """Two in a row; of an odd number the first is as wide as both, and higher."""
    if count == 1:
        return [figure.subplots()]
    wide, rows = count % 2, count // 2
    grid = figure.add_gridspec(rows + wide, 2, height_ratios=[1.35] * wide + [1.0] * rows)
    first = [figure.add_subplot(grid[0, :])] if wide else []
    return [*first, *(figure.add_subplot(grid[wide + n // 2, n % 2]) for n in range(2 * rows))]


def _scale_x(places: Sequence[Axes], found: Sequence[History], look: Look) -> None:
    """One range for all panels, with round numbers of a handy unit."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    first, last = min(min(each.x) for each in found), max(max(each.x) for each in found)
    low = 0.0 if first < 0.1 * last else first
    high = last + 0.01 * (last - low) if last > low else last + 1
    size, unit = style.duration_unit(last) if look.axis == "time" else (1.0, "")
    steps = MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=look.axis != "time")
    ticks = [tick * size for tick in steps.tick_values(low / size, high / size) if low <= tick * size <= high]
    for axes in places:
        axes.set_xlabel({"step": "step", "tokens": "tokens", "time": f"running time ({unit})"}[look.axis])
        axes.set_xlim(low, high)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.si(value / size)))


# ---------------------------------------------------------------------------------------------------- title and legend


def _title(runs: Sequence[RunDir], found: Sequence[History]) -> str:
    recipes = {str(settings_of(run).get("recipe") or "") for run in runs} - {""}
    recipe = f"recipe {recipes.pop()}" if len(recipes) == 1 else ""
    if len(runs) == 1:
        return "   ".join(filter(None, (style.shortened(str(runs[0].root), 70), recipe)))
    keys = list(dict.fromkeys(key for each in differing(runs) for key in each))
    told = [key for key in keys if any(f"{key}=" in each.name for each in found)]
    by = f" by {' and '.join(told)}" if told else ""
    return f"{len(runs)} runs{by}{f', {recipe}' if recipe else ''}"


def _legend(figure: Figure, places: Sequence[Axes], found: Sequence[History], title: str) -> None:
    """The title, and below it a line for each run and what the marks mean.

    It is the legend's own: a title of the figure would stand where constrained layout puts the legend.
    """
    names = [style.shortened(each.name, 60) for each in found] if len(found) > 1 else []
    entries = [_entry(name, color=style.colour(n), linestyle=style.dash(n)) for n, name in enumerate(names)]
    entries += _marks(places, alone=len(found) == 1)
    longest = max((len(str(entry.get_label())) for entry in entries), default=0)
    room = int(12 * figure.get_figwidth())  # letters
    columns = max(1, min(len(entries), room // (longest + 7)))
    legend = figure.legend(handles=entries, title=title, loc="outside upper left", ncols=columns, alignment="left")
    legend.get_title().set_fontsize(12)


def _marks(places: Sequence[Axes], *, alone: bool) -> list[Any]:
    """What stands for what, of that which was drawn."""
    drawn = {str(line.get_label()) for axes in places for line in axes.get_lines()}
    entries = []
    if "eval_loss" in drawn and "loss" in drawn:
        if alone:
            entries.append(_entry("training", color=style.colour(0)))
        look = {"color": style.EVALUATION} if alone else {"color": style.GREY, "linestyle": ":"}
        entries.append(_entry("evaluation", linewidth=1.0, marker="o", markersize=5, **look))
    if any(label.endswith(", rolled back") for label in drawn):
        entries.append(_entry("rolled back", color=style.GREY, **style.ABANDONED))
    if "resumed" in drawn:
        entries.append(_entry("resumed", **style.RESUMED))
    return entries


def _entry(name: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=name, **{"linewidth": 2.2, **look})

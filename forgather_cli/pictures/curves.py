"""The picture of runs' metrics: a panel for each kind of metric, a colour for each run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from textwrap import fill
from typing import TYPE_CHECKING, Any

from forgather_cli.errors import SetupError
from forgather_cli.pictures import style
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.find import labels, settings_of
from forgather_cli.runs.records import Record, check_logged, is_number, metric_names, positions, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 4  # runs, up to which there are thin lines
_LETTERS = 12  # of a legend, for each inch of its width


@dataclass(frozen=True)
class Look:
    """Options as they were typed."""

    axis: str = "step"
    """One of ``Axis``."""
    metrics: tuple[str, ...] = ()
    """Instead of the usual panels."""
    smooth: float = 0.0
    log_y: bool = False


@dataclass(frozen=True)
class Panel:
    """What to draw into one system of axes."""

    title: str
    metrics: tuple[str, ...]
    """The first is the main line, the others are thin."""
    points: tuple[str, ...] = ()
    """Metrics with a mark at each value: evaluations."""
    unit: str = ""
    """``bytes`` and ``si`` choose how numbers are written."""
    note: str = ""
    """What the thin lines are."""
    noisy: bool = True
    """Worth smoothing."""


PANELS = (
    Panel("loss (nats per token)", ("loss",), ("eval_loss",)),
    Panel("bits per byte of text", ("bits_per_byte",), ("eval_bits_per_byte",)),
    Panel("gradient norm", ("grad_norm", "max_grad_norm"), note=", thin: the largest of each interval"),
    Panel("learning rate", ("learning_rate",), noisy=False),
    Panel("throughput (tokens per second)", ("tok_per_sec",), unit="si"),
    Panel("peak memory", ("peak_mem_allocated",), unit="bytes", noisy=False),
)


def draw_curves(runs: Sequence[RunDir], look: Look) -> Figure:
    """The figure of one or several runs. Call inside ``style.drawing``. Raises ConfigError and SetupError."""
    from matplotlib.figure import Figure

    found = [_history(run, name, look.axis) for run, name in zip(runs, labels(runs), strict=True)]
    logged = list(dict.fromkeys(name for each in found for name in metric_names(each.records)))
    check_logged(look.metrics, logged, "--metric")
    sources = sorted({name.removeprefix("eval_") for name in logged if "loss/" in name})
    every = [*PANELS, *(Panel(name, (name,), (f"eval_{name}",)) for name in sources)]
    panels = [panel for panel in every if {*panel.metrics, *panel.points} & set(logged)]
    if look.metrics:  # a panel for each alone
        panels = []
        for name in look.metrics:
            line, points = ((), (name,)) if name.startswith("eval_") else ((name,), ())
            unit = "bytes" if "mem" in name else "si" if name.startswith(("tok", "total", "flops")) else ""
            panels.append(Panel(name, line, points, unit))
    # two in a row; of an odd number the first is as wide as both, and higher
    wide, rows = len(panels) % 2, len(panels) // 2
    width = 10.0 if rows else 8.0
    names = [fill(each.name, int(_LETTERS * width) - 7) for each in found] if len(found) > 1 else []
    height = (3.6 * wide + 2.6 * rows + 0.5 if rows else 4.6) + 0.16 * sum(name.count("\n") + 1 for name in names)
    figure = Figure(figsize=(width, height), layout="constrained")
    cells: Any = [[0, 0]] * wide + [[n, n + 1] for n in range(wide, len(panels), 2)]
    placed = figure.subplot_mosaic(cells, height_ratios=[1.35] * wide + [1.0] * rows)
    places = [placed[n] for n in range(len(panels))]
    for panel, axes in zip(panels, places, strict=True):
        _draw_panel(axes, panel, found, look)
    _scale_x(places, found, look)
    _legend(figure, places, runs, names)
    return figure


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


def _legend(figure: Figure, places: Sequence[Axes], runs: Sequence[RunDir], names: Sequence[str]) -> None:
    """The title, and below it the ``names`` of several runs and what the marks mean.

    It is the legend's own: a title of the figure would stand where constrained layout puts the legend.
    """
    recipes = {str(settings_of(run).get("recipe") or "") for run in runs} - {""}
    recipe = f"recipe {recipes.pop()}" if len(recipes) == 1 else ""
    if len(runs) == 1:
        title = "   ".join(filter(None, (str(runs[0].root), recipe)))
    else:
        title = ", ".join(filter(None, (f"{len(runs)} runs", recipe)))
    room = int(_LETTERS * figure.get_figwidth())
    entries = [_entry(name, color=style.colour(n), linestyle=style.dash(n)) for n, name in enumerate(names)]
    entries += _marks(places, alone=not names)
    lines = [line for entry in entries for line in str(entry.get_label()).split("\n")]
    columns = max(1, min(len(entries), room // (max(map(len, lines), default=0) + 7)))
    legend = figure.legend(
        handles=entries, title=fill(title, room), loc="outside upper left", ncols=columns, alignment="left"
    )
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


# ------------------------------------------------------------------------------------------------------------ one panel


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[History], look: Look) -> None:
    """Draw all runs; lines are labelled by their metrics."""
    main, thin = panel.metrics[:1], panel.metrics[1:] if len(runs) <= _FEW else ()
    names = (*main, *thin, *panel.points)
    curves = {(n, name): _curve_of(run, name) for n, run in enumerate(runs) for name in names}
    finite = [y for curve in curves.values() for y in curve.y if math.isfinite(y)]
    size, unit = style.byte_unit(max(finite, default=0.0)) if panel.unit == "bytes" else (1.0, "")
    curves = {key: curve.divided(size) for key, curve in curves.items()}
    places = _together([curves[n, name] for n in range(len(runs)) for name in main])
    for (n, name), curve in curves.items():
        if name in panel.points:
            _draw_points(axes, n, curve, name, alone=len(runs) == 1, beside=bool(panel.metrics))
        elif name in thin:
            pen = {"linestyle": style.dash(n), "linewidth": 0.7, "alpha": 0.45, "zorder": 2.5}
            _draw_line(axes, curve, name, {"color": style.colour(n), **pen}, 0.0)
        else:
            place = places[n]  # its own among lines that lie on each other
            line, width = (style.dash(n), 1.6) if place is None else (style.stripe(place), 2.6)
            pen = {"color": style.colour(n), "linestyle": line, "linewidth": width, "zorder": 3 + 0.01 * n}
            _draw_line(axes, curve, name, pen, look.smooth if panel.noisy else 0.0)
    for at in runs[0].resumed if len(runs) == 1 else ():
        axes.axvline(at, label="resumed", zorder=1, **style.RESUMED)
    title = f"{panel.title} ({unit})" if unit else panel.title
    axes.set_title(title + panel.note if any(name in thin for _, name in curves) else title)
    _set_scale(axes, [curve.y for curve in curves.values()], panel, log=look.log_y and all(y > 0 for y in finite))


def _draw_line(axes: Axes, curve: Curve, name: str, pen: dict[str, Any], smooth: float) -> None:
    y = curve.y
    if smooth:
        axes.plot(curve.x, y, color=pen["color"], linewidth=0.8, alpha=0.25, zorder=2)
        y = style.smoothed(y, smooth)
    axes.plot(curve.x, y, label=name, marker="." if len(y) == 1 else None, **pen)
    for stretch in curve.abandoned:
        axes.plot(*zip(*stretch, strict=True), label=f"{name}, rolled back", color=pen["color"], alpha=0.9,
                  **style.ABANDONED)  # fmt: skip


def _draw_points(axes: Axes, n: int, curve: Curve, name: str, *, alone: bool, beside: bool) -> None:
    """A mark for each value. ``beside`` a training metric, whose colour it does not take in a picture ``alone``."""
    axes.plot(
        curve.x,
        curve.y,
        label=name,
        color=style.EVALUATION if alone and beside else style.colour(n),
        linewidth=1.0 if beside else 1.6,
        linestyle=":" if beside and not alone else "-",
        marker="o",
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=4,
    )
    for stretch in curve.abandoned:
        axes.plot(*zip(*stretch, strict=True), label=f"{name}, rolled back", color=style.colour(n), marker="o",
                  markersize=3.5, alpha=0.5, **style.ABANDONED)  # fmt: skip


def _set_scale(axes: Axes, curves: Sequence[Sequence[float]], panel: Panel, *, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter

    if log:
        axes.set_yscale("log")
    bottom, top, cut = style.limits(curves, log=log)
    axes.set_ylim(bottom, top)
    write = style.si if panel.unit == "si" else style.plain
    axes.yaxis.set_major_formatter(FuncFormatter(write))
    if log:
        axes.yaxis.set_minor_formatter(FuncFormatter(write if top < 20 * bottom else lambda value, place: ""))
    if cut is not None:
        axes.annotate(f"▲ up to {write(cut)}", (0.995, 0.985), xycoords="axes fraction", ha="right", va="top",
                      fontsize=8.5, color=style.GREY)  # fmt: skip


# ----------------------------------------------------------------------------------------------- what is drawn of a run


@dataclass(frozen=True)
class History:
    """A run as it is drawn."""

    name: str
    records: list[Record]
    x: list[float]
    """Where each record stands on the x axis."""
    resumed: list[float]
    """Where the run was gone on with."""


def _history(run: RunDir, name: str, axis: str) -> History:
    if not run.metrics.is_file():
        raise SetupError(f"{run.root}: has no {run.metrics.name}; nothing was logged there (callbacks.json writes it)")
    records = list(read_records(run.metrics))
    if not metric_names(records):
        raise SetupError(f"{run.metrics}: holds no metrics yet; wait for the first log, or leave the run out")
    x = positions(records, axis)
    # later starts fall between two records, by the time of their config files
    known = [(datetime.fromisoformat(str(r["time"])).timestamp(), at) for r, at in zip(records, x, strict=True)
             if "time" in r]  # fmt: skip
    starts = [run.later_config(n).stat().st_mtime for n in run.later_starts()]
    before = [bisect_right([time for time, _ in known], start) for start in starts]
    return History(name, records, x, sorted({known[n - 1][1] for n in before if 0 < n < len(known)}))


@dataclass(frozen=True)
class Curve:
    """One metric of one run; not a number where the run has logged none, so that the line has a gap."""

    x: list[float]
    y: list[float]
    abandoned: list[list[tuple[float, float]]]
    """Stretches that were rolled back."""

    def divided(self, size: float) -> Curve:
        back = [[(x, y / size) for x, y in stretch] for stretch in self.abandoned]
        return Curve(self.x, [y / size for y in self.y], back)


def _curve_of(run: History, name: str) -> Curve:
    curve = Curve([], [], [])
    is_open = False  # the last stretch that was rolled back goes on
    for x, record in zip(run.x, run.records, strict=True):
        value = float(record[name]) if is_number(record.get(name)) else math.nan
        if not record.get("abandoned"):
            is_open = False
            if name in record:
                curve.x.append(x)
                curve.y.append(value)
        elif not math.isnan(value):
            if not is_open or x < curve.abandoned[-1][-1][0]:  # back once more
                curve.abandoned.append([])
            curve.abandoned[-1].append((x, value))
            is_open = True
    return curve


def _together(curves: Sequence[Curve]) -> list[int | None]:
    """For each curve that lies on others its place among them, from 0; None for one that can be seen by itself."""
    places: list[int | None] = []
    for n, curve in enumerate(curves):
        below = [m for m in range(n) if _same(curve, curves[m])]
        for m in below[:1]:
            places[m] = places[m] or 0
        places.append(1 + max(places[m] or 0 for m in below) if below else None)
    return places


def _same(a: Curve, b: Curve) -> bool:
    """True if two curves cannot be told apart: within 1 % of their range at all places that both have."""
    of_b = dict(zip(b.x, b.y, strict=True))
    pairs = [(y, of_b[x]) for x, y in zip(a.x, a.y, strict=True) if x in of_b]
    values = [y for pair in pairs for y in pair if math.isfinite(y)]
    span = max(values, default=0.0) - min(values, default=0.0)
    return len(pairs) > 1 and all(abs(y - z) <= 0.01 * span for y, z in pairs)

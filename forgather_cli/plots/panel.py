"""One system of axes: the metrics of one unit, of all runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgather_cli.plots import style
from forgather_cli.plots.history import Curve, History, curve_of, together
from forgather_cli.runs.records import Axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_FEW = 4  # runs, up to which there are thin lines


@dataclass(frozen=True)
class Look:
    """What was asked for."""

    axis: Axis = "step"
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
    Panel("gradient norm", ("grad_norm", "max_grad_norm"), note=", thin: the largest of each interval"),
    Panel("learning rate", ("learning_rate",), noisy=False),
    Panel("throughput (tokens per second)", ("tok_per_sec",), unit="si"),
    Panel("peak memory", ("peak_mem_allocated",), unit="bytes", noisy=False),
)


def panel_of(metric: str) -> Panel:
    """A panel for one metric alone."""
    evaluated = metric.startswith("eval_")
    unit = "bytes" if "mem" in metric else "si" if metric.startswith(("tok", "total", "flops")) else ""
    return Panel(metric, () if evaluated else (metric,), (metric,) if evaluated else (), unit)


def draw_panel(axes: Axes, panel: Panel, runs: Sequence[History], look: Look) -> None:
    """Draw all runs; lines are labelled by their metrics."""
    main, thin = panel.metrics[:1], panel.metrics[1:] if len(runs) <= _FEW else ()
    names = (*main, *thin, *panel.points)
    curves = {(n, name): curve_of(run, name) for n, run in enumerate(runs) for name in names}
    finite = [y for curve in curves.values() for y in curve.y if math.isfinite(y)]
    size, unit = style.byte_unit(max(finite, default=0.0)) if panel.unit == "bytes" else (1.0, "")
    curves = {key: curve.divided(size) for key, curve in curves.items()}
    places = together([curves[n, name] for n in range(len(runs)) for name in main])
    for (n, name), curve in curves.items():
        if name in panel.points:
            _draw_points(axes, n, curve, name, alone=len(runs) == 1, beside=bool(panel.metrics))
        elif name in thin:
            _draw_line(axes, curve, name, _thin(n), 0.0)
        else:
            _draw_line(axes, curve, name, _main(n, places[n]), look.smooth if panel.noisy else 0.0)
    _mark_resumes(axes, runs)
    title = f"{panel.title} ({unit})" if unit else panel.title
    axes.set_title(title + panel.note if any(name in thin for _, name in curves) else title)
    _set_scale(axes, [curve.y for curve in curves.values()], panel, log=look.log_y and all(y > 0 for y in finite))


def _main(n: int, place: int | None) -> dict[str, Any]:
    """How the main line of run ``n`` looks; ``place`` is its own among lines that lie on each other."""
    dash, width = (style.dash(n), 1.6) if place is None else (style.stripe(place), 2.6)
    return {"color": style.colour(n), "linestyle": dash, "linewidth": width, "zorder": 3 + 0.01 * n}


def _thin(n: int) -> dict[str, Any]:
    return {"color": style.colour(n), "linestyle": style.dash(n), "linewidth": 0.7, "alpha": 0.45, "zorder": 2.5}


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


def _mark_resumes(axes: Axes, runs: Sequence[History]) -> None:
    """Of a single run: where it was gone on with."""
    for at in runs[0].resumed if len(runs) == 1 else ():
        axes.axvline(at, label="resumed", zorder=1, **style.RESUMED)


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

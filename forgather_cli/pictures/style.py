"""How pictures look: fonts, colours, numbers on axes, limits. No pyplot, so no display."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from forgather_cli.errors import SetupError

# Okabe and Ito's colours for all kinds of colour vision (jfly.uni-koeln.de/color), a brown for their yellow, which is
# too light for lines on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
"""Each goes with all colours, before the next one begins."""
GREY = "#666666"
EVALUATION = COLOURS[1]
"""Of a single run; evaluations of several have the runs' colours."""
ABANDONED: dict[str, Any] = {"linewidth": 1.3, "linestyle": (0, (1, 1.2))}
RESUMED: dict[str, Any] = {"color": GREY, "linewidth": 1.0, "linestyle": (0, (4, 3))}

_STYLE = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "figure.titlesize": 12,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text: smaller, and found by a search
    "svg.hashsalt": "forgather",  # the same picture is the same file
}


@contextmanager
def drawing(what: str = "logs plot") -> Iterator[None]:
    """Our style inside. Raises SetupError where matplotlib is missing; ``what`` needs it."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SetupError(f"{what}: needs matplotlib; pip install 'forgather[plot]'") from error
    with mpl.rc_context(cast("Any", _STYLE)):
        yield


def colour(n: int) -> str:
    return COLOURS[n % len(COLOURS)]


def dash(n: int) -> Any:
    return DASHES[n // len(COLOURS) % len(DASHES)]


def stripe(place: int) -> Any:
    """Of curves that lie on each other: the first is solid, each other one has its own part of a pattern on it."""
    return "-" if place == 0 else (4.0 * (4 - place % 4), (4.0, 12.0))


# -------------------------------------------------------------------------------------------------------------- numbers


def si(value: float, _: Any = None) -> str:
    """2500000 as 2.5M; small numbers as they are."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def plain(value: float, _: Any = None) -> str:
    return f"{value:.4g}"


def duration_unit(longest: float) -> tuple[float, str]:
    """Seconds per unit, and the unit in which ``longest`` seconds are a handy number."""
    return next(((size, name) for size, name in ((3600.0, "h"), (60.0, "min")) if longest >= 2 * size), (1.0, "s"))


def byte_unit(largest: float) -> tuple[float, str]:
    """Bytes per unit, and the unit in which ``largest`` bytes are a handy number."""
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next(((float(size), name) for size, name in units if largest >= size), (1.0, "bytes"))


# --------------------------------------------------------------------------------------------------------------- limits

_START = 0.1  # share of a curve that may be cut off
_FLAT = 4.0  # times as high as the rest: what is cut off


def limits(curves: Sequence[Sequence[float]], *, log: bool = False) -> tuple[float, float, float | None]:
    """(bottom, top, the value that is cut off or None) of an axis on which no single value flattens all others.

    The first tenth of the curves and outliers are cut off if the rest would take less than a quarter of the height.
    """
    scale = math.log10 if log else float
    shown = [[scale(y) for y in curve if math.isfinite(y) and (y > 0 or not log)] for curve in curves]
    values = sorted(y for curve in shown for y in curve)
    if not values:
        return (0.1, 1.0, None) if log else (0.0, 1.0, None)
    late = sorted(y for curve in shown for y in curve[math.ceil(_START * len(curve)) if len(curve) >= 10 else 0 :])
    low, high = _quantile(late, 0.01), _quantile(late, 0.99)
    room = (_FLAT - 1) * (high - low)  # for what lies outside
    bottom = values[0] if low - values[0] <= room or not room else low - room / 6
    top = values[-1] if values[-1] - high <= room or not room else high + room / 6
    margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 0.5
    cut = values[-1] if values[-1] > top + margin else None
    ends = (bottom - margin, top + margin)
    return (10 ** ends[0], 10 ** ends[1], None if cut is None else 10**cut) if log else (*ends, cut)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """An exponential moving average without the pull of its start (TensorBoard's; Adam's bias correction)."""
    result, average, total = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            total = weight * total + (1 - weight)
        result.append(average / total if total and math.isfinite(value) else math.nan)
    return result

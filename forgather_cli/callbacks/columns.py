"""Columns of the progress table: which metrics, how wide, how written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

SEPARATOR = "  "


@dataclass(frozen=True)
class Column:
    """One metric of a table: ``width`` in characters, ``fmt`` a Python format specification, or

    - ``si``: three digits with k, M, G, T, P, E (powers of 1000),
    - ``bytes``: KiB, MiB, GiB, TiB (powers of 1024) of a number of bytes,
    - ``duration``: h:mm:ss of a number of seconds,
    - ``flops``: GFLOP/s, TFLOP/s of a number of FLOP per second.
    """

    name: str
    label: str
    width: int = 9
    fmt: str = ".4g"
    suffix: str = ""
    wanted: bool = False
    """Named by the user: kept where the terminal is too narrow for all."""

    def text(self, value: Any) -> str:
        """The value as in a row; a number wider than the column is shortened to significant digits."""
        text = format_value(value, self.fmt) + self.suffix
        if len(text) <= self.width or not isinstance(value, int | float):
            return text
        return f"{value:.3g}{self.suffix}"


def _columns(*rows: tuple[str, str, int, str]) -> dict[str, Column]:
    return {name: Column(name, label, width, fmt) for name, label, width, fmt in rows}


STEP_COLUMNS = _columns(
    ("step", "step", 7, "d"),
    ("epoch", "epoch", 6, ".2f"),
    ("loss", "loss", 8, ".4f"),
    ("rewards/accuracies", "pair acc", 8, ".1%"),
    ("rewards/margins", "margin", 8, ".4f"),
    ("bits_per_byte", "bits/byte", 9, ".4f"),
    ("grad_norm", "grad norm", 9, ".3f"),
    ("learning_rate", "lr", 8, ".2e"),
    ("tok_per_sec", "tok/s", 6, "si"),
    ("step_time", "s/step", 7, ".3g"),
    ("mfu", "mfu", 6, ".1%"),
    ("peak_mem_allocated", "peak mem", 8, "bytes"),
    ("total_tokens", "tokens", 6, "si"),
)
"""In order of importance: a narrow terminal shows the first ones."""

FINAL_METRICS = {
    "train_runtime": Column("train_runtime", "time", fmt="duration"),
    "train_loss": Column("train_loss", "run's mean loss", fmt=".4f"),
    "epoch": Column("epoch", "epochs", fmt=".2f"),
    "total_tokens": Column("total_tokens", "tokens", fmt=",d"),
    "tokens_per_second": Column("tokens_per_second", "tokens per second", fmt=",.0f"),
    "train_steps_per_second": Column("train_steps_per_second", "steps per second", fmt=".2f"),
    "train_samples_per_second": Column("train_samples_per_second", "samples per second", fmt=".1f"),
    "effective_batch_size": Column("effective_batch_size", "effective batch", fmt="d", suffix=" sequences"),
    "flops_per_second": Column("flops_per_second", "compute", fmt="flops"),
}


TIMES = {
    "step_seconds": "steps",
    "data_seconds": "data",
    "first_step_seconds": "first step",
    "evaluation_seconds": "eval",
    "save_seconds": "saving",
    "sync_seconds": "sync",
    "exchange_seconds": "exchanges",
}
"""Where a run's time went: a final metric in seconds, and its label."""


def time_shares(seconds: Mapping[str, Any]) -> str:
    """``steps 81%, eval 12%``: the shares of ``TIMES``, largest first; empty where nothing is known.

    What took less than half a percent is left out.
    """
    known = {label: float(seconds[name]) for name, label in TIMES.items() if name in seconds}
    total = sum(known.values())
    shown = sorted(known.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{label} {100 * each / total:.0f}%" for label, each in shown if total and each >= total / 200)


def _si(value: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}" if abs(value) < 99.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.3g}E"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit != "GiB" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """h:mm:ss; hours are not folded into days."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _flops(value: float) -> str:
    text = _si(value)
    return f"{text} FLOP/s" if text[-1:].isdigit() else f"{text[:-1]} {text[-1]}FLOP/s"


_SPECIAL = {"si": _si, "bytes": _bytes, "duration": duration, "flops": _flops}


def format_value(value: Any, fmt: str) -> str:
    """``value`` by a Python format specification or one of ``Column``'s own; what does not fit it as plain text."""
    if isinstance(value, float) and value != value:
        return "nan"
    try:
        if fmt in _SPECIAL:
            return _SPECIAL[fmt](value)
        if fmt.endswith("d") and isinstance(value, float):
            value = round(value)
        return format(value, fmt)
    except (ValueError, TypeError, OverflowError):
        return str(value)


def merge(defaults: Mapping[str, Column], changes: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Column]:
    """Defaults with the user's changes; null removes."""
    merged = dict(defaults)
    for name, change in changes.items():
        if change is None:
            merged.pop(name, None)
            continue
        label = str(change.get("label", name))
        column = merged.get(name) or Column(name, label, width=max(9, len(label)))
        column = replace(column, wanted=True, **change)
        merged[name] = replace(column, width=max(column.width, len(column.label)))
    return merged


def fit(columns: Iterable[Column], width: int) -> list[Column]:
    """The columns that fit side by side into ``width`` characters: the user's, then defaults from the front."""
    columns = list(columns)
    chosen = [column for column in columns if column.wanted]
    room = width - sum(column.width + len(SEPARATOR) for column in chosen) + len(SEPARATOR)
    for column in columns:
        if column.wanted:
            continue
        room -= column.width + len(SEPARATOR)
        if room < 0:
            break
        chosen.append(column)
    return [column for column in columns if column in chosen]


def header(columns: Iterable[Column]) -> str:
    return SEPARATOR.join(f"{column.label:>{column.width}}" for column in columns)


def row(columns: Iterable[Column], values: Mapping[str, Any]) -> str:
    """One line; a metric that this record lacks shows a dash."""
    cells = ((column.text(values[column.name]) if column.name in values else "-", column.width) for column in columns)
    return SEPARATOR.join(f"{text:>{width}}" for text, width in cells)

"""How progress is shown: table rows and a bar below them on a screen, timestamped lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Any

from forgather_cli.callbacks.columns import SEPARATOR, STEP_COLUMNS, Column, duration, fit, format_value, header, row
from forgather_cli.callbacks.console import Stream, say, timestamp
from forgather_cli.callbacks.screen import Screen
from forgather_cli.terminal.folding import fold

Logs = Mapping[str, Any]


def evaluation_prefix(logs: Logs) -> str | None:
    """``eval``, or what else an evaluation's metrics begin with; None for records of training."""
    for name in logs:
        if name.endswith("_runtime") and name != "train_runtime":
            return name.removesuffix("_runtime")
    return "eval" if any(name.startswith("eval_") for name in logs) else None


def evaluation_entries(metrics: Logs) -> tuple[str, list[tuple[str, str]]]:
    """(prefix, (label, value) of each metric), important ones first."""
    prefix = evaluation_prefix(metrics) or "eval"
    values = {k.removeprefix(f"{prefix}_"): v for k, v in metrics.items() if k.startswith((f"{prefix}_", "tasks/"))}
    runtime, speed = values.pop("runtime", None), values.pop("samples_per_second", None)
    values = {name: value for name, value in values.items() if name not in ("tokens", "targets")}
    first = {name: STEP_COLUMNS[name] for name in ("loss", "rewards/accuracies", "rewards/margins", "bits_per_byte")}
    ordered = {**{k: values[k] for k in (*first, "perplexity") if k in values}, **values}
    columns = ((first.get(k) or Column(k, k), value) for k, value in ordered.items())
    entries = [(column.label, format_value(value, column.fmt)) for column, value in columns]
    if runtime is not None:
        entries.append(("took", f"{runtime:.2f}s"))
    if speed is not None:
        entries.append(("samples/s", f"{speed:.1f}"))
    return prefix, entries


class PlainDisplay:
    """One timestamped line per event, each metric with its label, for files and pipes. World rank 0 only."""

    interval = math.inf
    """Seconds between two calls of ``advance`` and of ``bar``."""

    def __init__(self, name: Stream, columns: Iterable[Column]) -> None:
        self._name = name
        self._columns = [column for column in columns if column.name != "step"]

    def start(self, step: int, max_steps: int, first: str) -> None:
        """Training begins at ``step``; ``max_steps`` <= 0 when the end is not known. ``first``: what is done now,
        until the first step is."""
        of = f" of {max_steps}" if max_steps > 0 else ""
        self.note(f"training from step {step}{of}, {first}; each loss is the mean since the line before")

    def advance(self, step: int) -> None: ...

    def bar(self, name: str, done: int, total: int | None) -> None: ...

    def hide(self, name: str) -> None: ...

    def log(self, logs: Logs, max_steps: int) -> None:
        """A training log with ``step`` in it."""
        of = f"/{max_steps}" if max_steps > 0 else ""
        shown = (column for column in self._columns if column.name in logs)
        pairs = (f"{_word(c.label)} {_word(format_value(logs[c.name], c.fmt))}{c.suffix}" for c in shown)
        self.note(f"step {logs['step']}{of} " + " ".join(pairs))

    def evaluation(self, step: int, metrics: Logs) -> None:
        prefix, entries = evaluation_entries(metrics)
        self.note(" ".join([f"step {step} {prefix}", *(f"{_word(label)} {value}" for label, value in entries)]))

    def final(self, entries: list[tuple[str, str]], shares: str) -> None:
        """The run's results as (label, value), and where its time went."""
        entries = [*entries, *([("the time went to", shares)] if shares else [])]
        width = max((len(label) for label, _ in entries), default=0)
        self.note("\n".join(["results", *(f"  {label:<{width}}  {value}" for label, value in entries)]))

    def note(self, text: str) -> None:
        say(f"{timestamp()} {text}", self._name)

    def close(self) -> None: ...


def _word(text: str) -> str:
    """One word for what a line of ``label value`` pairs is split at."""
    return text.replace(" ", "_") if text[:1].isalpha() else text.replace(" ", "")


class TableDisplay:
    """The same on a screen: rows of a table and, below them, a bar. Nothing it writes wraps, whatever the width."""

    interval = 0.2

    def __init__(self, screen: Screen, columns: Iterable[Column], header_interval: int) -> None:
        self._screen = screen
        self._columns = list(columns)
        self._header_interval = header_interval
        self._seen = {"tok_per_sec", "step_time"}  # from the first row on, though their first values come later
        self._header: list[Column] = []
        self._left_out: list[str] | None = None
        self._rows = 0
        self._is_training = False
        self._status = ""
        self._began = time.perf_counter()
        self._base: tuple[float, int] | None = None
        """Time and step of the first ``advance``: the first step's compilation does not belong in the ETA."""
        self._max_steps = 0

    def start(self, step: int, max_steps: int, first: str) -> None:
        self._began, self._base, self._max_steps = time.perf_counter(), None, max_steps
        self._is_training = True
        self._screen.bar("train", step, max_steps if max_steps > 0 else None, first)

    def advance(self, step: int) -> None:
        now = time.perf_counter()
        since, first = self._base = self._base or (now, step)
        self._screen.hide("eval")
        if self._is_training:
            status = self._status + duration(now - self._began)
            if step > first and self._max_steps > 0:
                left = (now - since) / (step - first) * max(self._max_steps - step, 0)
                status += f" eta {duration(left)}"
            self._screen.bar("train", step, self._max_steps if self._max_steps > 0 else None, status)

    def bar(self, name: str, done: int, total: int | None) -> None:
        """A bar of something else than training; ``total`` None: it is not known."""
        self._screen.bar(name, done, total)

    def hide(self, name: str) -> None:
        self._screen.hide(name)

    def log(self, logs: Logs, max_steps: int) -> None:
        self._seen.update(logs)
        columns = fit((c for c in self._columns if c.name in self._seen), self._screen.width)
        left_out = [c.label for c in self._columns if c.name in self._seen and c not in columns]
        if left_out != self._left_out:  # None before the first row
            self._left_out = left_out
            narrow = f"; not shown at {self._screen.width} columns: {', '.join(left_out)}" if left_out else ""
            for text in wrap(f"each loss is the mean since the row before{narrow}", self._screen.width):
                self._screen.line(text, "dim")
        if columns != self._header or self._rows >= self._header_interval:
            self._screen.line(header(columns), "bold cyan")
            self._header, self._rows = columns, 0
        self._screen.line(row(columns, logs))
        self._rows += 1
        loss = f"loss {format_value(logs['loss'], '.4f')} " if "loss" in logs else ""
        speed = f"{format_value(logs['tok_per_sec'], 'si')} tok/s " if "tok_per_sec" in logs else ""
        self._status = loss + speed or " "
        self.advance(logs["step"])

    def evaluation(self, step: int, metrics: Logs) -> None:
        self._screen.hide("eval")
        prefix, entries = evaluation_entries(metrics)
        start = row([c for c in self._columns if c.name == "step"], {"step": step}) + SEPARATOR
        text, names, loss = start + prefix, [column.name for column in self._header], dict(entries).get("loss", "")
        if loss and "loss" in names[1:] and names[0] == "step":  # a table stands above: below its losses
            before = self._header[: names.index("loss")]
            room = len(header(before)) - len(start)
            if room >= len(prefix):
                text = f"{start}{prefix:>{room}}"
                for column in self._header[len(before) :]:
                    if not entries or entries[0][0] not in (column.name, column.label):
                        break
                    text += f"{SEPARATOR}{entries.pop(0)[1]:>{column.width}}"
        for label, value in entries:
            more = f"{SEPARATOR}{label} {value}"
            if len(text + more) > self._screen.width:
                self._screen.line(text, "green")
                text = " " * (len(start) - len(SEPARATOR))
            text += more
        self._screen.line(text, "green")
        if not self._is_training:  # an evaluation by itself
            self._screen.close()

    def final(self, entries: list[tuple[str, str]], shares: str) -> None:
        entries = [*entries, *([("the time went to", shares)] if shares else [])]
        width = max((len(label) for label, _ in entries), default=0)
        self._screen.line("")
        for label, value in entries:
            for n, text in enumerate(fold(value, self._screen.width - width - 4)):
                self._screen.line(f"  {label if n == 0 else '':<{width}}  {text}", "bold")

    def note(self, text: str) -> None:
        self._screen.note(text)

    def close(self) -> None:
        """Take the bar off the screen; more lines may follow."""
        self._is_training = False
        self._screen.close()

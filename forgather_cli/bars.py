"""Bars on the terminal: which are open, so that every way out of a process gives the cursor back, and simple ones."""

from __future__ import annotations

import atexit
import sys
import time
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress

_open: set[Progress] = set()


def open_bar(bar: Progress) -> None:
    """Put a bar on the screen. An exit that closes nothing takes it away and gives the cursor back."""
    bar.start()
    _open.add(bar)


def close_bar(bar: Progress) -> None:
    """Take a bar off the screen; more lines may follow."""
    bar.stop()
    _open.discard(bar)


@atexit.register
def close_bars() -> None:
    """Take every bar off the screen, for an exit that closes nothing."""
    for bar in list(_open):
        close_bar(bar)


class Bar:
    """A bar on the terminal of standard error, while something takes long; nothing where there is no terminal, or where
    another bar stands.

    A context manager, which takes the bar away. ``unit``: what is counted; None: nothing is, and the bar shows the time
    that passes. ``after``: seconds before which there is none, since it would only flicker.
    """

    def __init__(
        self, what: str, unit: Literal["bytes", "items"] | None = "items", *, total: int | None = None,
        after: float = 0.5, shown: bool = True,
    ) -> None:  # fmt: skip
        self._what, self._unit = what, unit
        self._done, self._total = 0, total
        self._from = time.monotonic() + after
        self._shown = shown and sys.stderr.isatty()
        self._bar: Progress | None = None

    def update(self, done: int, total: int | None) -> None:
        """``total`` None: it is not known."""
        self._done, self._total = done, total
        if self._bar is None and self._shown and not _open and time.monotonic() >= self._from:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                ProgressColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns: list[ProgressColumn] = [TextColumn(self._what), BarColumn()]
            if self._unit is None:
                columns.append(TimeElapsedColumn())
            else:
                counts = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
                columns += [counts, TimeRemainingColumn()]
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total)
            open_bar(self._bar)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def add(self, count: int) -> None:
        """So many more are done."""
        self.update(self._done + count, self._total)

    def close(self) -> None:
        if self._bar is not None:
            close_bar(self._bar)
            self._bar = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

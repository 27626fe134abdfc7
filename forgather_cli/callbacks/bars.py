"""Bars on the terminal: which are open, so that every way out of a process gives the cursor back, and simple ones."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

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
    """A bar on the terminal of standard error, from its first update on; nothing where there is no terminal."""

    def __init__(self, what: str, *, of_bytes: bool = False) -> None:
        self._what, self._of_bytes = what, of_bytes
        self._bar: Progress | None = None

    def update(self, done: int, total: int | None) -> None:
        """``total`` None: it is not known."""
        if self._bar is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            count = DownloadColumn() if self._of_bytes else MofNCompleteColumn()
            columns = (TextColumn(self._what), BarColumn(), count, TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total)
            open_bar(self._bar)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._bar is not None:
            close_bar(self._bar)

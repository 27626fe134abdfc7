"""What is shown while something takes long: bars on the terminal, of which every way out of a process gives the cursor
back, and where there is none a line that says what is done.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from forgather_cli.terminal.folding import escaped, rich_console

if TYPE_CHECKING:
    from rich.progress import Progress

_open: set[Progress] = set()
SILENCE = 2.0
"""Seconds after which a command says what it does."""
_doing: list[str | Callable[[], str]] = []
"""The outermost first."""
_said: set[str] = set()


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


@contextlib.contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
    """Around what may take long and prints nothing: ``what`` is said on standard error, once in a process, when
    ``SILENCE`` has passed since the outermost of those around it began, unless a bar stands.

    ``what``: of one inside another it takes the place of the other's; called, it says what is done now, empty where the
    other's does. In the main thread. Of several ranks the first of each node speaks. Also a decorator.
    """
    _doing.append(what)
    with ExitStack() as stack:
        if len(_doing) == 1:
            over = threading.Event()
            stack.callback(over.set)
            threading.Thread(target=_say_what_is_done, args=(over,), name="forgather-doing", daemon=True).start()
        stack.callback(_doing.pop)
        yield


def _say_what_is_done(over: threading.Event) -> None:
    rank, local_rank = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK"))
    while not over.wait(SILENCE):
        with contextlib.suppress(Exception):  # the edge of a thread: a store of ranks, or who reads this, may be gone
            texts = (what if isinstance(what, str) else what() for what in reversed(_doing))
            text = next(filter(None, texts), "")
            if text in {*_said, ""} or _open or local_rank != "0":
                continue
            _said.add(text)
            line = escaped(f"{text} ..." if rank == "0" else f"rank {rank}: {text} ...")
            dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
            print(f"\x1b[2m{line}\x1b[0m" if dim else line, file=sys.stderr, flush=True)


class Bar:
    """A bar on the terminal of standard error, while something takes long; where there is no terminal the line of
    ``doing``. Where another bar stands nothing.

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
        self._is_wanted, self._is_moving = shown, False
        self._shown = shown and sys.stderr.isatty()
        self._bar: Progress | None = None
        self._inside = ExitStack()

    def update(self, done: int, total: int | None) -> None:
        """``total`` None: it is not known."""
        self._done, self._total = done, total
        if self._bar is None and self._shown and not _open and time.monotonic() >= self._from:
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

            columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn()]
            if self._unit is None:
                columns.append(TimeElapsedColumn())
            else:
                counts = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
                columns += [counts, TimeRemainingColumn()]
            self._bar = Progress(*columns, console=rich_console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=total)
            open_bar(self._bar)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        self._is_moving = True

    def add(self, count: int) -> None:
        """So many more are done."""
        self.update(self._done + count, self._total)

    def close(self) -> None:
        if self._bar is not None:
            close_bar(self._bar)
            self._bar = None

    def __enter__(self) -> Bar:
        if self._is_wanted:
            self._inside.enter_context(doing(lambda: self._what if self._is_moving else ""))
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()
        self.close()

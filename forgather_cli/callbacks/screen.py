"""Screens that show lines with bars below them: a terminal, and the output of a notebook's cell."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from forgather_cli.callbacks.console import Stream, console, is_notebook, is_terminal, printable
from forgather_cli.terminal.bars import close_bar, open_bar
from forgather_cli.terminal.folding import fold

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Screen(Protocol):
    """What is drawn on."""

    @property
    def width(self) -> int:
        """Characters of a line."""

    def line(self, text: str, style: str = "") -> None:
        """Add a line above the bars, cut to the width; ``style`` is rich's."""

    def note(self, text: str) -> None:
        """Add a line of lesser weight, whole."""

    def bar(self, name: str, done: int, total: int | None, status: str = "") -> None:
        """Show or move the bar of that name; ``total`` None: it is not known."""

    def hide(self, name: str) -> None:
        """Take one bar away."""

    def close(self) -> None:
        """Take all bars away; lines may follow."""


class Terminal:
    """Lines scroll, and bars stay below them. The caller's calls draw it, no thread of its own."""

    def __init__(self, name: Stream) -> None:
        self._name = name
        self._console = console(name)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    @property
    def width(self) -> int:
        return self._console.width

    def line(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style), no_wrap=True, overflow="crop", soft_wrap=False)

    def note(self, text: str) -> None:
        from rich.text import Text

        rows = fold(printable(text, self._name), self.width)
        self._console.print(Text("\n".join(rows), style="dim"), soft_wrap=True)

    def bar(self, name: str, done: int, total: int | None, status: str = "") -> None:
        if self._progress is None:  # an exit that closes nothing still gives the cursor back
            self._progress = _progress(self._name)
            open_bar(self._progress)
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, status=status)
        self._progress.update(self._tasks[name], completed=done, total=total, status=status)
        self._progress.refresh()

    def hide(self, name: str) -> None:
        if self._progress is not None and name in self._tasks:
            self._progress.remove_task(self._tasks.pop(name))
            self._progress.refresh()  # else the next line would draw it once more

    def close(self) -> None:
        if self._progress is not None:
            close_bar(self._progress)
        self._progress, self._tasks = None, {}


def _progress(name: Stream) -> Progress:
    from rich.constrain import Constrain
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column as Cell

    screen = console(name)

    class NarrowProgress(Progress):
        """Leaves the last columns free: a terminal echoes ^C there, and in a full line that begins another one."""

        def get_renderables(self) -> Iterable[Constrain]:
            for renderable in super().get_renderables():
                yield Constrain(renderable, max(screen.width - 5, 10))

    return NarrowProgress(
        TextColumn("{task.description}", markup=False, table_column=Cell(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Cell(ratio=1, min_width=4)),
        MofNCompleteColumn(table_column=Cell(no_wrap=True)),
        TextColumn("{task.fields[status]}", markup=False, table_column=Cell(no_wrap=True)),
        console=screen,
        auto_refresh=False,
        transient=True,
        expand=True,
    )


class Notebook:
    """The output of a notebook's cell: one text that is replaced, of the last lines and the bars.

    A kernel's stdout is no terminal, and rich would begin a new output with each line (rich 15, ``jupyter.py``).
    """

    width = 100
    _BAR = 40  # characters
    _LINES = 40

    def __init__(self) -> None:
        self._display_id = ""
        self._lines: deque[str] = deque(maxlen=self._LINES)
        self._bars: dict[str, str] = {}

    def line(self, text: str, style: str = "") -> None:
        self._lines.append(printable(text)[: self.width])
        self._draw()

    def note(self, text: str) -> None:
        self._lines.append(printable(text))
        self._draw()

    def bar(self, name: str, done: int, total: int | None, status: str = "") -> None:
        filled = self._BAR * min(done, total) // total if total else 0
        of = f"{done}/{total}" if total else f"{done}"
        self._bars[name] = f"{name} {'█' * filled}{'░' * (self._BAR - filled)} {of} {status}".rstrip()
        self._draw()

    def hide(self, name: str) -> None:
        if self._bars.pop(name, None) is not None:
            self._draw()

    def close(self) -> None:
        """What follows begins an output of its own."""
        self._bars = {}
        self._draw()
        self._display_id = ""
        self._lines.clear()

    def _draw(self) -> None:
        from IPython.display import display, update_display  # type: ignore[import-not-found]

        show = update_display if self._display_id else display
        self._display_id = self._display_id or uuid.uuid4().hex
        show({"text/plain": "\n".join([*self._lines, *self._bars.values()])}, raw=True, display_id=self._display_id)


def screen_of(name: Stream, wanted: bool | None = None) -> Screen | None:
    """The screen that a person sees the stream on; None for a file, a pipe and the like. ``wanted``: in any case, or
    never."""
    if wanted is False:
        return None
    if is_notebook() and isinstance(name, str) and not is_terminal(name):
        return Notebook()
    return Terminal(name) if wanted or is_terminal(name) else None

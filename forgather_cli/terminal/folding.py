"""Text for people in a terminal: rows end between words, and never inside a path, an id or a command; what others have
written drives none.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_PIECE = re.compile(
    # a command: variables, the program, a group's name, the command's, and arguments, which are no plain English words
    r"\(?(?:[A-Z_]+=(?:\$\([^)]*\)|\S*) )*(?:forgather|pip install)"
    r"(?: (?:config|recipe|control|checkpoint|runs|logs|diloco|cache|data)(?= [a-z]))?(?: [a-z_]+)?"
    r"(?:(?<![,;:]) (?!\()(?:'[^']*'\S*|\S*[^a-z\s,;:.)]\S*))*[,;:.)]*"
    r"|\S+"
)
"""What one copies, or a word."""


def escaped(text: str) -> str:
    """``text`` with escapes for what a terminal obeys, but for tabs and ends of lines: it may be of a file, a name or a
    model of anybody's.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: found[0].encode("unicode_escape").decode(), text)


class Escaped(logging.Formatter):
    """Of log records."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def rich_console(**settings: Any) -> Console:
    """A console of rich's that draws texts ``escaped``, whoever has made what it draws."""
    from rich.console import Console

    class Escaping(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for part in super().render(*args, **kwargs):
                yield part if part.control else part._replace(text=escaped(part.text))

    return Escaping(**settings)


def fold(text: str, width: int, indent: str = "") -> list[str]:
    """The rows of ``text`` in a terminal of ``width`` columns, with ``indent`` before those that go on below. A piece
    that is wider has a row of its own, which the terminal wraps by itself and gives back whole when it is copied.
    """
    rows = []
    for line in text.split("\n"):
        row, end = "", 0
        for found in _PIECE.finditer(line):
            longer = row + line[end : found.end()]
            if row.strip() and _cells(longer) > width:
                rows.append(row)
                longer = found.group()
                longer = indent + longer if _cells(indent + longer) <= width else longer
            row, end = longer, found.end()
        rows.append(row)
    return rows


def show_all_text() -> None:
    """Have standard output and standard error write escapes for what their encoding lacks, and for what is no UTF-8 in
    the name of a file: for a terminal that cannot show a letter nothing fails. Warnings without a log are ``Escaped``.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Escaped())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # and no notebook's
            stream.reconfigure(errors="backslashreplace")


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print ``text`` to standard output, or ``stream``: folded in a terminal, elsewhere as it is."""
    stream = stream or sys.stdout
    print(folded(text, stream), file=stream, flush=True)


def folded(text: str, stream: TextIO) -> str:
    """``text`` as ``tell`` prints it."""
    text = escaped(text)
    return "\n".join(fold(text, shutil.get_terminal_size().columns)) if stream.isatty() else text


def _cells(text: str) -> int:
    """The columns that ``text`` takes in a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)

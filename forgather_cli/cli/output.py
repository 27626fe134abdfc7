"""How commands print: tables, JSON, numbers for people, and what a model writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.documents.regular_files import write_whole
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.run_dir import shown
from forgather_cli.terminal.folding import fold, rich_console, tell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from forgather_cli.inference.generation import Generator
    from forgather_cli.inference.generation import Text as Written

NO_TERMINAL = 100_000  # columns where nobody looks: a pipe gets every value whole, in one line
_GAP = "   "  # between columns
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def console(*, stderr: bool = False) -> Console:
    """A rich console that prints text as it is, to the width of the terminal; where it is none, no line ends early."""
    stream = sys.stderr if stderr else sys.stdout
    return rich_console(file=stream, highlight=False, markup=False, width=None if stream.isatty() else NO_TERMINAL)


@dataclass(frozen=True)
class Col:
    """A column of a table."""

    title: str
    right: bool = False
    style: str = ""
    fold: bool = False
    """Sentences and lists: their words go on below themselves where the terminal is too narrow."""
    copied: bool = False
    """Ids, paths and commands: where the terminal is too narrow, they stand on lines of their own."""
    droppable: int = 0
    """Where that is not enough, the columns with the largest number are left out first, and those with 0 last."""


def print_table(columns: Sequence[Col], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Print rows under titles. No word is cut or broken: in a terminal that is too narrow sentences fold, then what is
    copied leaves the row, widest first, then columns are left out, of which a line below tells.
    """
    console().print(table_of(columns, rows, styles), soft_wrap=True)


def table_of(columns: Sequence[Col], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Text:
    """What ``print_table`` prints."""
    from rich.cells import cell_len
    from rich.text import Text

    screen, titles = console(), [column.title for column in columns]
    texts_of = list(zip(titles, *rows, strict=True))
    whole = [max(map(cell_len, texts)) for texts in texts_of]
    widths = [
        max(map(_longest_word, texts)) if column.fold else width
        for column, texts, width in zip(columns, texts_of, whole, strict=True)
    ]
    kept, apart = list(range(len(columns))), list[int]()

    def room() -> int:
        """Characters that rows leave free; below 0 they are too wide."""
        return screen.width - 2 - (2 if apart else 0) - sum(widths[n] + len(_GAP) for n in kept) + len(_GAP)

    while room() < 0 and (copied := [n for n in kept if columns[n].copied]):
        apart = sorted([*apart, widest := max(copied, key=widths.__getitem__)])
        kept.remove(widest)
    while room() < 0 and len(kept) > 1:
        kept.remove(max(kept if apart else kept[1:], key=lambda n: (columns[n].droppable, n)))
    folded = sorted((n for n in kept if widths[n] < whole[n]), key=lambda n: whole[n] - widths[n])
    for left, n in zip(range(len(folded), 0, -1), folded, strict=True):
        widths[n] += min(whole[n] - widths[n], max(room(), 0) // left)

    def lines(texts: Sequence[str], style: str) -> list[Text]:
        own = [Text(texts[n], columns[n].style) for n in apart]
        row = _row([texts[n] for n in kept], [columns[n] for n in kept], [widths[n] for n in kept])
        first, second = (own, row) if 0 in apart else (row, own)
        return [Text(style=style).append(line) for line in [*first, *(Text("  ").append(line) for line in second)]]

    rule = max(screen.width - 2 - room(), *(cell_len(titles[n]) for n in apart), 0)
    page = _page(
        [*lines(titles, "bold"), Text("─" * rule)]
        + [line for n, row in enumerate(rows) for line in lines(row, styles[n] if styles else "")]
    )
    if left_out := [title for n, title in enumerate(titles) if n not in kept + apart]:
        how = "a wider terminal or a pipe shows them"
        note = Text(f"not shown at {screen.width} columns: {', '.join(left_out)}; {how}", style="dim")
        page.append("\n").append(Text("\n").join(note.wrap(screen, screen.width)))
    return page


def print_facts(facts: Mapping[str, str | Path]) -> None:
    """Print labels with their values behind them. What finds no room goes on below; no path or command is broken."""
    from rich.cells import cell_len
    from rich.text import Text

    screen = console()
    label = max(map(cell_len, facts), default=0)
    room = screen.width - 2 - label - len(_GAP)
    lines = []
    for name, value in facts.items():
        text = shown(value) if isinstance(value, Path) else value
        rows = [" " * label + _GAP + row for row in fold(text, room)]
        if max(map(cell_len, rows)) > screen.width - 2:
            rows = [" " * label, *fold(text, screen.width - 2)]
        lines += [Text(name, "bold").append(rows[0][cell_len(name) :], "not bold"), *map(Text, rows[1:])]
    screen.print(_page(lines), soft_wrap=True)


def _row(texts: Sequence[str], columns: Sequence[Col], widths: Sequence[int]) -> list[Text]:
    """The lines of one row."""
    from rich.text import Text

    parts = []
    for text, column, width in zip(texts, columns, widths, strict=True):
        cell = Text(text, column.style)
        parts.append(list(cell.wrap(console(), max(width, _longest_word(text)))) if column.fold else [cell])
    lines = []
    for number in range(max(map(len, parts), default=0)):
        cells = [part[number] if number < len(part) else Text() for part in parts]
        for cell, column, width in zip(cells, columns, widths, strict=True):
            blank = max(width - cell.cell_len, 0)
            cell.pad_left(blank) if column.right else cell.pad_right(blank)
        lines.append(Text(_GAP).join(cells))
    return lines


def _longest_word(text: str) -> int:
    """The characters on a terminal that the longest word of a text takes."""
    from rich.cells import cell_len

    return max(map(cell_len, text.split()), default=0)


def _page(lines: Iterable[Text]) -> Text:
    """Lines between two blank ones, with nothing behind their last words; whoever draws it breaks none."""
    from rich.text import Text

    page = Text(no_wrap=True, overflow="ignore")
    for line in lines:
        line.rstrip()
        page.append("\n").append(" " if line else "").append(line)
    return page.append("\n")


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print the one document of ``--json``; not-a-number becomes null, since JSON has none."""
    encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
    print(json_text(value, indent, ensure_ascii=encoding != "utf8"), flush=True)


def json_text(value: Any, indent: int | None = 2, *, ensure_ascii: bool = False) -> str:
    """JSON of a value; not-a-number becomes null."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False, default=str)
    return text.translate({code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)})  # others that a terminal obeys


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and value - value != 0 else value


@contextlib.contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """While work is done for ``--json``, what it prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def check_answerable(command: str, option: str, *, as_json: bool) -> None:
    """Raise ConfigError where nobody can answer what ``command`` asks; with ``option`` it does not ask."""
    if as_json or not sys.stdin.isatty():
        raise ConfigError(f"{command}: asks first, and nobody can answer here; use {option}")


def ask(question: str) -> None:
    """End the command with 1 unless the answer is yes."""
    if not typer.confirm(question):
        typer.echo("nothing was done", err=True)
        raise typer.Exit(1)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C inside is a KeyboardInterrupt, which ends the command with 130 and no traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_DFL:  # and not ignored, as in a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)


def writable(path: Path, option: str) -> None:
    """Raise ConfigError unless a file can be written at ``path``, which ``option`` names."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        reason = "is a directory" if path.is_dir() else "cannot be written" if folder.is_dir() else "has no folder"
        raise ConfigError(f"{option}: {path} {reason}; name a file in a folder that exists and may be written")


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document, whole or not at all. Raises SetupError."""
    write_file(path, json_text(value) + "\n")


def write_file(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises SetupError."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise SetupError(f"{path}: cannot be written: {error.strerror}; choose another file") from error


def human(number: float | None, letters: str = "KMBT") -> str:
    """A count with three digits and a letter for thousands and so on: 3.25M; a dash for None."""
    if number is None:
        return "-"
    for power, letter in reversed(list(enumerate(letters, start=1))):
        if abs(number) >= 1000**power * 0.9995:
            return f"{number / 1000**power:.3g}{letter}"
    return f"{number:.4g}"


def human_flops(number: float) -> str:
    """Floating-point operations with SI's letters: 4.64 GFLOP."""
    text = human(number, "KMGTPE")
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def human_bytes(number: float | None) -> str:
    """Bytes in KiB, MiB, GiB: 12.4 MiB; a dash for None."""
    if number is None:
        return "-"
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(number) >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def human_seconds(seconds: float | None) -> str:
    """Seconds as 1h02m, 3m05s or 4.2s; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def local_time(moment: str) -> str:
    """A moment in ISO format as people are shown it; as it is where it is none."""
    from forgather_cli.callbacks.console import TIME

    try:
        return datetime.fromisoformat(moment).astimezone().strftime(TIME)
    except ValueError:
        return moment


def on_screen(text: str) -> str:
    """``text`` as it may go to standard output: no bytes of a model's drive a terminal."""
    from forgather_cli.callbacks.console import printable

    if sys.stdout.isatty():
        return printable(text, "stdout")
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


def show(text: str) -> None:
    """Write a piece of a text now."""
    typer.echo(on_screen(text), nl=False)
    sys.stdout.flush()


def tell_of_limit(model: Generator, texts: Iterable[Written]) -> None:
    """Say where a text ended since the model knows no more positions, and not since it was done."""
    cut = sum(text.finish_reason == "limit" for text in texts)
    if cut:
        what = "the text ends" if cut == 1 else f"{cut} texts end"
        tell(f"note: {what} at token {model.limit} (prompt and text), where the model's positions end", sys.stderr)

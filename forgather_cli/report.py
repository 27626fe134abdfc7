"""How an error is shown at the edge of a process: one message, no traceback, every problem on a line of its own."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from forgather_cli.errors import ConfigError, ForgatherError

if TYPE_CHECKING:
    from rich.text import Text


def report_error(error: ForgatherError, stream: IO[str] | None = None) -> None:
    """Write the message to ``stream`` (standard error by default), in colour on a terminal."""
    stream = stream or sys.stderr
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    if stream.isatty():
        _in_colour(problems, stream)
    else:
        print(*_plain(problems), sep="\n", file=stream, flush=True)


def _plain(problems: list[str]) -> list[str]:
    if len(problems) == 1:
        return [f"error: {problems[0]}"]
    return [f"error: {len(problems)} config mistakes", *(f"  - {problem}" for problem in problems)]


def _in_colour(problems: list[str], stream: IO[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    head, *rest = _plain(problems)
    console.print(Text("error: ", style="bold red"), _styled(head.removeprefix("error: ")), sep="")
    table = Table.grid(padding=(0, 1))
    for line in rest:
        table.add_row(Text("  •", style="red"), _styled(line.removeprefix("  - ")))
    if rest:
        console.print(table)


def _styled(problem: str) -> Text:
    """The setting in bold, what to do in green."""
    from rich.text import Text

    text = Text(problem)
    setting, colon, _ = problem.partition(": ")
    if colon and " " not in setting:
        text.stylize("bold", 0, len(setting))
    todo = problem.rfind("; ")
    if todo >= 0:
        text.stylize("green", todo + 2)
    return text

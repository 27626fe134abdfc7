"""How an error is shown at the edge of a process: one message, every problem on a line of its own.

A traceback is shown for errors that are not made for users, and for those of users' own code.
"""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from forgather_cli.errors import ConfigError, ForgatherError
from forgather_cli.launch.exit_status import FAILED, ExitStatus, Kind

if TYPE_CHECKING:
    from rich.text import Text


_SCREEN = 40  # lines of a traceback


def report_error(error: ForgatherError) -> None:
    """Write the message to standard error, in colour on a terminal."""
    _report(error.problems if isinstance(error, ConfigError) else [str(error)], sys.stderr)


def report_failure(status: ExitStatus, stream: IO[str] | None = None, *, rank_named: bool = False) -> None:
    """Write why a rank failed. ``rank_named``: where the message is not about settings, say which rank it was."""
    stream = stream or sys.stderr
    if status.kind == Kind.ERROR and rank_named:
        print(f"rank {status.rank} failed:", file=stream)
    if status.kind == Kind.CUT:
        print(status.message, file=stream, flush=True)
    elif status.kind != Kind.ERROR:
        named = rank_named and status.kind == Kind.MISTAKE and status.code == FAILED
        message = f"rank {status.rank}: {status.message}" if named else status.message
        _report([message] if named else list(status.problems) or [message], stream)
    if status.traceback and status.kind in (Kind.ERROR, Kind.MISTAKE):
        lines = status.traceback.rstrip().splitlines()
        left_out = len(lines) - _SCREEN
        if left_out > 0:
            lines[3 : 3 + left_out] = [f"  ... {left_out} lines, which are in the log ..."]
        print("\n".join(lines), file=stream, flush=True)


def _report(problems: list[str], stream: IO[str]) -> None:
    head, rest = (f"{len(problems)} config mistakes", problems) if len(problems) > 1 else (problems[0], [])
    if not stream.isatty():
        print(f"error: {head}", *(f"  - {problem}" for problem in rest), sep="\n", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    console.print(Text("error: ", style="bold red"), _styled(head), sep="")
    table = Table.grid(padding=(0, 1))
    for problem in rest:
        table.add_row(Text("  •", style="red"), _styled(problem))
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

"""How an error is shown at the edge of a process: one message, every problem on a line of its own.

A traceback is shown for errors that are not made for users, and for those of users' own code.
"""

from __future__ import annotations

import re
import shutil
import sys
from typing import IO

from forgather_cli.errors import ConfigError, ForgatherError
from forgather_cli.launch.exit_status import FAILED, ExitStatus, Kind
from forgather_cli.terminal.folding import escaped, fold, rich_console

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
        print(escaped(status.message), file=stream, flush=True)
    elif status.kind != Kind.ERROR:
        named = rank_named and status.kind == Kind.MISTAKE and status.code == FAILED
        message = f"rank {status.rank}: {status.message}" if named else status.message
        _report([message] if named else list(status.problems) or [message], stream)
    if status.traceback and status.kind in (Kind.ERROR, Kind.MISTAKE):
        lines = status.traceback.rstrip().splitlines()
        left_out = len(lines) - _SCREEN
        if left_out > 0:
            lines[3 : 3 + left_out] = [f"  ... {left_out} lines, which are in the log ..."]
        print(escaped("\n".join(lines)), file=stream, flush=True)


def _report(problems: list[str], stream: IO[str]) -> None:
    problems = [*map(escaped, problems)]
    head, rest = (f"{len(problems)} config mistakes", problems) if len(problems) > 1 else (problems[0], [])
    if not stream.isatty():
        lines = [f"error: {head}", *(f"  - {problem}" for problem in rest)]
        print("".join(f"{line}\n" for line in lines), end="", file=stream, flush=True)  # in one write
        return
    from rich.text import Text

    console = rich_console(file=stream, highlight=False)
    width = shutil.get_terminal_size().columns
    for begin, below, problem in (("error: ", "", head), *(("  • ", "    ", problem) for problem in rest)):
        text = Text("\n".join(fold(begin + problem, width, below)))
        text.stylize("bold red", 0, len(begin))
        if setting := re.compile(r"\S+:(?=\s)").match(text.plain, len(begin)):
            text.stylize("bold", setting.start(), setting.end() - 1)
        if todo := re.search(r".*;\s", text.plain, re.DOTALL):  # what to do
            text.stylize("green", todo.end())
        console.print(text, soft_wrap=True)

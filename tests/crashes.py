"""Runs of a crash campaign that start no interpreters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crash_job import Job
from forks import Program
from program import Process


def forked(words: Sequence[str], environment: dict[str, str], output: Path) -> int:
    """A run that nothing interrupts need not start interpreters, as those do that are killed."""
    with Process(*words, env=environment) as job:
        code = job.finish()
    output.write_text(job.output)
    return code


class Forked(Job):
    """A job whose launcher and ranks are forks of a process that has imported torch."""

    def _start(self, command: list[str], environment: dict[str, str]) -> Program:  # type: ignore[override]
        program = Program(tuple(command), str(Path.cwd()), environment, file=str(self._output))
        program.stdout.close()
        return program

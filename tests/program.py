"""The program as users run it: its main in this process, or a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import pytest
from forks import fork

from forgather_cli.cli import app


def forgather(*words: str) -> int:
    """Run ``forgather WORDS`` in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["forgather", *words])
        with pytest.raises(SystemExit) as ended:
            app.main()
    return int(ended.value.code or 0)


class Process:
    """``forgather WORDS`` as a process on one thread, output and errors in one pipe; or another module, or code.

    The program is forked from a process that has imported torch; ``cold`` starts an interpreter for it, as modules and
    code always do: where the start itself is what a test is about.
    """

    def __init__(
        self,
        *words: str,
        cwd: Path | None = None,
        code: str = "",
        module: str = "",
        env: Mapping[str, str] | None = None,
        cold: bool = False,
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        self.process: subprocess.Popen[str] | _Forked
        if code or module or cold:
            command = ["-c", code] if code else ["-m", module or "forgather_cli", *words]
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                cwd=cwd,
            )
        else:
            self.process = _Forked(words, str(cwd or Path.cwd()), environment)
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> str:
        """The first line that matches; fails when the output ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line matches {pattern!r} in:\n{self.output}")

    def finish(self) -> int:
        """Read to the end; returns the exit code."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        self.process.stdout.close()
        return self.process.wait(timeout=60)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.finish()


class _Forked:
    """What tests use of ``subprocess.Popen``, of a forked process."""

    def __init__(self, words: tuple[str, ...], directory: str, environment: dict[str, str]) -> None:
        ours, theirs = Pipe(duplex=False)
        self._process = fork(_program, theirs, words, directory, environment, daemon=False)
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("forgather", timeout or 0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _program(output: Connection, words: tuple[str, ...], directory: str, environment: dict[str, str]) -> NoReturn:
    """Become what ``python -m forgather_cli WORDS`` is."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [directory, *dict.fromkeys([*filter(None, added), *sys.path])]
    sys.argv = ["forgather", *words]
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding="utf-8", errors="backslashreplace", write_through=True)
    from forgather_cli.__main__ import run

    run()

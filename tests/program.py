"""The program as users run it: its main in this process, or a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forks import Program, prove_in_forks

from forgather_cli.cli import app
from forgather_cli.launch.processes import is_running

SMALL = [
    "model=nano", "precision=fp32", "data=synthetic", "seq_len=16", "num_samples=64", "num_eval_samples=4",
    "global_batch_size=4", "callbacks=minimal", "logging_steps=1", "warmup_steps=1", "device=cpu",
]  # fmt: skip
"""Words for a run whose steps take milliseconds."""


def forgather(*words: str) -> int:
    """Run ``forgather WORDS`` in this process; returns its exit code."""
    if words[:1] == ("finalize",):
        prove_in_forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["forgather", *words])
        with pytest.raises(SystemExit) as ended:
            app.main()
    return int(ended.value.code or 0)


class Result(NamedTuple):
    """What a command left: exit code, what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Result:
    """What ``forgather WORDS`` in this process prints."""
    capsys.readouterr()
    return Result(forgather(*words), *capsys.readouterr())


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The output of a command that succeeds."""
    done = printed(capsys, *words)
    assert done.code == 0, done.err
    return done.out


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON document of a command that succeeds."""
    return json.loads(shown(capsys, *words, "--json"))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The errors of a command that ends with 2."""
    done = printed(capsys, *words)
    assert done.code == 2, done
    return done.err


def write(path: Path | str, text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def modules_after(code: str, *words: str, cwd: Path | None = None) -> set[str]:
    """What a new interpreter has imported once it has run ``code`` with ``words`` as its arguments."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def nobody_runs(pids: Collection[int], seconds: float = 120.0) -> bool:
    """True once none of these processes runs."""
    until = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def until(condition: Callable[[], object], pause: float = 0.02) -> None:
    """Wait for what must come within two minutes."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause)


class Process:
    """``forgather WORDS`` as a process on one thread, output and errors in one pipe; or another module, or code.

    It and ranks that it starts are forked from a process that has imported torch; ``cold`` starts interpreters instead,
    where the start itself is what a test is about.
    """

    def __init__(
        self,
        *words: str,
        cwd: Path | None = None,
        code: str = "",
        module: str = "forgather_cli",
        env: Mapping[str, str] | None = None,
        cold: bool = False,
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        self.process: subprocess.Popen[str] | Program
        command = ("-c", code, *words) if code else ("-m", module, *words)
        if cold:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=environment, cwd=cwd,
            )  # fmt: skip
        else:
            self.process = Program(command, str(cwd or Path.cwd()), environment)
        self.lines: list[str] = []

    def read_until(self, pattern: str) -> str:
        """The first line that matches; fails when the output ends before."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line matches {pattern!r} in:\n{self.output}")

    def until(self, condition: Callable[[], object], pause: float = 0.01) -> None:
        """Wait for what must come while it runs."""
        while not condition():
            assert self.process.poll() is None, self.output
            time.sleep(pause)

    def finish(self) -> int:
        """Read to the end; returns the exit code."""
        self.lines += self.process.stdout.read().splitlines()
        self.process.stdout.close()
        return self.process.wait(timeout=120)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.finish()
        self.process.stdout.close()

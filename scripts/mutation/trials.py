"""Tests run on mutants: each in processes forked from this one, which has imported torch and what else takes long and
nothing of ours, in a copy of the tree, where the mutated module's file is replaced. So every process that a test
starts has the mutant, and the tree itself is never changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from places import Mutant

LIBRARIES = (
    "numpy", "yaml", "jinja2", "pydantic", "hydra", "typer", "rich.console", "h11", "uvicorn", "tokenizers",
    "safetensors", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.utils.tensorboard", "accelerate", "torchdata.stateful_dataloader", "pyarrow", "datasets",
    "transformers.models.auto.modeling_auto", "transformers.modeling_utils",
)  # fmt: skip
"""What is imported once, where it is installed: tests import it, or what they test does."""
_NOT_COPIED = (".*", "build", "dist", "outputs", "*.egg-info")
_MEMORY = 12 << 30  # bytes of data of one process: a mutant may collect without end
_FILES = ("ended", "killed_by", "output")  # of a trial
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # numbers of prctl


@dataclass(frozen=True)
class Trial:
    """``tests``: paths below tests/, run until one fails; ``mutant``: None for the code as it is; ``limit``: s."""

    tests: str
    mutant: Mutant | None = None
    limit: float = 1800.0


@dataclass(frozen=True)
class Outcome:
    """``killed_by``: the test that failed, or what ended the trial; empty where all passed."""

    killed_by: str
    seconds: float
    output: str


class Copies:
    """Copies of the tree of ``root``, in ``work``, one for each trial at a time."""

    def __init__(self, root: Path, work: Path, jobs: int) -> None:
        self._free = [work / str(job) for job in range(jobs)]
        for copy in self._free:
            shutil.copytree(root, copy / "tree", ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)

    def run(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """As they end."""
        waiting, running = list(trials)[::-1], dict[int, tuple[Trial, Path, float]]()
        try:
            while waiting or running:
                while waiting and self._free:
                    trial, copy = waiting.pop(), self._free.pop()
                    running[self._start(trial, copy)] = trial, copy, time.monotonic()
                pid, status = os.wait()
                trial, copy, began = running.pop(pid)
                self._free.append(copy)
                assert status == 0, f"{trial}: ended with status {status}"
                yield trial, _outcome(copy, time.monotonic() - began)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)
            self._free += [copy for _, copy, _ in running.values()]

    def _start(self, trial: Trial, copy: Path) -> int:
        for name in _FILES:
            (copy / name).unlink(missing_ok=True)
        if mutant := trial.mutant:
            module = copy / "tree/forgather_cli" / mutant.file
            module.rename(copy / "original")
            module.write_bytes(mutant.source)
            # a time that no other text of it had, or Python would take the bytecode of one that is as long
            os.utime(module, ns=(0, int(time.time() * 1000) * 10**9 % (2**32 * 10**9)))
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                _guard(trial, copy)
                if mutant:
                    (copy / "original").rename(module)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid


def warm_up(libraries: Iterable[str]) -> None:
    """Import these for all trials that follow."""
    logging.disable()  # which of its extensions torchao cannot load
    for name in libraries:
        if find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    logging.disable(logging.NOTSET)
    gc.freeze()


def _outcome(copy: Path, seconds: float) -> Outcome:
    texts = [(copy / name).read_text(errors="replace") if (copy / name).exists() else None for name in _FILES]
    ended, killed_by, output = texts
    return Outcome(
        next(text for text in (ended, killed_by, "the process died") if text is not None), seconds, output or ""
    )


def _guard(trial: Trial, copy: Path) -> None:
    """Run the tests in a child, for the time they have at most, and leave none of its processes behind."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1)
    prctl(_DEATH_SIGNAL, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    deadline = time.monotonic() + trial.limit
    try:
        if (child := os.fork()) == 0:
            _test(trial.tests, copy)
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                (copy / "ended").write_text(f"time: {trial.limit:.0f} s")
                break
            time.sleep(0.05)
    finally:
        _kill_descendants()


def _kill_descendants() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            parents = {}
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            ours = {os.getpid()}
            while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
                ours |= more
            for pid in ours - {os.getpid()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _test(tests: str, copy: Path) -> NoReturn:
    """Be a new process of pytest, in the copy."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
        tree = copy / "tree"
        os.chdir(tree)
        output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.path[:] = [str(tree), *(path for path in sys.path if path != str(Path(__file__).parent))]
        os.environ["PYTHONPATH"] = str(tree)
        sys.modules["__main__"] = ModuleType("__main__")
        import pytest

        failed: list[str] = []

        class Plugin:
            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                if report.failed:
                    failed.append(report.nodeid.removeprefix("tests/"))

            def pytest_collectreport(self, report: pytest.CollectReport) -> None:
                if report.failed:
                    failed.append(f"collection of {report.nodeid.removeprefix('tests/')}")

        # of pytest plugins that libraries have imported (anyio)
        words = [
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--rootdir",
            str(tree),
        ]
        code = int(pytest.main([*words, *(f"tests/{path}" for path in tests.split())], plugins=[Plugin()]))
        killed_by = failed[0] if failed else f"pytest: exit code {code}" if code else ""
        (copy / "part").write_text(killed_by)
        (copy / "part").rename(copy / "killed_by")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)

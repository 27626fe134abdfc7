"""A run directory that goes away under a running job, and too few descriptors: one message, and nothing half."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from program import Process, until
from two_ranks import RUN, SMALL

from forgather_cli.launch.exit_status import MISTAKE, from_error


def is_at_rest(pid: int) -> bool:
    """Whether all threads of a process are stopped, or it has ended."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] in "TZX" for thread in threads)


@pytest.mark.parametrize(("how", "words"), [("moved", []), ("removed", ["trainer=ddp", "nproc_per_node=2"])])
def test_a_directory_that_goes_away_ends_the_run_with_one_message(how: str, words: list[str]) -> None:
    # that tensorboard's own thread has something to write just then is left out: it prints a traceback
    quiet = ["max_steps=1000", "save_steps=2", "eval_strategy=no", "logging_steps=500"]
    slow = ["callbacks=default", "+callbacks.slow._target_=stalls.Slow"]
    with Process("train", *SMALL, *quiet, *slow, *words) as job:
        job.read_until("step-00000002")
        tasks = Path(f"/proc/{job.process.pid}/task").glob("*/children")
        pids = [job.process.pid, *(int(pid) for task in tasks for pid in task.read_text().split())]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(map(is_at_rest, pids)))  # each thread stops when it is its turn
        os.rename("run", "elsewhere") if how == "moved" else shutil.rmtree("run")
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        said = len(job.lines)
        assert job.finish() == 1, job.output
    [told] = [line for line in job.lines[said:] if line and not re.search("checkpoint saved", line)]
    assert re.search("^error: .*run: was removed", told)
    assert not RUN.root.exists()


LIMITED = """
import os, resource, sys
from forgather_cli.cli import app
sys.argv = ["forgather", *sys.argv[1:]]
top = max(map(int, os.listdir("/proc/self/fd")))
while (free := os.dup(0)) <= top:  # no number below is free
    pass
os.close(free)
may = free + int(os.environ["MORE_FILES"])
resource.setrlimit(resource.RLIMIT_NOFILE, (may, may))
app.main()
"""


@pytest.mark.parametrize(
    ("words", "more"), [(["trainer=single"], 2), (["trainer=ddp", "nproc_per_node=2"], 3)], ids=["single", "ddp"]
)
def test_too_few_descriptors_are_told_in_one_sentence(words: list[str], more: int) -> None:
    with Process("train", *SMALL, "max_steps=4", *words, code=LIMITED, env={"MORE_FILES": str(more)}) as job:
        assert job.finish() == MISTAKE, job.output
    assert "Traceback" not in job.output
    assert "Exception ignored" not in job.output
    [told] = [line for line in job.lines if "error" in line]
    assert re.search(r"^error: ulimit -n: .* \d+ files.*ulimit -n 4096", told)


def test_a_job_without_descriptors_for_commands_trains_and_says_so_in_a_line() -> None:
    words = ["max_steps=1", "callbacks=default", "callbacks.textgen=null"]
    with Process("train", *SMALL, *words, code=LIMITED, env={"MORE_FILES": "6"}) as job:
        assert job.finish() == 0, job.output
    assert "Exception ignored" not in job.output
    assert len([line for line in job.lines if "takes no commands: Too many open files" in line]) == 1


def test_libraries_that_lack_descriptors_are_understood() -> None:
    gloo = RuntimeError("[enforce fail at gloo/transport/tcp/loop.cc:105] fd_ != -1. epoll_create: Too many open files")
    assert "ulimit -n" in from_error(1, gloo).message
    wrapped = ValueError("no batch")
    wrapped.__cause__ = OSError(24, os.strerror(24), "data.bin")
    assert from_error(1, wrapped).code == MISTAKE
    assert "ulimit" not in from_error(1, OSError(28, os.strerror(28))).message

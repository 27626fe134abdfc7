"""``--print-sbatch``: what the file asks of Slurm, and jobs of it in a Slurm that is simulated on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import tiny
from program import SMALL as WORDS
from program import Process, printed
from two_ranks import SMALL, recorded_steps

from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.run_dir import RunDir

WAITS = ["trainer=ddp", "nnodes=2", "nproc_per_node=1", "max_steps=20"]
Script = Callable[..., str]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """The file for the given words."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return lambda *words: printed(capsys, "train", *words, "--print-sbatch").out


def options(script: str) -> dict[str, str]:
    """What a file asks for."""
    return {name: value for name, value in re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE)}


def test_the_file_asks_for_what_the_config_needs(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = options(script("pretrain_1b_nodes", "device=cuda", "nproc_per_node=8", "dataloader_num_workers=2"))
    assert (nodes["nodes"], nodes["ntasks-per-node"]) == ("2", "8")
    assert (nodes["gres"], nodes["cpus-per-task"], nodes["job-name"]) == ("gpu:8", "6", "pretrain_1b_nodes")
    alone = options(script(*WORDS, "--time", "2-00:00:00"))
    assert (alone["nodes"], alone["ntasks-per-node"], alone["time"]) == ("1", "1", "2-00:00:00")
    assert "gres" not in alone
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    here = options(script(*WORDS, "device=auto", "trainer=ddp", "global_batch_size=6"))
    assert (here["ntasks-per-node"], here["gres"]) == ("3", "gpu:3")


def test_slurm_reads_every_line_and_bash_runs_the_rest(script: Script) -> None:
    text = script(*WORDS)
    file = Path("job.sbatch")
    file.write_text(text)
    assert subprocess.run(["bash", "-n", file], check=False).returncode == 0
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))  # there Slurm stops
    assert not any("#SBATCH" in line for line in lines[first:])
    asked = options(text)
    assert asked["output"] == "%x-%j.out"
    assert "open-mode" in asked  # of a job that is requeued
    assert not asked.keys() & {"account", "partition"}
    filled = options(re.sub("^##SBATCH", "#SBATCH", text, flags=re.MULTILINE))
    assert filled.keys() - asked.keys() == {"account", "partition"}
    assert next(line for line in lines[first:] if line.startswith("# ")).startswith("# Ranks end one after another")
    assert any(line.startswith("# module load") for line in lines[:first])


class Slurm:
    """Runs one job of two nodes, both of which are this machine, as often as it is requeued.

    ``srun`` and ``scontrol`` are scripts on PATH that hand over to this by files; tasks are processes with the
    variables that Slurm gives them.
    """

    def __init__(self, script: str) -> None:
        self.file, self.options, self.number = Path("job.sbatch").absolute(), options(script), os.getpid()
        self.file.write_text(script)
        self.started = 0
        self.requeued = Path("requeued").absolute()
        programs = Path("bin").absolute()
        programs.mkdir()
        self.step, self.code = programs / "step", programs / "code"
        for name, lines in {
            "srun": f"printf '%s\\0' \"$@\" > {self.step}.part; mv {self.step}.part {self.step}\n"
            f"until [ -e {self.code} ]; do sleep 0.02; done; code=$(cat {self.code}); rm {self.code}; exit $code\n",
            "scontrol": f'echo "$@" >> {self.requeued}\n',
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{lines}")
            (programs / name).chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}",
                            "SLURM_JOB_ID": str(self.number), "SLURM_JOB_NODELIST": "localhost,another",
                            "SLURM_CPUS_PER_TASK": self.options["cpus-per-task"]}  # fmt: skip

    def run(self, *, signal_at: str = "") -> int:
        """Run the batch script once; returns its exit code. ``signal_at``: the limit is near when rank 0 prints it."""
        restarts = {"SLURM_RESTART_COUNT": str(self.started)} if self.started else {}
        self.started += 1
        elsewhere = self.file.parent.parent  # the script goes to the directory in which it was printed
        with subprocess.Popen(["bash", str(self.file)], env={**self.environment, **restarts}, cwd=elsewhere) as batch:
            while not self.step.exists():
                assert batch.poll() is None
                time.sleep(0.02)
            words = self.step.read_text().split("\0")[:-1]
            self.step.unlink()
            mine = words[words.index("forgather_cli") + 1 :]
            task = {**self.environment, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
                    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost,another"}  # fmt: skip
            with ExitStack() as stack:
                tasks = [
                    stack.enter_context(Process(*mine, env={**task, "SLURM_PROCID": str(n), "SLURM_NODEID": str(n)}))
                    for n in range(2)
                ]
                if signal_at:
                    tasks[0].read_until(signal_at)
                    name, _, notice = self.options["signal"].partition("@")  # without B: the tasks get it
                    assert int(notice) > 60
                    for each in tasks:
                        each.process.send_signal(signal.Signals[f"SIG{name}"])
                codes = [each.finish() for each in tasks]
            self.code.write_text(str(max(codes)))
        return batch.returncode


def test_a_job_saves_before_its_limit_and_goes_on_when_it_is_requeued(script: Script) -> None:
    words = [*WORDS, *WAITS, "+callbacks.slow={_target_: stalls.Slow, seconds: 0.3}"]
    slurm = Slurm(script(*words))
    assert slurm.options["nodes"] == "2"
    assert {"requeue", "signal"} <= slurm.options.keys()
    assert slurm.run(signal_at="step 3/20") == 75
    run = RunDir(Path(f"outputs/default/slurm-{slurm.number}"))
    assert slurm.requeued.read_text() == f"requeue {slurm.number}\n"
    stopped = read_exit_record(run)
    assert (stopped.code, run.checkpoint_steps()) == (75, [stopped.step])
    assert 3 <= stopped.step < 20

    Path("quick").touch()
    assert slurm.run() == 0
    assert slurm.requeued.read_text() == f"requeue {slurm.number}\n"
    assert recorded_steps(run) == list(range(1, 21))
    with Process("train", *words, "nproc_per_node=2", "nnodes=1", "output_dir=undisturbed") as job:
        assert job.finish() == 0, job.output
    found, undisturbed = (tiny.training_curve(root) for root in (run.root, Path("undisturbed")))
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in undisturbed], rel=1e-6)


def task(rank: int, *words: str, cold: bool = False, **variables: str) -> Process:
    """One of two tasks of a job whose other task has not come."""
    environment = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank), "SLURM_STEP_NODELIST": "localhost,another", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }  # fmt: skip
    return Process(*words, cold=cold, env={**environment, **variables})


def handles_sigterm(pid: int) -> bool:
    """Whether a process has a handler by now."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


ENDED = "ended at once by SIGTERM before the first step; the newest checkpoint is step 3"


@pytest.mark.parametrize(
    "words",
    [["resume", "run", *WAITS], ["train", *SMALL, *WAITS, "resume_from_checkpoint=true"]],
    ids=["resume", "train"],
)
def test_a_signal_while_a_task_waits_for_the_one_that_has_the_run(used: RunDir, words: list[str]) -> None:
    with socket.create_server(("localhost", 0)) as nobody:  # takes the connection of rank 1, and never answers
        port = str(nobody.getsockname()[1])
        with task(1, *words, MASTER_ADDR="localhost", MASTER_PORT=port) as job:
            nobody.accept()[0].close()
            job.process.send_signal(signal.SIGTERM)
            assert job.finish() == 75
            assert ENDED in job.output


def test_a_signal_while_the_task_that_has_the_run_waits(used: RunDir) -> None:
    with task(0, "resume", "run", *WAITS) as job:
        job.until(used.secret.exists)  # what to train is told
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 75
        assert ENDED in job.output
        assert job.lines[-1] == "forgather resume run"
    stopped = read_exit_record(used)
    assert (stopped.state, stopped.code) == ("stopped", 75)


def test_a_signal_as_soon_as_a_task_hears_it(used: RunDir) -> None:
    """Before it has composed a config or imported torch. RANK and WORLD_SIZE are set by the script, as many do."""
    by_script = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with task(0, "resume", "run", *WAITS, cold=True, **by_script) as job:
        job.until(lambda: handles_sigterm(job.process.pid))
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 75
        assert ENDED in job.output
    assert not used.later_starts()


def test_a_signal_while_tasks_of_a_fresh_run_start() -> None:
    with task(0, "train", *SMALL, *WAITS) as job:
        job.until(RunDir(Path("run")).secret.exists)
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 128 + signal.SIGTERM
        assert "there is no checkpoint" in job.output

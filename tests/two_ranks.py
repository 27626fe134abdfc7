"""Small runs on two ranks for the tests of launching: how to start them, and what they leave."""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
from pathlib import Path

from program import SMALL as WORDS
from program import Process, nobody_runs
from ranks import run_ranks
from tiny import metrics

from forgather_cli.config.load import load_config
from forgather_cli.launch.exit_status import ExitRecord, read_exit_record
from forgather_cli.launch.place import joined
from forgather_cli.run_dir import RunDir

SMALL = [*WORDS, "output_dir=run"]
RUN = RunDir(Path("run"))


def fault(*faults: str, **settings: object) -> list[str]:
    """Words that put a ``faults.Fault`` into a run."""
    given = {"_target_": "faults.Fault", "faults": f"[{','.join(faults)}]", **settings}
    return [f"+callbacks.fault.{name}={value}" for name, value in given.items()]


def hold(event: str, step: int) -> list[str]:
    """Words that have a run wait there for its end: ``faults.Hold``."""
    return ["+callbacks.hold._target_=faults.Hold", f"+callbacks.hold.event={event}", f"+callbacks.hold.step={step}"]


WATCHED = fault("step-nothing")
"""Words for a run whose ranks leave their process ids."""


def acted(job: Process, number: int = 0) -> None:
    job.until(Path(f"acted-{number}").exists)


def start(*words: str, strategy: str = "ddp", cold: bool = False) -> Process:
    """A run on two ranks. ``cold`` as for a Process."""
    layout = ["n_microbatches=2"] if strategy == "pipeline" else []
    return Process("train", *SMALL, f"trainer={strategy}", "nproc_per_node=2", *layout, *words, cold=cold)


def train(*words: str, strategy: str = "ddp") -> tuple[int, str]:
    """(exit code, output) of a run on two ranks."""
    with start(*words, strategy=strategy) as job:
        return job.finish(), job.output


def _slurm_task(folder: str, port: int, recipe: str, words: list[str]) -> tuple[int, str]:
    """A run that this rank of the pool joins as a task of Slurm's: (exit code, what it prints)."""
    import torch.distributed as dist

    from forgather_cli.launch import start
    from forgather_cli.worker import work

    rank = str(dist.get_rank())
    dist.destroy_process_group()
    task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    place = joined([], {**task, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    printed, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return start.launch(lambda: load_config(recipe, words), work, place), printed.getvalue()
    finally:
        os.chdir(before)


def train_in_pool(folder: Path, words: list[str], recipe: str = "default") -> list[tuple[int, str]]:
    """(exit code, what is printed) of each of two ranks of the pool, which join a run: no process is started."""
    return run_ranks(2, _slurm_task, str(folder), free_port(), recipe, words)


def free_port() -> int:
    """Below the ports that the system gives to clients (Linux: from 32768): one of those may be taken by a connection
    of another test before it is listened at.
    """
    while True:
        port = random.SystemRandom().randrange(10000, 32768)  # tests seed the shared generator
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def nobody_left(ranks: int = 2) -> bool:
    """True once none of the ranks that left their process id runs."""
    pids = [int(path.read_text()) for path in Path().glob("pid-*")]
    assert len(pids) == ranks
    return nobody_runs(pids)


def ended() -> ExitRecord:
    return read_exit_record(RUN)


def recorded_steps(run: RunDir = RUN) -> list[int]:
    return [record["step"] for record in metrics(run.root) if "loss" in record]

"""What may be lost where a save gets hardly any processor time: on a busy machine, for an ordinary user, on ranks."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tiny
import torch.distributed as dist
from crash_campaign import busy_cores
from forks import fork
from ranks import run_ranks

from forgather_cli import TrainerCallback
from forgather_cli.checkpoint import save
from forgather_cli.run_dir import RunDir

NOBODY = 65534
STEP = 0.05  # seconds


class Lags(TrainerCallback):
    """For each checkpoint the steps that training was ahead of it when it was published."""

    def __init__(self) -> None:
        self.lags: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(STEP)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lags.append(kwargs["trainer"].state.global_step - state.global_step)


@contextmanager
def starved_low_priority() -> Iterator[set[int]]:
    """Writing is slow in threads of low priority, as it is where all cores are taken; priorities are not raised.
    Gives the priorities at which there was writing."""
    pwrite, set_priority, seen = os.pwrite, os.setpriority, set[int]()

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def starved(fd: int, data: Any, offset: int) -> int:
        seen.add(priority())
        time.sleep(0.1 if priority() > 0 else 0)
        return pwrite(fd, data, offset)

    def lowered(which: int, who: int, value: int) -> None:
        assert value >= priority()
        set_priority(which, who, value)

    with patch.object(os, "pwrite", starved), patch.object(os, "setpriority", lowered):
        yield seen


def lags(run: str, strategy: str = "single", starved: int = 0, max_steps: int = 40) -> list[int]:
    """Of a run that saves every 20 steps, while rank ``starved`` writes slowly."""
    settings = {"max_steps": max_steps, "save_steps": 20, "per_device_train_batch_size": 4, "save_strategy": "steps"}
    seen, rank = Lags(), dist.get_rank() if dist.is_initialized() else 0
    trainer = tiny.script(run, None, tiny.RandomTokens(512), strategy=strategy, callbacks=[seen], **settings)
    with patch.object(save, "PATIENCE", 0.2), starved_low_priority() if rank == starved else nullcontext({19}) as at:
        trainer.train()
    assert 19 in at or max_steps < 20, "a save begins at the lowest priority, at which it costs steps nothing"
    return seen.lags


def lags_of_an_ordinary_user(folder: str) -> None:
    if os.getuid() == 0:
        lags(f"{folder}/imports", max_steps=1)  # what is imported when it is used may lie where others cannot read
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    os.chdir(folder)
    os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_CACHE_HOME"] = folder
    Path("lags.json").write_text(json.dumps(lags("run")))


def test_on_a_busy_machine_a_late_save_is_finished_while_training_waits() -> None:
    folder = tempfile.mkdtemp(dir="/tmp")  # pytest's own are closed to others
    try:
        os.chown(folder, NOBODY if os.getuid() == 0 else -1, -1)
        with busy_cores():
            child = fork(lags_of_an_ordinary_user, folder)
            child.join(120)
        assert child.exitcode == 0
        ahead = json.loads(Path(folder, "lags.json").read_text())
        assert RunDir(Path(folder, "run")).checkpoint_steps() == [20, 40]
    finally:
        shutil.rmtree(folder)
    assert len(ahead) == 2
    assert ahead[0] < 15, "the next save waits for this one 20 steps later"


def test_all_ranks_wait_for_a_late_save_of_one(tmp_path: Path) -> None:
    first, second = run_ranks(2, lags, str(tmp_path), "fsdp2", 1)
    assert first == second
    assert len(first) == 2
    assert first[0] < 15

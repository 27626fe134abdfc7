"""Data workers that end: the run ends at once, and says what is short and which setting counts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing import active_children, get_context
from multiprocessing.resource_sharer import DupFd, _resource_sharer  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import pytest
import tiny
from program import Process
from torch import Tensor
from torch.utils.data import get_worker_info

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.data.loaders.workers import _begin, _received
from forgather_cli.errors import CallbackError, DataError

TRAIN = ["train", "model=nano", "precision=fp32", "callbacks=minimal", "device=cpu", "max_steps=5", "output_dir=run",
         "save_strategy=no", "eval_strategy=no", "dataloader_num_workers=2"]  # fmt: skip
pytestmark = pytest.mark.usefixtures("own_directory")


def _can_mount() -> bool:
    words = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(words, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


_IN_A_SMALL_ROOM = """
import ctypes, runpy, subprocess, sys
size, *sys.argv[1:] = sys.argv[1:]
assert ctypes.CDLL(None).unshare(0x20000) == 0  # a mount namespace of its own
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)
runpy.run_module("forgather_cli", run_name="__main__")
"""


@pytest.mark.skipif(not _can_mount(), reason="needs a mount namespace of its own")
@pytest.mark.parametrize("size", ["64k", "600k"])  # not one batch; one, and not those that are read ahead
def test_room_for_batches_is_looked_at_before_the_first_step(size: str) -> None:
    begun = time.monotonic()
    rows = ["data=synthetic", "seq_len=256", "num_samples=512", "global_batch_size=32"]
    with Process(size, *TRAIN, *rows, "per_device_train_batch_size=32", code=_IN_A_SMALL_ROOM) as process:
        assert process.finish() == 2, process.output
    assert time.monotonic() - begun < 300
    assert "Traceback" not in process.output
    (told,) = (line for line in process.lines if line.startswith("error: "))
    assert told.startswith("error: dataloader_num_workers: ")
    assert "/dev/shm" in told
    assert "--shm-size" in told


class Ends(tiny.RandomTokens):
    """A worker that comes to the sample ``at`` ends."""

    def __init__(self, at: int, how: str) -> None:
        super().__init__(64)
        self.at, self.how = at, how

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.at and get_worker_info() is not None:
            if self.how == "raises":
                raise RuntimeError("the row is bad")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def data(at: int, how: str) -> dict[str, Any]:
    return {"train": Ends(at, how), "seq_len": 16, "vocab_size": 64}


@pytest.mark.parametrize(("how", "ranks"), [("killed", 1), ("killed", 2), ("raises", 1)])
def test_a_worker_that_is_killed_ends_the_run_at_once_and_what_a_dataset_raises_is_its_own(
    how: str, ranks: int
) -> None:
    words = ["data._target_=test_data_workers.data", "+data.at=63", f"+data.how={how}"]
    more = ["trainer=ddp", "nproc_per_node=2"] if ranks == 2 else []
    begun = time.monotonic()
    with Process(*TRAIN, *words, *more, "global_batch_size=4", "max_steps=16", "seed=1") as process:
        code = process.finish()
    assert code != 0, process.output
    assert ("the row is bad" in process.output) is (how == "raises")
    assert ("dataloader_num_workers: a worker has ended" in process.output) is (how == "killed")
    if how == "killed":
        assert code in (1, 2), process.output
        assert time.monotonic() - begun < 300  # and not after hang_timeout
        assert "Traceback" not in process.output


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_none_outlives_its_training(persistent: bool, fails: bool, tmp_path: Path) -> None:
    class Raises(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if fails and state.global_step == 4:
                raise ValueError("as it happens")

    before = active_children()
    trainer = tiny.script(
        tmp_path / "run", tiny.decoder(), tiny.RandomTokens(64), tiny.RandomTokens(8), callbacks=[Raises()],
        max_steps=4, eval_strategy="steps", eval_steps=2, dataloader_num_workers=2,
        dataloader_persistent_workers=persistent,
    )  # fmt: skip
    with pytest.raises(CallbackError, match="as it happens") if fails else nullcontext():
        trainer.train()
    assert not {*active_children()} - {*before}


def test_a_connection_that_a_killed_worker_has_broken_is_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forgather_cli.data.loaders.workers._SIGCHLD", 90.0)

    def ends(signum: int, frame: Any) -> None:
        raise DataError("a worker has ended")

    def broken(said: str, *timers: threading.Timer) -> Any:
        yield from ()
        for timer in timers:
            timer.start()
        raise ConnectionResetError(said)

    killed = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGCHLD))
    before = signal.signal(signal.SIGCHLD, ends)
    try:
        with pytest.raises(DataError, match="a worker has ended"):
            next(_received(broken("reset by peer", killed), None, None))
    finally:
        signal.signal(signal.SIGCHLD, before)
    begun = time.monotonic()
    with pytest.raises(ConnectionResetError):  # a dataset's own, as torch raises it
        next(_received(broken("Caught ConnectionResetError in DataLoader worker process 0."), None, None))
    assert time.monotonic() - begun < 60


class KillsWorkers(TrainerCallback):
    """At the second step, within the save."""

    def state_dict(self) -> dict[str, Any]:
        for worker in active_children():
            os.kill(worker.pid or 0, signal.SIGKILL)
        time.sleep(0.2)  # in which torch says so
        return {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_is_killed_within_a_save_ends_the_run_behind_it(ranks: int) -> None:
    words = ["data._target_=test_data_workers.data", "+data.at=-1", "+data.how=killed", "max_steps=16", "save_steps=2",
             "save_strategy=steps", "+callbacks.kills={_target_:test_data_workers.KillsWorkers}"]  # fmt: skip
    more = ["trainer=ddp", "nproc_per_node=2"] if ranks == 2 else []
    with Process(*TRAIN, *words, *more, "global_batch_size=4") as process:
        assert process.finish() == 1, process.output
    assert "dataloader_num_workers: a worker has ended" in process.output
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000002"]


def _pass_to_nobody(folder: Path) -> None:
    _begin(os.getppid(), folder, 0)
    DupFd(0)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as taker:
            taker.connect(_resource_sharer._address)  # type: ignore[attr-defined]
    threading.Event().wait(0.5)
    sys.excepthook(ValueError, ValueError("an error of another kind"), None)


def test_a_worker_does_not_say_that_nobody_takes_its_tensors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    worker = get_context("fork").Process(target=_pass_to_nobody, args=(tmp_path,))
    worker.start()
    worker.join(120)
    told = capfd.readouterr().err
    assert worker.exitcode == 0, told
    assert "resource_sharer" not in told
    assert "an error of another kind" in told

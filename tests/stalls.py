"""A callback that makes one rank of a run stand still: ``+callbacks.stall._target_=stalls.Stall``; and a slow one.

``acts`` are done one after another, each at a step of its own, once the file ``go-N`` is there: sleep, data (a sample
that does not come) and save (a disk that does not sync) last until the file ``end-N`` is there, late (a disk that syncs
late) for 1.5 s; skip and mismatch concern a collective that the callback does at every step, and nothing ends them.
slow is 30 ms of sleep at every step. Every rank leaves its process id.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forgather_cli.callbacks.base import TrainerCallback


class Stall(TrainerCallback):
    def __init__(self, acts: list[str], rank: int = 1) -> None:
        self._acts, self._rank = acts, rank
        self._number = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._group = dist.new_group(backend="gloo")
        self._is_it = dist.get_rank() == self._rank
        Path(f"pid-{dist.get_rank()}").write_text(str(os.getpid()))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        act = self._acts[self._number] if self._number < len(self._acts) else ""
        if act == "slow" and self._is_it:
            time.sleep(0.03)
        due = state.global_step > 4 and act and Path(f"go-{self._number}").exists()
        number, self._number = self._number, self._number + bool(due)
        due = due and self._is_it
        if due and act == "mismatch":
            dist.broadcast(torch.ones(3), 0, group=self._group)
        elif not (due and act == "skip"):
            dist.all_reduce(torch.ones(3), group=self._group)
        if due and act == "sleep":
            self._wait(number)
        elif due and act == "data":
            self._lie_in_wait(number, kwargs["train_dataloader"].dataset, "_draw")
        elif due and act in ("save", "late"):
            self._lie_in_wait(number, os, "fsync", seconds=1.5 if act == "late" else 600)

    def _lie_in_wait(self, number: int, owner: Any, name: str, seconds: float = 600) -> None:
        call = getattr(owner, name)

        def late(*args: Any) -> Any:
            setattr(owner, name, call)
            self._wait(number, seconds)
            return call(*args)

        setattr(owner, name, late)

    def _wait(self, number: int, seconds: float = 600) -> None:
        until = time.monotonic() + seconds
        while not Path(f"end-{number}").exists() and time.monotonic() < until:
            time.sleep(0.02)


class Slow(TrainerCallback):
    """Leaves the processor to others for most of the time, until the file ``quick`` is there."""

    def __init__(self, seconds: float = 0.05) -> None:
        self._seconds = seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0 if Path("quick").exists() else self._seconds)

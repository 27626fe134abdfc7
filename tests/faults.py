"""A callback that makes one rank fail at one place of a run: ``+callbacks.fault._target_=faults.Fault``.

``moment`` is setup, step, evaluation or save; ``act`` raise, kill, exit, sleep or nothing. Every rank leaves its
process id in the working directory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.launch import signals


class Fault(TrainerCallback):
    """Acts once: a file in the working directory keeps it from acting again after a restart."""

    def __init__(self, moment: str, act: str, rank: int = 1, after: int = 2, grace: float = 25.0) -> None:
        self._moment, self._act, self._rank, self._after = moment, act, rank, after
        signals.GRACE = grace

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Path(f"pid-{self._me()}").write_text(str(os.getpid()))
        self._now("setup")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            print(f"rank {self._me()} begins")
        if state.global_step >= self._after:
            self._now("step")
            if self._moment == "save" and self._me() == self._rank:
                torch.get_rng_state = self._in_save  # a rank's own random state is part of every checkpoint

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._now("evaluation")

    def _in_save(self) -> Any:
        self._now("save")
        return torch.default_generator.get_state()

    def _me(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def _now(self, moment: str) -> None:
        acted = Path("acted")
        if moment != self._moment or self._me() != self._rank or acted.exists():
            return
        acted.touch()
        if self._act == "raise":
            raise ZeroDivisionError(f"of rank {self._rank} in {moment}")
        if self._act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._act == "exit":
            sys.exit(0)
        if self._act == "sleep":
            time.sleep(600)

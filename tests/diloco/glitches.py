"""Callbacks for workers: ``+callbacks.glitch._target_=diloco.glitches.CLASS``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from forgather_cli.callbacks.base import TrainerCallback


class Wrong(TrainerCallback):
    """Weights are ``value`` when the change of a round is made, and as before when they are saved."""

    def __init__(self, every: int, value: float = float("inf")) -> None:
        self._every, self._value = every, value
        self._kept: torch.Tensor | None = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (state.global_step + 1) % self._every == 0:
            weights = next(kwargs["model"].parameters()).data
            self._kept = weights.clone()
            weights.fill_(self._value)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._kept is not None:
            next(kwargs["model"].parameters()).data.copy_(self._kept)
            self._kept = None


class Slow(TrainerCallback):
    """The step behind ``after`` lasts until ``RUN/go`` is there."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._after:
            run = Path(args.output_dir)
            (run / "slow").touch()
            while not (run / "go").exists():
                time.sleep(0.02)

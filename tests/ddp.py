"""What the tests of data parallel share: a few steps on this rank by a strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tiny
import torch
from torch import Tensor, nn
from whole_batch import CPU, Slices, cut, global_batch, grads_of, targets, weights_of

from forgather_cli.config.schema import DDPSettings
from forgather_cli.distributed import clip_grad_norm, world
from forgather_cli.loss import CrossEntropy, Loss
from forgather_cli.strategies.base import ModelSpec
from forgather_cli.strategies.ddp import DataParallel
from forgather_cli.trainer.outer import outer_loop


def strategy_of(
    build: Callable[[], nn.Module] = tiny.decoder, loss: Loss | None = None, **settings: Any
) -> DataParallel:
    strategy = DataParallel(CPU, loss or CrossEntropy(), nullcontext, DDPSettings(**settings))
    strategy.materialize(ModelSpec(build))
    return strategy


class Run:
    """A few optimizer steps on this rank by a strategy, and what they were."""

    def __init__(self, strategy: DataParallel) -> None:
        self.strategy = strategy
        self.outer = outer_loop(strategy, world())
        self.model = strategy.parts[0]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.grads: list[dict[str, Tensor]] = []

    def step(self, number: int, slices: Slices, sized: bool = True) -> None:
        batch = global_batch(number)
        mine: Any = [cut(batch, rows) for rows in slices[self.strategy.data_rank]]
        self.losses.append(float(self.strategy.forward_backward(mine if sized else iter(mine), targets(batch))))
        self.grads.append(grads_of(self.model))
        self.norms.append(float(clip_grad_norm(list(self.model.parameters()), 1.0)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.outer is not None:
            self.outer.after_optimizer_step()

    def result(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, "grads": self.grads, "weights": weights_of(self.model)}


def trained(plan: list[Slices], settings: dict[str, Any], *, sized: bool = True) -> dict[str, Any]:
    run = Run(strategy_of(**settings))
    for number, slices in enumerate(plan):
        run.step(number, slices, sized)
    return run.result()


class Buffered(nn.Module):
    """Logits from an embedding; a buffer, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids) + 0 * self.number

"""What tests of data parallel and of sharded training share: a few steps on this rank by a strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tiny
import torch
from torch import Tensor, nn
from whole_batch import CPU, Slices, cut, global_batch, targets, whole

from forgather_cli.config.schema import DDPSettings
from forgather_cli.distributed import clip_grad_norm, world
from forgather_cli.loss.base import Loss
from forgather_cli.loss.losses import CrossEntropy
from forgather_cli.strategies.base import ModelSpec
from forgather_cli.strategies.ddp import DataParallel
from forgather_cli.trainer.outer import outer_loop


def strategy_of(
    build: Callable[[], nn.Module] = tiny.decoder,
    loss: Loss | None = None,
    compile_with_loss: dict[str, Any] | None = None,
    **settings: Any,
) -> DataParallel:
    strategy = DataParallel(CPU, loss or CrossEntropy(), nullcontext, DDPSettings(**settings))
    strategy.materialize(ModelSpec(build, compile_with_loss=compile_with_loss))
    return strategy


class Run:
    """A few optimizer steps on this rank by a strategy, and what they were."""

    def __init__(self, strategy: Any, parameters: dict[str, nn.Parameter] | None = None, lr: float = 1e-2) -> None:
        """``parameters``: by other names than the model has them."""
        self.strategy = strategy
        self.outer = outer_loop(strategy, world())
        self.model = strategy.parts[0]
        self.parameters = parameters or dict(self.model.named_parameters(remove_duplicate=False))
        self.distinct = list(dict.fromkeys(self.parameters.values()))
        self.optimizer = torch.optim.AdamW(self.distinct, lr=lr)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.grads: list[dict[str, Tensor]] = []

    def step(self, number: int, slices: Slices, sized: bool = True) -> None:
        batch = global_batch(number)
        mine: Any = [cut(batch, rows) for rows in slices[self.strategy.data_rank]]
        self.losses.append(float(self.strategy.forward_backward(mine if sized else iter(mine), targets(batch))))
        self.grads.append({name: whole(p.grad) for name, p in self.parameters.items() if p.grad is not None})
        norm = clip_grad_norm(self.distinct, 1.0, self.strategy.model_group, self.strategy.duplicates)
        self.norms.append(float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.outer is not None:
            self.outer.after_optimizer_step()

    def result(self) -> dict[str, Any]:
        weights = {name: whole(p) for name, p in self.parameters.items()}
        return {"losses": self.losses, "norms": self.norms, "grads": self.grads, "weights": weights}


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

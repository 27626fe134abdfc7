"""What the tests of data parallel share: a few steps on this rank, and the same in one process of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather_cli.config.schema import DDPSettings
from forgather_cli.distributed import clip_grad_norm, world
from forgather_cli.loss import CrossEntropy, Loss
from forgather_cli.strategies.base import Batch, ModelSpec
from forgather_cli.strategies.ddp import DataParallel
from forgather_cli.trainer.outer import outer_loop

CPU = torch.device("cpu")
Slices = list[list[slice]]
"""Rows of the global batch by rank and micro-batch."""


def even(ranks: int, accumulation: int, rows: int = 12) -> Slices:
    share = rows // ranks
    size = share // accumulation
    return [
        [slice(r * share + m * size, r * share + (m + 1) * size) for m in range(accumulation)] for r in range(ranks)
    ]


def global_batch(step: int, rows: int = 12) -> Batch:
    """Ragged: every sequence has another number of targets."""
    samples = tiny.RandomTokens(rows, seed=step, ragged=True)
    batch = [samples[n] for n in range(rows)]
    return {key: torch.stack([sample[key] for sample in batch]) for key in ("input_ids", "labels")}


def rows_of(batch: Batch, rows: slice) -> Batch:
    return {key: value[rows] for key, value in batch.items()}


def targets(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum().float()


def strategy_of(
    build: Callable[[], nn.Module] = tiny.decoder, loss: Loss | None = None, **settings: Any
) -> DataParallel:
    strategy = DataParallel(CPU, loss or CrossEntropy(), nullcontext, DDPSettings(**settings))
    strategy.materialize(ModelSpec(build))
    return strategy


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


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
        mine: Any = [rows_of(batch, rows) for rows in slices[self.strategy.data_rank]]
        self.losses.append(float(self.strategy.forward_backward(mine if sized else iter(mine), targets(batch))))
        self.grads.append(grads_of(self.model))
        self.norms.append(float(clip_grad_norm(list(self.model.parameters()), 1.0)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.outer is not None:
            self.outer.after_optimizer_step()

    def result(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "norms": self.norms,
            "grads": self.grads,
            "weights": weights_of(self.model),
        }


def trained(plan: list[Slices], settings: dict[str, Any], *, sized: bool = True) -> dict[str, Any]:
    run = Run(strategy_of(**settings))
    for number, slices in enumerate(plan):
        run.step(number, slices, sized)
    return run.result()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Plain PyTorch: the mean over the targets of a batch."""
    logits = model(input_ids=batch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def reference(steps: int) -> dict[str, Any]:
    """The same steps in one process on the whole batch."""
    model = tiny.decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, grads = [], [], []
    for number in range(steps):
        loss = loss_of(model, global_batch(number))
        loss.backward()
        grads.append(grads_of(model))
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights_of(model)}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def agree(ranks: list[dict[str, Any]], expected: dict[str, Any], atol: float = 1e-6) -> None:
    """All ranks have the reference's gradients, norms and weights, and their shares of the loss sum up to its."""
    for result in ranks:
        for ours, theirs in zip(result["grads"], expected["grads"], strict=True):
            close(ours, theirs, atol)
        assert result["norms"] == pytest.approx(expected["norms"], rel=max(1e-6, atol))
        close(result["weights"], expected["weights"], 10 * atol)
        assert equal(result["weights"], ranks[0]["weights"])
    summed = [sum(shares) for shares in zip(*(result["losses"] for result in ranks), strict=True)]
    assert summed == pytest.approx(expected["losses"], rel=1e-6)


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

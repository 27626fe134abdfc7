"""What tests of ranks that share a batch compare with: the same steps in one process of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather_cli.strategies.base import Batch

CPU = torch.device("cpu")
ROWS = 12
Slices = list[list[slice]]
"""Rows of the global batch by rank and micro-batch."""


def even(ranks: int, accumulation: int) -> Slices:
    size = ROWS // ranks // accumulation
    starts = [[(rank * accumulation + n) * size for n in range(accumulation)] for rank in range(ranks)]
    return [[slice(start, start + size) for start in own] for own in starts]


def global_batch(step: int) -> Batch:
    """Ragged: every sequence has another number of targets."""
    samples = tiny.RandomTokens(ROWS, seed=step, ragged=True)
    batch = [samples[n] for n in range(ROWS)]
    return {key: torch.stack([sample[key] for sample in batch]) for key in ("input_ids", "labels")}


def cut(batch: Batch, rows: slice) -> Batch:
    return {key: value[rows] for key, value in batch.items()}


def targets(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum().float()


def whole(tensor: Any) -> Tensor:
    """Collective. A copy of the full tensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    """By every name."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters(remove_duplicate=False)}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Plain PyTorch: the mean over the targets of a batch."""
    logits = model(input_ids=batch["input_ids"])[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def reference(steps: int = 3, model: nn.Module | None = None, lr: float = 1e-2) -> dict[str, Any]:
    """Steps of AdamW in one process on the whole batch."""
    model = tiny.decoder() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, norms, grads = [], [], []
    for step in range(steps):
        loss = mean_loss(model, global_batch(step))
        loss.backward()
        losses.append(loss.item())
        grads.append(grads_of(model))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights_of(model)}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def agree(ranks: Sequence[dict[str, Any]], expected: dict[str, Any]) -> None:
    """All ranks have the reference's gradients, norms and weights, and their shares of the loss sum up to its."""
    for result in ranks:
        for ours, theirs in zip(result["grads"], expected["grads"], strict=True):
            close(ours, theirs, 1e-6)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        close(result["weights"], expected["weights"], 1e-5)
        assert equal(result["weights"], ranks[0]["weights"])
    summed = [sum(shares) for shares in zip(*(result["losses"] for result in ranks), strict=True)]
    assert summed == pytest.approx(expected["losses"], rel=1e-6)

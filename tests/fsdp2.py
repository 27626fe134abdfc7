"""What the tests of fully sharded training share: a few steps on this rank, and the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather_cli.config.schema import BF16Settings, FSDP2Settings
from forgather_cli.distributed import clip_grad_norm
from forgather_cli.loss import CrossEntropy, LinearCrossEntropy, Loss
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import init_parameters
from forgather_cli.strategies.base import Batch, ModelSpec
from forgather_cli.strategies.fsdp2 import FullyShard

CPU = torch.device("cpu")
ROWS = 16
Slices = list[list[slice]]
"""Rows of the global batch by rank and micro-batch."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how. ``plan``: who gets which rows of the 16 of each step."""

    plan: Slices
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    loss: str = "cross_entropy"
    bf16: bool = False
    steps: int = 3
    change: Callable[[nn.Module], None] | None = None
    """Applied to the built model, as checkpointing and compilation are."""

    def strategy(self) -> FullyShard:
        precision = BF16Settings() if self.bf16 else None
        strategy = FullyShard(CPU, loss_named(self.loss), FSDP2Settings(**self.settings), precision)
        init = partial(init_parameters, seed=0)
        strategy.materialize(ModelSpec(lambda: on_meta(self.change, **self.model), init=init))
        return strategy


def even(ranks: int, accumulation: int) -> Slices:
    size = ROWS // ranks // accumulation
    starts = [[(rank * accumulation + n) * size for n in range(accumulation)] for rank in range(ranks)]
    return [[slice(start, start + size) for start in own] for own in starts]


def on_meta(change: Callable[[nn.Module], None] | None = None, **model: Any) -> Decoder:
    with torch.device("meta"):
        built = Decoder(tiny.decoder_settings(**model))
    if change is not None:
        change(built)
    return built


def loss_named(name: str) -> Loss:
    return LinearCrossEntropy(chunk_size=20) if name == "linear_cross_entropy" else CrossEntropy()


def global_batch(step: int) -> Batch:
    """Ragged: every sequence has another number of targets."""
    samples = tiny.RandomTokens(ROWS, seed=step, ragged=True)
    batch = [samples[n] for n in range(ROWS)]
    return {key: torch.stack([sample[key] for sample in batch]) for key in ("input_ids", "labels")}


def cut(batch: Batch, rows: slice) -> Batch:
    return {key: value[rows] for key, value in batch.items()}


def targets(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum().float()


def named(strategy: FullyShard) -> dict[str, Any]:
    """Parameters by the full model's names."""
    state = strategy.parts[0].state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, nn.Parameter)}


def whole(tensor: Any) -> Tensor:
    """Collective. A copy of the full tensor."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def trained(case: Case, max_norm: float = 1.0) -> dict[str, Any]:
    """A few AdamW steps on this rank, and what they were."""
    strategy = case.strategy()
    parameters = named(strategy)
    optimizer = torch.optim.AdamW(set(parameters.values()), lr=1e-3)
    losses, norms, grads = [], [], []
    for step in range(case.steps):
        batch = global_batch(step)
        mine = [cut(batch, rows) for rows in case.plan[strategy.data_rank]]
        losses.append(float(strategy.forward_backward(mine, targets(batch))))
        grads.append({name: whole(p.grad) for name, p in parameters.items()})
        norm = clip_grad_norm(list(set(parameters.values())), max_norm, strategy.model_group, strategy.duplicates)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(p) for name, p in parameters.items()}
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Plain PyTorch: the mean over the targets of a batch."""
    logits = model(input_ids=batch["input_ids"])[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def reference(model: nn.Module, steps: int = 3, max_norm: float = 1.0) -> dict[str, Any]:
    """The same steps in one process on the whole batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms, grads = [], [], []
    for step in range(steps):
        loss = mean_loss(model, global_batch(step))
        loss.backward()
        losses.append(loss.item())
        grads.append({name: whole(p.grad) for name, p in by_every_name(model).items()})
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(p) for name, p in by_every_name(model).items()}
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}


def by_every_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def agree(ranks: Sequence[dict[str, Any]], expected: dict[str, Any], atol: float = 1e-6) -> None:
    """The reference's gradients, norms and weights, and shares of the loss that sum up to its."""
    for result in ranks:
        for ours, theirs in zip(result["grads"], expected["grads"], strict=True):
            close(ours, theirs, atol)
        for ours, theirs in zip(result["norms"], expected["norms"], strict=True):
            assert abs(ours - theirs) <= max(1e-6, atol) * theirs
        close(result["weights"], expected["weights"], 10 * atol)
    for ours, theirs in zip(zip(*(r["losses"] for r in ranks), strict=True), expected["losses"], strict=True):
        assert abs(sum(ours) - theirs) <= max(1e-6, atol) * theirs

"""Evaluation and prediction over one split; every example counts once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from forgather_cli import distributed
from forgather_cli.models.modes import evaluation_mode
from forgather_cli.strategies.base import Batch, Strategy

log = logging.getLogger(__name__)


class EvaluationStopped(Exception):
    """A stop was asked for; the unfinished evaluation is discarded."""


def evaluate(
    strategy: Strategy, batches: Iterable[Batch], *, prefix: str, after_batch: Callable[[], bool]
) -> dict[str, float]:
    """Collective. Sum of losses over the split divided by its number of targets.

    ``after_batch`` is called after each batch; True raises EvaluationStopped. The metrics carry ``prefix``: loss,
    perplexity (exp of loss, inf above the float range), tokens (counted targets), runtime (seconds),
    samples_per_second.
    """
    start = time.perf_counter()
    loss_sum = torch.zeros((), dtype=torch.float64, device=strategy.device)
    target_sum = torch.zeros((), dtype=torch.float64, device=strategy.device)
    samples = 0
    with evaluation_mode(strategy.parts):
        for batch in batches:
            loss, count = strategy.loss(batch)
            loss_sum += loss
            target_sum += count
            samples += len(batch["input_ids"])
            if after_batch():
                raise EvaluationStopped
    sums = torch.stack([loss_sum, target_sum, torch.full_like(loss_sum, samples)])
    total, targets, samples_seen = distributed.all_sum(sums, strategy.data_group).tolist()
    seconds = time.perf_counter() - start
    if not targets:
        log.warning("the evaluation split has no targets (every label is -100): its loss is 0 and says nothing")
    mean = total / max(targets, 1.0)
    return {
        f"{prefix}_loss": mean,
        f"{prefix}_perplexity": _exp(mean),
        f"{prefix}_tokens": int(targets),
        f"{prefix}_runtime": seconds,
        f"{prefix}_samples_per_second": samples_seen / seconds,
    }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass
class PredictionOutput:
    """Logits (N, T, V) and labels (N, T) of a split on the CPU, and its metrics; Hugging Face's names."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] = field(default_factory=dict)


def predict(strategy: Strategy, batches: Iterable[Batch], after_batch: Callable[[], object]) -> tuple[Any, Any]:
    """Collective. (logits, labels) as numpy arrays over the whole split; None for labels the data lacks."""
    logits: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    with evaluation_mode(strategy.parts):
        for batch in batches:
            out = strategy.logits(batch)
            if out is not None:
                logits.append(out.float().cpu())
            if "labels" in batch:
                labels.append(batch["labels"].cpu())
            after_batch()
    return _stack(logits), _stack(labels)


def _stack(chunks: list[torch.Tensor]) -> Any:
    """One array; batches of other lengths are padded with -100 on the right, as Hugging Face does."""
    if not chunks:
        return None
    longest = max(chunk.shape[1] for chunk in chunks)
    padded = [_padded(chunk, longest) for chunk in chunks]
    return torch.cat(padded).numpy()


def _padded(chunk: torch.Tensor, length: int) -> torch.Tensor:
    if chunk.shape[1] == length:
        return chunk
    filled = chunk.new_full((chunk.shape[0], length, *chunk.shape[2:]), -100)
    filled[:, : chunk.shape[1]] = chunk
    return filled

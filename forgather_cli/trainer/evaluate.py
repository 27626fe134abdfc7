"""Evaluation and prediction over one split; every example counts once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from forgather_cli import distributed
from forgather_cli.checkpoint.gather import gather
from forgather_cli.distributed import World
from forgather_cli.errors import DataError
from forgather_cli.models.modes import evaluation_mode
from forgather_cli.strategies.base import Batch, Strategy
from forgather_cli.trainer.ticket import Sum, without_targets

log = logging.getLogger(__name__)


class EvaluationStopped(Exception):
    """A stop was asked for; the unfinished evaluation is discarded."""


class Interrupts(Protocol):
    """How a pass over a split can be cut off, by all ranks alike."""

    def ask(self) -> list[int]:
        """What this rank has been told, as numbers to be summed over ranks."""

    def heed(self, sums: list[int]) -> bool:
        """Called with the sums; True gives the pass up."""


class Uninterrupted:
    """A pass that nothing cuts off."""

    def ask(self) -> list[int]:
        return []

    def heed(self, sums: list[int]) -> bool:
        return False


def in_rounds(batches: Iterable[Batch], group: Any, interrupts: Interrupts) -> Iterator[tuple[Batch, bool]]:
    """Collective. (batch, True) until every rank of ``group`` has run out.

    A rank that has none left gets its last one without targets, and False: every pass through the model is collective
    under some strategies. The agreement on a round travels while the one before it is computed. Raises
    EvaluationStopped, DataError for a rank that has no batch at all.
    """
    source = iter(batches)

    def fetch() -> tuple[Batch | None, Sum]:
        batch = next(source, None)
        return batch, Sum([int(batch is not None), *interrupts.ask()], group)

    ahead, agreement = fetch()
    last: Batch | None = None
    while True:
        ready, *told = agreement.read()
        if interrupts.heed(told):
            raise EvaluationStopped
        if not ready:
            return
        if ahead is None and last is None:
            raise DataError("eval_dataset: has no batch for this rank, while others have; give it more samples")
        batch, counted = (ahead, True) if ahead is not None else (without_targets(last or {}), False)
        last = batch
        if group is not None:
            ahead, agreement = fetch()
            yield batch, counted
        else:
            yield batch, counted
            ahead, agreement = fetch()


def evaluate(
    strategy: Strategy, rounds: Iterable[tuple[Batch, bool]], world: World, *, prefix: str, on_batch: Callable[[], None]
) -> dict[str, float]:
    """Collective. Sum of losses over the split divided by its number of targets; ``rounds`` are those of ``in_rounds``.

    ``on_batch`` is called after each batch. The metrics carry ``prefix``: loss, perplexity (exp of loss, inf above the
    float range), tokens (counted targets), runtime (seconds), samples_per_second. Without a target there is no loss.
    """
    start = time.perf_counter()
    loss_sum = torch.zeros((), dtype=torch.float64, device=strategy.device)
    target_sum = torch.zeros((), dtype=torch.float64, device=strategy.device)
    samples = 0
    with evaluation_mode(strategy.parts):
        for batch, counted in rounds:
            loss, count = strategy.loss(batch)
            loss_sum += loss
            target_sum += count
            samples += len(batch["input_ids"]) if counted else 0
            on_batch()
    sums = torch.stack([loss_sum, target_sum, torch.full_like(loss_sum, samples)])
    total, targets, samples_seen = distributed.all_sum(sums, world.group).tolist()
    samples_seen /= world.size // strategy.data_size
    seconds = time.perf_counter() - start
    metrics = {"tokens": int(targets), "runtime": seconds, "samples_per_second": samples_seen / seconds}
    if targets:
        metrics = {"loss": total / targets, "perplexity": _exp(total / targets), **metrics}
    else:
        log.warning("the %s split has no targets (every label is -100), and so no loss: check its labels", prefix)
    return {f"{prefix}_{name}": value for name, value in metrics.items()}


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


def predict(
    strategy: Strategy, rounds: Iterable[tuple[Batch, bool]], group: Any, on_batch: Callable[[], None]
) -> tuple[Any, Any]:
    """Collective. (logits, labels) as numpy arrays over the whole split, on every rank; None for labels the data lacks.

    ``group``: a CPU group of all ranks.
    """
    logits: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    with evaluation_mode(strategy.parts):
        for batch, counted in rounds:
            out = strategy.logits(batch)
            if counted and out is not None:
                logits.append(out.float().cpu())
                if "labels" in batch:
                    labels.append(batch["labels"].cpu())
            on_batch()
    shares = gather((strategy.data_rank, logits, labels), group)
    held = {rank: (one, two) for rank, one, two in reversed(shares) if one}  # by data rank: the first that has logits
    ordered = [held[rank] for rank in sorted(held)]
    return _stack([t for one, _ in ordered for t in one]), _stack([t for _, two in ordered for t in two])


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

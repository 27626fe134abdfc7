"""What ranks agree on: small sums of int64 over an own CPU group, started early and read late.

The ticket of a training step travels while the step before it is computed, so the device never waits for it. Nothing
else is agreed on between ranks, except where they all wait anyway (evaluation batches, generated tokens).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forgather_cli.data.loaders.collate import Batch, Step

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""In the order in which they win, when ranks have got different ones."""
NUM_STOPS = len(_STOPS)


class Sum:
    """A sum over ranks under way. Without a group the numbers are their own sum."""

    def __init__(self, numbers: Sequence[int], group: Any) -> None:
        """Collective."""
        self._numbers = list(numbers)
        self._buffer: Tensor | None = None
        if group is not None:
            self._buffer = torch.tensor(self._numbers, dtype=torch.int64)
            self._work = dist.all_reduce(self._buffer, group=group, async_op=True)

    def read(self) -> list[int]:
        """The sums; waits until all ranks have started."""
        if self._buffer is not None:
            self._work.wait()
            self._numbers, self._buffer = self._buffer.tolist(), None
        return self._numbers


@dataclass(frozen=True)
class Counts:
    """What the batches of one optimizer step hold."""

    targets: int = 0
    """Counted ones: labels[:, 1:] != -100."""
    tokens: int = 0
    square_lengths: int = 0
    """Sum over sequences of their length squared, for the attention's operations."""
    samples: int = 0

    @classmethod
    def of(cls, step: Step) -> Counts:
        """Of one rank's share."""
        tokens, squares = 0, 0
        for batch in step.microbatches:
            rows, length = batch["input_ids"].shape
            tokens += rows * length
            squares += rows * length * length
        return cls(step.num_targets, tokens, squares, step.num_samples)

    def numbers(self) -> list[int]:
        return [self.targets, self.tokens, self.square_lengths, self.samples]


@dataclass(frozen=True)
class Agreed:
    """What all ranks read from one ticket alike."""

    counts: Counts
    """Of the whole step: data that several ranks read alike counts once."""
    has_data: bool
    """No rank has run out."""
    asked: list[int]
    """Sums of what ranks were told (``Stopping.ask``)."""
    saved: bool
    """No rank is still writing a checkpoint."""


class Ticket:
    """The agreement on the step that comes next. ``copies``: ranks that read the same data."""

    def __init__(
        self, step: Step | None, *, asked: Sequence[int], saved: bool, world: int, copies: int, group: Any
    ) -> None:
        """Collective. ``asked``: what this rank was told, as numbers to be summed."""
        counts = Counts() if step is None else Counts.of(step)
        self._world, self._copies = world, copies
        self._sum = Sum([*counts.numbers(), int(step is not None), int(saved), *asked], group)
        self._agreed: Agreed | None = None

    def read(self) -> Agreed:
        """What was agreed; waits for the ranks that are behind."""
        if self._agreed is None:
            *counts, ready, saved = (sums := self._sum.read())[:6]
            self._agreed = Agreed(
                counts=Counts(*(count // self._copies for count in counts)),
                has_data=ready == self._world,
                asked=sums[6:],
                saved=saved == self._world,
            )
        return self._agreed


def stop_numbers(stop: int | None) -> list[int]:
    """A signal as numbers to be summed; one that is not known counts as SIGTERM."""
    known = stop if stop in _STOPS else signal.SIGTERM
    return [int(bool(stop) and known == signum) for signum in _STOPS]


def stop_of(sums: Sequence[int]) -> int | None:
    """The signal that any rank has got."""
    return next((int(signum) for signum, count in zip(_STOPS, sums, strict=True) if count), None)


def without_targets(batch: Batch) -> Batch:
    """``batch`` with every label -100: it takes part in collectives and counts nothing."""
    return {**batch, "labels": torch.full_like(batch["labels"], -100)} if "labels" in batch else batch

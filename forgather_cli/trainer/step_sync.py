"""What ranks agree on: how much data the next step has, and whether the run was asked to save, to stop or to abort.

The numbers of a step are summed over a CPU group of their own. The sum starts when the step's data are fetched, while
the step before it is computed, so the device never waits for it. On one device nothing is summed: requests are polled
after each step. Ranks agree on nothing else, except where they all wait anyway (evaluation batches, generated tokens).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forgather_cli.callbacks.base import Asked, Commands, TrainerControl
from forgather_cli.data.loaders.collate import Step

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""In the order in which they win, when ranks have got different ones."""


class Sum:
    """A sum over ranks, started and not yet read. Without a group the sum is the numbers themselves."""

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


class Counts(NamedTuple):
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


@dataclass(frozen=True)
class Agreed:
    """What all ranks have agreed on for the next step."""

    counts: Counts
    """Of all ranks; data that several ranks read alike counts once."""
    has_data: bool
    """No rank has run out."""
    saved: bool
    """No rank is still writing a checkpoint."""
    requests: list[int]
    """``StepSync.requests``, summed over ranks."""


class StepSync:
    """The agreement of all ranks on each step, and on requests to the run.

    A request comes by a signal (``should_stop`` returns it on the rank that got it; ``on_stop`` is called with it once
    all ranks act on it), by ``commands``, or from a callback that aborts on one rank. ``group``: a CPU group of all
    ranks, None on one device; ``copies``: how many ranks read the same data.
    """

    def __init__(
        self,
        control: TrainerControl,
        should_stop: Callable[[], int | None],
        on_stop: Callable[[int], None],
        *,
        group: Any = None,
        world_size: int = 1,
        copies: int = 1,
    ) -> None:
        self._control, self._should_stop, self._on_stop = control, should_stop, on_stop
        self._group, self._world_size, self._copies = group, world_size, copies
        self._under_way: Sum | None = None
        self._agreed: Agreed | None = None
        self.commands: Commands | None = None
        """May be set until training begins, on every rank; only on rank 0 does it ever return requests."""
        self.signum: int | None = None
        """The signal that ends training, once it is agreed on."""
        self.applied = Asked()
        """The commands that all ranks have acted on."""

    # -------------------------------------------------------------------------------------------------- the next step

    def start(self, step: Step | None, *, saved: bool) -> None:
        """Collective. Begin to agree on the step that this rank has fetched; None: it has no more data."""
        counts = Counts() if step is None else Counts.of(step)
        self._agreed = None
        self._under_way = Sum([*counts, int(step is not None), int(saved), *self.requests()], self._group)

    def read(self) -> Agreed | None:
        """What was agreed on the next step, None if none is fetched yet; waits for the ranks that are behind."""
        if self._agreed is None and self._under_way is not None:
            *counts, ready, saved = (sums := self._under_way.read())[:6]
            whole = Counts(*(count // self._copies for count in counts))
            self._agreed = Agreed(whole, ready == self._world_size, saved == self._world_size, sums[6:])
        return self._agreed

    def clear(self) -> None:
        """Forget the step that was fetched: it was returned to the loop, or the data position has changed."""
        self._under_way = self._agreed = None

    # ------------------------------------------------------------------------------------------------------- requests

    def poll(self) -> bool:
        """Collective. True if any rank was asked to stop. Waits for all ranks."""
        if self._group is not None:
            return self.apply_requests(Sum(self.requests(), self._group).read())
        stop = self._should_stop()
        asked = self.applied if self.commands is None else self.commands.asked()
        if not stop and asked == self.applied:  # as after nearly every step
            return self._control.should_abort_without_save or self.signum is not None
        return self.apply_requests(self._as_numbers(stop, asked))

    def requests(self) -> list[int]:
        """This rank's requests, as numbers to be summed over ranks."""
        return self._as_numbers(self._should_stop(), Asked() if self.commands is None else self.commands.asked())

    def _as_numbers(self, stop: int | None, asked: Asked) -> list[int]:
        known = stop if stop in STOP_SIGNALS else signal.SIGTERM
        stops = [int(bool(stop) and known == signum) for signum in STOP_SIGNALS]
        return [int(self._control.should_abort_without_save), *stops, *asked]

    def apply_requests(self, sums: Sequence[int]) -> bool:
        """Act on the requests of all ranks; True if an evaluation or a generation under way is to be given up."""
        control, commands = self._control, 1 + len(STOP_SIGNALS)
        control.should_abort_without_save |= sums[0] > 0
        signum = next((int(s) for s, count in zip(STOP_SIGNALS, sums[1:commands], strict=True) if count), None)
        if signum is not None and self.signum is None:
            self.signum = signum
            self._on_stop(signum)
        asked = Asked(*sums[commands:])
        new = asked.since(self.applied)
        if max(new) > 0:  # below zero: a sum that was started before the last one
            self.applied = asked
            control.should_save |= new.saves > 0
            control.should_training_stop |= new.stops > 0 or new.aborts > 0
            control.should_abort_without_save |= new.aborts > 0
            if self.commands is not None:
                self.commands.agreed(asked)
        stops = max(new.stops, new.aborts) > 0
        return control.should_abort_without_save or self.signum is not None or stops

"""What all ranks agree on: how much data the next step has, and requests to save, to stop or to abort.

Requests are stop signals (``launch.signals``), commands (``control.command_queue``) and callbacks that abort. The
ranks' numbers are summed over a CPU group. The sum for a step is started when its data is fetched, while the step
before it is computed, so the device never waits for it; ``StepEnd`` reads it after that step. On one device nothing is
summed: ``poll`` looks for requests after each step. Requests are also summed with each evaluation batch and generated
token, where ranks wait for each other anyway.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from forgather_cli.callbacks.base import CommandCounts, CommandSource, TrainerControl
from forgather_cli.data.loaders.collate import Counts, Step
from forgather_cli.launch.signals import STOP_SIGNALS


class TrainingJob(Protocol):
    """What training is a part of: a rank of a command (``launch.context.RankContext``), or a script."""

    def poll(self) -> int | None:
        """The number of the stop signal that this rank has received, if any. Called at each step, evaluation batch and
        generated token."""

    def acknowledge(self, signum: int, /) -> None:
        """Called on all ranks, once they have agreed to save and stop."""

    @property
    def stacks(self) -> Callable[[], dict[str, Any]] | None:
        """Returns where all ranks stand, for JSON; called in any thread. None: nobody knows."""

    def stepped(self, step: int) -> None:
        """So many steps are done. Raises TrainingError if the run directory is gone."""


class Sum:
    """A sum over ranks that has been started. Without a group the sums are the numbers themselves."""

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
class Agreed:
    """What all ranks have agreed on for the next step."""

    counts: Counts
    """Of the whole step; data that several ranks read counts once."""
    has_data: bool
    """No rank has run out of data."""
    saves_done: bool
    """No rank is still writing a checkpoint."""
    requests: list[int]
    """Sums over ranks of ``StepSync.requests()``."""


class StepSync:
    """The agreement of all ranks on each step and on requests.

    ``job`` is polled for the stop signal that this rank has received, and told on all ranks once they have agreed on
    it. ``group``: a CPU group of all ranks, None on one device; ``copies``: how many ranks read the same data.
    """

    def __init__(
        self,
        control: TrainerControl,
        job: TrainingJob,
        *,
        group: Any = None,
        world_size: int = 1,
        copies: int = 1,
    ) -> None:
        self._control, self._job = control, job
        self._group, self._world_size, self._copies = group, world_size, copies
        self._under_way: Sum | None = None
        self._agreed: Agreed | None = None
        self.commands: CommandSource | None = None
        """Set on every rank when training begins, where there is a control callback; only rank 0's gets commands."""
        self.signum: int | None = None
        """The stop signal that all ranks have agreed on; it ends training."""
        self.applied = CommandCounts()
        """The commands that all ranks have agreed on so far."""

    # -------------------------------------------------------------------------------------------------- the next step

    def start(self, step: Step | None, *, save_done: bool) -> None:
        """Collective. Start the sum for the step that this rank has fetched; None: it has no more data."""
        counts = Counts() if step is None else step.counts
        self._agreed = None
        numbers = [*counts[:-1], *counts.by_source]  # data of several sources end on all ranks at once
        self._num_counts = len(numbers)
        self._under_way = Sum([*numbers, int(step is not None), int(save_done), *self.requests()], self._group)

    def read(self) -> Agreed | None:
        """The agreement on the next step, None if it is not fetched yet. Waits until all ranks have started the sum."""
        if self._agreed is None and self._under_way is not None:
            size = self._num_counts + 2
            *counts, ready, saves_done = (sums := self._under_way.read())[:size]
            each, fixed = [count // self._copies for count in counts], len(Counts._fields) - 1
            whole = Counts._make([*each[:fixed], tuple(each[fixed:])])
            self._agreed = Agreed(whole, ready == self._world_size, saves_done == self._world_size, sums[size:])
        return self._agreed

    def clear(self) -> None:
        """Forget the agreement: its step was handed out, or the data continue from another position."""
        self._under_way = self._agreed = None

    # ------------------------------------------------------------------------------------------------------- requests

    def has_request(self) -> bool:
        """Whether this rank was asked to stop, which the others may not know yet."""
        return bool(self._job.poll())

    def poll(self) -> bool:
        """Collective. ``apply_requests`` of all ranks' present requests. Waits for all ranks."""
        if self._group is not None:
            return self.apply_requests(Sum(self.requests(), self._group).read())
        stop = self._job.poll()
        asked = self.applied if self.commands is None else self.commands.asked()
        if not stop and asked == self.applied:  # as after nearly every step
            return self._control.should_abort_without_save or self.signum is not None
        return self.apply_requests(self._as_numbers(stop, asked))

    def requests(self) -> list[int]:
        """This rank's requests as numbers to be summed over ranks: abort, one for each stop signal, command counts."""
        return self._as_numbers(self._job.poll(), CommandCounts() if self.commands is None else self.commands.asked())

    def _as_numbers(self, stop: int | None, asked: CommandCounts) -> list[int]:
        known = stop if stop in STOP_SIGNALS else signal.SIGTERM
        stops = [int(bool(stop) and known == signum) for signum in STOP_SIGNALS]
        return [int(self._control.should_abort_without_save), *stops, *asked]

    def apply_requests(self, sums: Sequence[int]) -> bool:
        """Act on the ranks' summed requests, by setting ``control`` and ``signum``; True if the run is to stop, and an
        evaluation or a generation is to be given up.
        """
        control, commands = self._control, 1 + len(STOP_SIGNALS)
        control.should_abort_without_save |= sums[0] > 0
        signum = next((int(s) for s, count in zip(STOP_SIGNALS, sums[1:commands], strict=True) if count), None)
        if signum is not None and self.signum is None:
            self.signum = signum
            self._job.acknowledge(signum)
        asked = CommandCounts(*sums[commands:])
        new = asked.since(self.applied)
        if max(new) > 0:  # below zero: this sum was started before the last one was applied
            self.applied = asked
            control.should_save |= new.saves > 0
            control.should_training_stop |= new.stops > 0 or new.aborts > 0
            control.should_abort_without_save |= new.aborts > 0
            if self.commands is not None:
                self.commands.on_agreed(asked)
        stops = max(new.stops, new.aborts) > 0
        return control.should_abort_without_save or self.signum is not None or stops

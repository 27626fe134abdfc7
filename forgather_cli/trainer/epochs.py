"""Where training stands in its data: the next step, agreed among ranks, and epochs, their length, and when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.config import schedule
from forgather_cli.config.schema import RunSettings
from forgather_cli.data.loaders.collate import Batch, Step
from forgather_cli.data.loaders.loader import EvalLoader, TrainLoader
from forgather_cli.trainer.step_sync import Agreed, Counts, Ticket


def length(loader: TrainLoader | EvalLoader) -> int | None:
    """Steps or batches of a loader; None where the data has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


@dataclass(frozen=True)
class WorldStep:
    """This rank's batches of one optimizer step, and what all ranks' batches hold together."""

    microbatches: list[Batch]
    counts: Counts


class Microbatches:
    """A step's batches on this rank, with the events around each: the strategy asks for the next when it is done."""

    def __init__(self, batches: list[Batch], emit: Callable[[str], None]) -> None:
        self._batches, self._emit = batches, emit

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self._emit("on_forward_backward_begin")
            yield batch
            self._emit("on_forward_backward_end")
            self._emit("on_substep_end")


@dataclass
class _Ahead:
    """A step that was fetched before its turn, with its ticket. ``step`` None: this rank has no more data."""

    step: Step | None
    position: dict[str, Any]
    """The loader's, after this step."""
    ticket: Ticket


class Epochs:
    """Hands out steps and knows how many epochs lie behind.

    Where there are several ranks, the step after the one that is trained is fetched already, since its ticket travels
    meanwhile; the position that is saved does not count it. An epoch ends for all ranks when one has no more data, when
    a callback asks for that, or after ``epoch_train_steps``, which leaves the data where it is. Raises DataError for a
    part of an epoch whose length is not known.
    """

    def __init__(
        self,
        args: RunSettings,
        state: TrainerState,
        control: TrainerControl,
        loader: TrainLoader,
        ticket: Callable[[Step | None], Ticket],
        *,
        look_ahead: bool,
    ) -> None:
        self._args, self._state, self._control, self._loader = args, state, control, loader
        self._ticket, self._look_ahead = ticket, look_ahead
        self._data_length = length(loader)
        self._steps_per_epoch = args.epoch_train_steps or self._data_length
        schedule.check_epochs(args, self._steps_per_epoch)
        self._position = loader.state_dict()
        self._skipped = 0
        """Steps by which epochs of ``epoch_train_steps`` were cut short."""
        self._first = 0
        """The step after which the present epoch began."""
        self._before = 0.0
        """Epochs of the data that lay behind when steps were counted from 0."""
        self._stream: Iterator[Step] | None = None
        self._ahead: _Ahead | None = None

    # ---------------------------------------------------------------------------------------------------------- steps

    def next_step(self) -> WorldStep | None:
        """Collective. The next step's data; None once a rank has none left."""
        agreed = self.agreed()
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.step is None or not agreed.has_data:
            return None
        self._position = ahead.position
        if self._look_ahead:
            self._fetch()
        return WorldStep(ahead.step.microbatches, agreed.counts)

    def agreed(self) -> Agreed:
        """Collective. The ticket of the step that ``next_step`` will hand out."""
        if self._ahead is None:
            self._fetch()
        assert self._ahead is not None
        return self._ahead.ticket.read()

    def pending(self) -> Agreed | None:
        """Collective. The next step's ticket, if it is under way already."""
        return None if self._ahead is None else self._ahead.ticket.read()

    def _fetch(self) -> None:
        if self._stream is None:
            self._stream = iter(self._loader)
        step = next(self._stream, None)
        self._ahead = _Ahead(step, self._loader.state_dict(), self._ticket(step))

    # ------------------------------------------------------------------------------------------------------- position

    @property
    def epoch(self) -> int:
        """The epoch of the step that comes next."""
        return int(self._position["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """The position in the data after the last step handed out: of the next epoch where this one is to stop."""
        stops = self._control.should_epoch_stop
        position = {"epoch": self.epoch + 1, "sample": 0} if stops else dict(self._position)
        skipped = self._skipped + (self._steps_left() if stops else 0)
        return {**position, "skipped_steps": skipped} if skipped else position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = dict(state)
        self._skipped = position.pop("skipped_steps", 0)
        self._loader.load_state_dict(position)
        self._restart()

    def begin(self) -> None:
        """An epoch begins."""
        self._control.should_epoch_stop = False
        self._first = self._state.global_step

    def end(self, *, data_ended: bool) -> None:
        """The present epoch is over. Goes to the start of the data if that has ended or a callback wants the next one,
        and says anew when training ends: epochs were asked for, and this one may not have had its length.
        """
        stopped = self._control.should_epoch_stop
        self._skipped += self._steps_left() if stopped else 0
        if data_ended or stopped or self._data_is_used_up():
            self._loader.set_epoch(self.epoch + 1)
            self._restart()
        self._control.should_epoch_stop = False
        self.reckon()

    def _restart(self) -> None:
        """At the loader's position, with nothing fetched."""
        self._position = self._loader.state_dict()
        self._stream, self._ahead = None, None

    # --------------------------------------------------------------------------------------------------------- epochs

    def reckon(self) -> None:
        """Say in the state how many epochs lie behind, and when training ends: at step 0 where the data will tell."""
        self._state.epoch = self.done()
        if not self._state.global_step:
            self._before = self._state.epoch
        self._state.max_steps = self._total_steps()

    def _total_steps(self) -> int:
        step, args = self._state.global_step, self._args
        if args.max_steps <= 0 and args.num_train_epochs < 0:  # one pass over the data, into whatever epochs it is cut
            return step if self.epoch else 0
        behind = self._state.epoch - self._before
        return schedule.total_steps(args, steps_per_epoch=self._steps_per_epoch, done=step, epochs_done=behind)

    def done(self) -> float:
        """Epochs behind, with the fraction of the current one where its length is known."""
        if self._args.epoch_train_steps:
            return (self._state.global_step + self._skipped) / self._args.epoch_train_steps
        if not self._data_length:
            return float(self.epoch)
        return self.epoch + min(1.0, self._steps_behind() / self._data_length)

    def is_full(self) -> bool:
        """True if the present epoch has its ``epoch_train_steps``."""
        steps, now = self._args.epoch_train_steps, self._state.global_step
        self._first = min(self._first, now)  # a rollback may have gone to before this epoch
        return steps is not None and now > self._first and (now + self._skipped) % steps == 0

    def _steps_left(self) -> int:
        """Steps that the present epoch lacks of its ``epoch_train_steps``; 0 without."""
        steps = self._args.epoch_train_steps
        return 0 if steps is None or self.is_full() else steps - (self._state.global_step + self._skipped) % steps

    def _data_is_used_up(self) -> bool:
        """True if map-style data has no whole step left in this epoch; other data tells when it is asked for one."""
        streams = "stream" in self._position
        return not streams and self._data_length is not None and self._steps_behind() >= self._data_length

    def _steps_behind(self) -> int:
        """Steps of this epoch that are done: by the number of samples, so that it holds when the batch size changes."""
        return -(-int(self._position["sample"]) // self._loader.global_batch_size)

"""Where training stands in its data: the next step, epochs and their length, and when training ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.config.schema import RunSettings
from forgather_cli.data.loaders.collate import Batch, Step
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.errors import DataError
from forgather_cli.trainer.step_sync import Counts, StepSync


@dataclass(frozen=True)
class WorldStep:
    """This rank's batches of one optimizer step, and what all ranks' batches hold together."""

    microbatches: list[Batch]
    counts: Counts


class Microbatches:
    """A step's batches on this rank, with the events around each: the strategy asks for the next when it is done."""

    EVENTS = ("on_forward_backward_begin", "on_forward_backward_end", "on_substep_end")

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


class Epochs:
    """Hands out steps and knows how many epochs lie behind.

    Where there are several ranks, which agree on each step by ``sync``, the step after the one that is trained is
    fetched already, since the agreement on it travels meanwhile; the position that is saved does not count it. An epoch
    ends for all ranks when one has no more data, when a callback asks for that, or after ``epoch_train_steps``, which
    leaves the data where it is. Raises DataError for a part of an epoch whose length is not known.
    """

    def __init__(
        self,
        args: RunSettings,
        state: TrainerState,
        control: TrainerControl,
        loader: TrainLoader,
        *,
        sync: StepSync | None,
        is_saved: Callable[[], bool],
    ) -> None:
        """``is_saved``: whether this rank has written its part of the newest checkpoint, which ``sync`` tells all."""
        self._args, self._state, self._control, self.loader = args, state, control, loader
        self._sync, self._is_saved = sync, is_saved
        try:
            self._data_length: int | None = len(loader)
        except TypeError:  # data without a length
            self._data_length = None
        self._steps_per_epoch = args.epoch_train_steps or self._data_length
        epochs = args.num_train_epochs
        if self._steps_per_epoch is None and args.max_steps <= 0 and epochs >= 0 and not epochs.is_integer():
            raise DataError(  # nobody can tell where a part of an epoch of unknown length ends
                f"num_train_epochs: {epochs:g} is no whole number, and the training data does not tell its length; "
                "set whole epochs, max_steps, or epoch_train_steps"
            )
        self._position = loader.state_dict()
        self._skipped = 0
        """Steps by which epochs of ``epoch_train_steps`` were cut short."""
        self._first = 0
        """The step after which the present epoch began."""
        self._before = 0.0
        """Epochs of the data that lay behind when steps were counted from 0."""
        self._stream: Iterator[Step] | None = None
        self._ahead: tuple[Step | None, dict[str, Any]] | None = None
        """A step that was fetched before its turn (None: this rank has no more data), and the position after it."""

    # ---------------------------------------------------------------------------------------------------------- steps

    def next_step(self) -> WorldStep | None:
        """Collective. The next step's data; None once a rank has none left."""
        step, position = self._ahead or self._fetch()
        has_data, counts = True, None
        if self._sync is not None:
            agreed = self._sync.read()
            assert agreed is not None
            has_data, counts = agreed.has_data, agreed.counts
            self._sync.clear()
        self._ahead = None
        if step is None or not has_data:
            return None
        self._position = position
        if self._sync is not None:
            self._fetch()
        return WorldStep(step.microbatches, counts or Counts.of(step))

    def _fetch(self) -> tuple[Step | None, dict[str, Any]]:
        if self._stream is None:
            self._stream = iter(self.loader)
        step = next(self._stream, None)
        self._ahead = step, self.loader.state_dict()
        if self._sync is not None:
            self._sync.start(step, saved=self._is_saved())
        return self._ahead

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
        self.loader.load_state_dict(position)
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
        # map-style data may have no whole step left in this epoch; other data tells when it is asked for one
        is_map_style = "stream" not in self._position and self._data_length is not None
        if data_ended or stopped or (is_map_style and self._steps_behind() >= (self._data_length or 0)):
            self.loader.set_epoch(self.epoch + 1)
            self._restart()
        self._control.should_epoch_stop = False
        self.update_max_steps()

    def _restart(self) -> None:
        """At the loader's position, with nothing fetched."""
        self._position, self._stream, self._ahead = self.loader.state_dict(), None, None
        if self._sync is not None:
            self._sync.clear()

    # --------------------------------------------------------------------------------------------------------- epochs

    def update_max_steps(self) -> None:
        """Say in the state how many epochs lie behind, and at which step training ends: 0 where the data will tell.

        ``max_steps`` wins over epochs. A fraction of an epoch is rounded up to whole steps, as in Hugging Face.
        """
        state, args, step = self._state, self._args, self._state.global_step
        state.epoch = self.done()
        if not step:
            self._before = state.epoch
        left = max(0.0, args.num_train_epochs - (state.epoch - self._before))
        if args.max_steps > 0:
            state.max_steps = args.max_steps
        elif args.num_train_epochs < 0:  # one pass over the data, into whatever epochs it is cut
            state.max_steps = step if self.epoch else 0
        elif self._steps_per_epoch is None:
            state.max_steps = 0 if left else step
        else:
            state.max_steps = step + math.ceil(left * self._steps_per_epoch - 1e-9)

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

    def _steps_behind(self) -> int:
        """Steps of this epoch that are done: by the number of samples, so that it holds when the batch size changes."""
        return -(-int(self._position["sample"]) // self.loader.global_batch_size)

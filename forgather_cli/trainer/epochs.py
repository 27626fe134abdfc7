"""The position of training in its data: the next step's batches, epochs, and the step at which training ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.config.schedule import in_steps, shares
from forgather_cli.config.schema import RunSettings
from forgather_cli.data.loaders.collate import Batch, Step
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.documents.fields import COUNT, check_fields
from forgather_cli.errors import DataError
from forgather_cli.trainer.step_sync import StepSync


class MicrobatchEvents:
    """A step's micro-batches on this rank, with the events around each, for a strategy to iterate: it takes the next
    one when it has finished the one before."""

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
    """Returns the data of each step, counts epochs, and is what a checkpoint saves as the position in the data
    (component ``data``).

    Several ranks agree on each step through ``sync``. So that they need not wait for the agreement, the step after the
    one in training is fetched already; the saved position does not count it. An epoch ends for all ranks when one has
    no more data, when a callback asks for it, or after ``epoch_train_steps``, which leaves the data where it is. Raises
    DataError for a fraction of an epoch of unknown length.
    """

    def __init__(
        self,
        args: RunSettings,
        state: TrainerState,
        control: TrainerControl,
        loader: TrainLoader,
        *,
        sync: StepSync | None,
        save_done: Callable[[], bool],
    ) -> None:
        """``save_done()``: no checkpoint is being written on this rank; ``sync`` lets all ranks know."""
        self._args, self._state, self._control, self.loader = args, state, control, loader
        self._sync, self._save_done = sync, save_done
        try:
            self._data_length: int | None = len(loader)
        except TypeError:  # data without a length
            self._data_length = None
        self._steps_per_epoch = args.epoch_train_steps or self._data_length
        state.epoch_train_steps = self._steps_per_epoch or 0
        epochs = args.num_train_epochs
        if self._steps_per_epoch is None and args.max_steps <= 0 and epochs >= 0 and not epochs.is_integer():
            raise DataError(
                f"num_train_epochs: {epochs:g} is no whole number, and the training data does not tell its length; "
                "set whole epochs, max_steps, or epoch_train_steps"
            )
        tells = args.max_steps > 0 or (self._steps_per_epoch is not None and epochs >= 0)
        for name, share in () if tells else shares(args).items():
            what = f"{name}: is {share}, and the training data does not tell their number"
            raise DataError(f"{what}; set max_steps, or {name} in steps")
        self._position = loader.state_dict()
        self._skipped = 0
        """Steps by which epochs of ``epoch_train_steps`` were cut short."""
        self._first = 0
        """``global_step`` when the present epoch began."""
        self._before = 0.0
        """Epochs of the data that were done at ``global_step`` 0."""
        self._stream: Iterator[Step] | None = None
        self._ahead: tuple[Step | None, dict[str, Any]] | None = None
        """A step that was fetched before its turn (None: this rank has no more data), and the position after it."""

    # ---------------------------------------------------------------------------------------------------------- steps

    def next_step(self) -> Step | None:
        """Collective. The next step's data, with the counts of all ranks together, after which the position is behind
        it; None once a rank has none left.
        """
        if self._stream is None:
            self._stream = iter(self.loader)
        if self._sync is None:  # alone: there is nobody to agree with
            step = next(self._stream, None)
            if step is None:
                return None
            self._position = self.loader.state_dict()
            return step
        step, position = self._ahead or self._fetch(self._stream, self._sync)
        agreed = self._sync.read()
        assert agreed is not None
        self._sync.clear()
        self._ahead = None
        if step is None or not agreed.has_data:
            return None
        self._position = position
        self._fetch(self._stream, self._sync)
        return Step(step.microbatches, agreed.counts)

    def _fetch(self, stream: Iterator[Step], sync: StepSync) -> tuple[Step | None, dict[str, Any]]:
        step = next(stream, None)
        self._ahead = step, self.loader.state_dict()
        sync.start(step, save_done=self._save_done())
        return self._ahead

    # ------------------------------------------------------------------------------------------------------- position

    @property
    def epoch(self) -> int:
        """The epoch of the step that comes next."""
        return int(self._position["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step returned; the start of the next epoch where this one is to stop."""
        stops = self._control.should_epoch_stop
        position = self.loader.data.start_of(self.epoch + 1, self._position) if stops else dict(self._position)
        skipped = self._skipped + (self._steps_left() if stops else 0)
        return {**position, "skipped_steps": skipped} if skipped else position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fields({"skipped_steps": 0, **state} if isinstance(state, dict) else state, {"skipped_steps": COUNT})
        position = dict(state)
        self._skipped = position.pop("skipped_steps", 0)
        self.loader.load_state_dict(position)
        self._restart()

    def begin(self) -> None:
        """Note that an epoch begins."""
        self._control.should_epoch_stop = False
        self._first = self._state.global_step

    def end(self, *, data_ended: bool) -> None:
        """Note that the present epoch is over. Goes to the start of the data if they ended or a callback stopped the
        epoch, and updates ``max_steps``: an epoch that was cut short moves the end of training by epochs.
        """
        stopped = self._control.should_epoch_stop
        self._skipped += self._steps_left() if stopped else 0
        # map-style data may have no whole step left; of other data that shows only when the next step is fetched
        is_map_style = "stream" not in self._position and self._data_length is not None
        if data_ended or stopped or (is_map_style and self._steps_done() >= (self._data_length or 0)):
            if self.loader.epoch != self.epoch + 1:
                self.loader.load_state_dict(self.loader.data.start_of(self.epoch + 1, self._position))
            self._restart()
        self._control.should_epoch_stop = False
        self.update_max_steps()

    def close(self) -> None:
        """End data workers."""
        self._stream = self._ahead = None
        self.loader.close()

    def _restart(self) -> None:
        """Go to the loader's position, with nothing fetched."""
        self._position, self._stream, self._ahead = self.loader.state_dict(), None, None
        if self._sync is not None:
            self._sync.clear()

    # --------------------------------------------------------------------------------------------------------- epochs

    def update_max_steps(self) -> None:
        """Set ``state.epoch``, and ``state.max_steps``, the step at which training ends: 0 for when the data end; and
        what the steps are of which one logs, evaluates and saves. The order of data that depends on these is settled.

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
        settled = self.loader.data.settled(self._position, step, state.max_steps)
        if settled != self._position:
            self.loader.load_state_dict(settled)
            self._restart()
        state.max_steps = min(state.max_steps, step + self.loader.data.steps_left(self._position))
        steps = (args.logging_steps, args.eval_steps, args.save_steps)
        state.logging_steps, state.eval_steps, state.save_steps = (in_steps(each, state.max_steps) for each in steps)

    def done(self) -> float:
        """Epochs done, with the fraction of the present one where its length is known."""
        if self._args.epoch_train_steps:
            return (self._state.global_step + self._skipped) / self._args.epoch_train_steps
        if not self._data_length:
            return float(self.epoch)
        return self.epoch + min(1.0, self._steps_done() / self._data_length)

    def is_full(self) -> bool:
        """True if the present epoch has its ``epoch_train_steps``."""
        steps, now = self._args.epoch_train_steps, self._state.global_step
        self._first = min(self._first, now)  # a rollback may have gone to before this epoch
        return steps is not None and now > self._first and (now + self._skipped) % steps == 0

    def _steps_left(self) -> int:
        """Steps to the end of the present epoch by ``epoch_train_steps``; 0 without it."""
        steps = self._args.epoch_train_steps
        return 0 if steps is None or self.is_full() else steps - (self._state.global_step + self._skipped) % steps

    def _steps_done(self) -> int:
        """Steps of this epoch that are done, by the samples behind, so that another batch size counts right."""
        return -(-int(self._position["sample"]) // self.loader.global_batch_size)

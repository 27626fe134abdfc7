"""Where training stands in its data: epochs, their length, and when they end."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.callbacks.base import TrainerState
from forgather_cli.config.schema import RunSettings
from forgather_cli.data.collate import Step
from forgather_cli.data.loader import EvalLoader, TrainLoader
from forgather_cli.trainer import schedule


def length(loader: TrainLoader | EvalLoader) -> int | None:
    """Steps or batches of a loader; None where the data has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


class Epochs:
    """Hands out steps and knows how many epochs lie behind.

    An epoch ends with the data, or after ``epoch_train_steps``, which leaves the data where it is.
    """

    def __init__(self, args: RunSettings, state: TrainerState, loader: TrainLoader) -> None:
        self._args, self._state, self._loader = args, state, loader
        self._data_length = length(loader)
        self._stream: Iterator[Step] | None = None

    def next_step(self) -> Step | None:
        """The next step's data; None at the end of the data."""
        if self._stream is None:
            self._stream = iter(self._loader)
        return next(self._stream, None)

    def roll_over(self, epoch: int) -> None:
        """Go to the start of the data, in the order of ``epoch``."""
        self._loader.set_epoch(epoch)
        self._stream = None

    def total_steps(self) -> int | None:
        """The step at which training ends, seen from here; None: when the data ends."""
        return schedule.total_steps(
            self._args,
            steps_per_epoch=self._args.epoch_train_steps or self._data_length,
            done=self._state.global_step,
            epochs_done=self.done() if self._state.global_step else 0.0,
        )

    def done(self) -> float:
        """Epochs behind, with the fraction of the current one where its length is known."""
        if self._args.epoch_train_steps:
            return self._state.global_step / self._args.epoch_train_steps
        if not self._data_length:
            return float(self._loader.epoch)
        return self._loader.epoch + min(1.0, self._steps_behind() / self._data_length)

    def is_full(self, first_step: int) -> bool:
        """True if an epoch that began at ``first_step`` has its ``epoch_train_steps``."""
        steps, now = self._args.epoch_train_steps, self._state.global_step
        return steps is not None and now > first_step and now % steps == 0

    def data_is_used_up(self) -> bool:
        """True if map-style data has no whole step left in this epoch; other data tells when it is asked for one."""
        streams = "stream" in self._loader.state_dict()
        return not streams and self._data_length is not None and self._steps_behind() >= self._data_length

    def _steps_behind(self) -> int:
        """Steps of this epoch that are done: by the number of samples, so that it holds when the batch size changes."""
        return -(-int(self._loader.state_dict()["sample"]) // self._loader.global_batch_size)

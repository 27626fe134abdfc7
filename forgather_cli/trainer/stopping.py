"""What a run is told from outside or by one rank, and what all ranks have agreed on: signals, commands, an abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forgather_cli.data.loaders.collate import Step
from forgather_cli.trainer.commands import Asked, Commands, NoCommands
from forgather_cli.trainer.step_sync import NUM_STOPS, Sum, Ticket, stop_numbers, stop_of

if TYPE_CHECKING:
    from forgather_cli.trainer.trainer import Trainer


class Stopping:
    """A Trainer's signals and commands. ``should_stop()`` is what this rank was told, ``on_stop`` hears what all will
    act on.

    ``commands`` may be set until training begins; every rank has one, which on all but rank 0 is asked for nothing.
    """

    def __init__(self, trainer: Trainer, should_stop: Callable[[], int | None], on_stop: Callable[[int], None]) -> None:
        self._trainer, self._should_stop, self._on_stop = trainer, should_stop, on_stop
        self.commands: Commands = NoCommands()
        self.begin()

    def begin(self) -> None:
        """A new training: nothing was agreed on so far."""
        self.signum: int | None = None
        """The signal that ends training, once it is agreed on."""
        self.obeyed = Asked()
        """The commands that all ranks have acted on."""

    @property
    def wants_save(self) -> bool:
        """Training that ends now is to leave a checkpoint: by ``save_strategy``, a signal, or a command or callback."""
        t = self._trainer
        return self.signum is not None or t.control.should_save or t.args.save_strategy != "no"

    def ticket(self, step: Step | None) -> Ticket:
        """Collective. Begin to agree on the step that this rank has fetched."""
        t = self._trainer
        return Ticket(
            step,
            asked=[] if t.cpu_group is None else self.ask(),  # one rank polls after the step
            saved=t.persistence.is_done,
            world=t.world.size,
            copies=t.world.size // t.strategy.data_size,
            group=t.cpu_group,
        )

    def read_ticket(self) -> bool:
        """Collective. Act on what any rank was told, as the next step's ticket says.

        True if what the checkpoint writers have published may be told, since all ranks know it.
        """
        agreed = self._trainer.epochs.pending()
        if agreed is None:
            return False
        self.heed(agreed.asked)
        return agreed.saved

    def poll(self) -> bool:
        """Collective. True if any rank has been told to stop. Waits for all ranks."""
        return self.heed(Sum(self.ask(), self._trainer.cpu_group).read())

    def ask(self) -> list[int]:
        """What this rank was told, as numbers to be summed over ranks."""
        abort = int(self._trainer.control.should_abort_without_save)
        return [abort, *stop_numbers(self._should_stop()), *self.commands.asked().numbers()]

    def heed(self, sums: list[int]) -> bool:
        """Act on what any rank was told; True if an evaluation or a generation is to be given up."""
        control = self._trainer.control
        control.should_abort_without_save |= sums[0] > 0
        self._agree(stop_of(sums[1 : 1 + NUM_STOPS]))
        stops = self._obey(Asked(*sums[1 + NUM_STOPS :]))
        return control.should_abort_without_save or self.signum is not None or stops

    def _obey(self, asked: Asked) -> bool:
        """Do what was asked for since the last time; True if that is to stop."""
        new = asked.since(self.obeyed)
        if max(new.numbers()) <= 0:  # below zero: a sum that was started before the last one
            return False
        self.obeyed = asked
        control = self._trainer.control
        control.should_save |= new.saves > 0
        control.should_training_stop |= new.stops > 0 or new.aborts > 0
        control.should_abort_without_save |= new.aborts > 0
        self.commands.agreed(asked)
        return new.stops > 0 or new.aborts > 0

    def _agree(self, signum: int | None) -> None:
        if signum is not None and self.signum is None:
            self.signum = signum
            self._on_stop(signum)

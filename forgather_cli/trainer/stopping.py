"""Stopping on all ranks alike: what one rank was told, by a signal or by a callback, and what all have agreed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forgather_cli.data.collate import Step
from forgather_cli.trainer.ticket import Sum, Ticket, stop_numbers, stop_of

if TYPE_CHECKING:
    from forgather_cli.trainer.trainer import Trainer


class Stopping:
    """A Trainer's signals. ``should_stop()`` is what this rank was told, ``on_stop`` hears what all will act on."""

    def __init__(self, trainer: Trainer, should_stop: Callable[[], int | None], on_stop: Callable[[int], None]) -> None:
        self._trainer, self._should_stop, self._on_stop = trainer, should_stop, on_stop
        self.signum: int | None = None
        """The signal that ends training, once it is agreed on."""

    def ticket(self, step: Step | None) -> Ticket:
        """Collective. Begin to agree on the step that this rank has fetched."""
        t = self._trainer
        return Ticket(
            step,
            stop=None if t.cpu_group is None else self._should_stop(),  # one rank polls after the step
            saved=t.persistence.is_done,
            world=t.world.size,
            copies=t.world.size // t.strategy.data_size,
            group=t.cpu_group,
        )

    def read_ticket(self) -> bool:
        """Collective. Stop if any rank was told to, as the next step's ticket says.

        True if what the checkpoint writers have published may be told, since all ranks know it.
        """
        agreed = self._trainer.epochs.pending()
        if agreed is None:
            return False
        self._agree(agreed.stop)
        return agreed.saved

    def poll(self) -> bool:
        """Collective. True if any rank has been told to stop. Waits for all ranks."""
        return self.heed(Sum(self.ask(), self._trainer.cpu_group).read())

    def ask(self) -> list[int]:
        """What this rank was told, as numbers to be summed over ranks."""
        return [int(self._trainer.control.should_abort_without_save), *stop_numbers(self._should_stop())]

    def heed(self, sums: list[int]) -> bool:
        """Act on what any rank was told; True if an evaluation is to be given up."""
        control = self._trainer.control
        control.should_abort_without_save |= sums[0] > 0
        self._agree(stop_of(sums[1:]))
        return control.should_abort_without_save or self.signum is not None

    def _agree(self, signum: int | None) -> None:
        if signum is not None and self.signum is None:
            self.signum = signum
            self._on_stop(signum)

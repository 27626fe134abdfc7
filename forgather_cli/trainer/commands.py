"""Commands to a running job: how many of each kind were asked for, and how many all ranks have agreed to act on.

Counts, not flags, travel in the tickets: a sum that is never read loses nothing, and one command in two sums acts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Asked:
    """How often each was asked for since the job began. Saving and stopping at once counts in both."""

    saves: int = 0
    stops: int = 0
    """Finish the step, save by ``save_strategy``, leave."""
    aborts: int = 0
    """Leave at once, save nothing."""

    def numbers(self) -> list[int]:
        """To be summed over ranks."""
        return [self.saves, self.stops, self.aborts]

    def since(self, earlier: Asked) -> Asked:
        """What has come after ``earlier``."""
        return Asked(self.saves - earlier.saves, self.stops - earlier.stops, self.aborts - earlier.aborts)


class Commands(Protocol):
    """Where commands come from. Read in the main thread of every rank; only rank 0 is ever asked for anything."""

    def asked(self) -> Asked:
        """What this rank was asked for so far."""

    def agreed(self, all_ranks: Asked) -> None:
        """Every rank acts on these now; called when they have changed."""


class NoCommands:
    """Nobody asks."""

    def asked(self) -> Asked:
        return Asked()

    def agreed(self, all_ranks: Asked) -> None: ...

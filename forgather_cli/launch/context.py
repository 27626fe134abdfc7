"""What the parts of one rank share: where it stands among the ranks, what it trains, and how it hears of the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forgather_cli.launch.exit_status import DONE, FAILED, STOPPED, ExitStatus
from forgather_cli.launch.job import Job
from forgather_cli.launch.place import Place
from forgather_cli.launch.rank_log import LogFile
from forgather_cli.launch.rendezvous import Rendezvous
from forgather_cli.launch.run_lock import begin_training
from forgather_cli.launch.signals import StopSignal
from forgather_cli.run_dir import RunDir


@dataclass
class RankContext:
    """This process's part in a run. What is None or missing comes to be while ``rank.train`` runs."""

    place: Place
    job: Job | None = None
    """The launcher's folder, where one of ours has started this process."""
    rendezvous: Rendezvous | None = None
    leave_directory: Callable[[ExitStatus], None] = lambda status: None
    """Leaves the run directory as a status of the job asks, if this process ends without returning."""
    run: RunDir | None = None
    log: LogFile | None = None
    stop: StopSignal = field(init=False)
    step: int | None = None
    """Optimizer steps of the run so far, once one of this process is done."""
    still: float = 0.0
    """Seconds without progress."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when this rank ends by itself, and needs not be told any more."""

    @property
    def rendezvous_folder(self) -> Path | None:
        """Where all ranks meet that our launcher has started on one node; None for others, which meet in a TCPStore."""
        on_one_node = self.job is not None and self.job.nodes == 1
        return self.job.attempt(self.place.attempt).folder / "rendezvous" if self.job and on_one_node else None

    def connect(self) -> Rendezvous | None:
        """Connect to the other ranks, once; None alone. Raises SetupError."""
        if self.rendezvous is None and self.place.size > 1:
            self.rendezvous = Rendezvous(self.place, self.rendezvous_folder)
        return self.rendezvous

    def stepped(self, step: int) -> None:
        """A step is done. After the first one settings, data and model were found sound."""
        if self.step is None and self.place.rank == 0 and self.run is not None:
            begin_training(self.run)
        self.step = step

    def exit_code(self, status: ExitStatus) -> int:
        """What this process returns. How a run ended is in the job's folder and in ``exit.json``: torchrun's agent
        restarts what does not return 0.
        """
        if self.job is not None:
            return FAILED if status.worth_a_restart and not self.stop.name else DONE
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - self.place.attempt
        if self.place.by and (status.code == STOPPED or (status.state == "aborted" and restarts > 0)):
            return DONE
        return status.code

"""RankContext: what the parts of one rank's process share, and what training is told by and tells its job."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forgather_cli.launch.exit_status import DONE, FAILED, STOPPED, ExitStatus
from forgather_cli.launch.job import Job
from forgather_cli.launch.place import Place
from forgather_cli.launch.rank_log import LogFile
from forgather_cli.launch.rendezvous import Rendezvous
from forgather_cli.launch.run_lock import after_step
from forgather_cli.launch.signals import StopSignal
from forgather_cli.launch.stacks import Standing, odd_first, own_standing, silent_standing
from forgather_cli.run_dir import RunDir

_ANSWER = 3.0  # seconds that a rank gets to tell where it stands


@dataclass
class RankContext:
    """This process as one rank of a run. ``rank.run_rank`` fills what is None or missing at first.

    It is the job of a Trainer that a command has started (``trainer.step_sync.TrainingJob``).
    """

    place: Place
    job_folder: Job | None = None
    """None: our launcher has not started this process."""
    rendezvous: Rendezvous | None = None
    conclude_run: Callable[[ExitStatus], None] = lambda status: None
    """Called with the run's status when it ends, also at once (``RunLock.conclude``)."""
    run: RunDir | None = None
    """What the command names, until it is known for sure."""
    log: LogFile | None = None
    stop: StopSignal = field(init=False)
    step: int | None = None
    """Optimizer steps of the run so far; None before this process has done one."""
    still: float = 0.0
    """Seconds without progress."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when this rank ends by itself: the threads that watch end too."""

    @property
    def rendezvous_folder(self) -> Path | None:
        """The ranks' store, if our launcher has started all of them on one node; None: they use a TCPStore."""
        if self.job_folder is None or self.job_folder.nodes != 1:
            return None
        return self.job_folder.attempt(self.place.attempt).folder / "rendezvous"

    def connect(self) -> Rendezvous | None:
        """Connect to the other ranks, once; None alone. Raises SetupError."""
        if self.rendezvous is None and self.place.size > 1:
            self.rendezvous = Rendezvous(self.place, self.rendezvous_folder)
        return self.rendezvous

    def meet(self, what: str) -> str | Callable[[], str]:
        """For ``doing``, before something that all ranks do together: which of them are not there yet."""
        return what if self.rendezvous is None else self.rendezvous.meet(what)

    def poll(self) -> int | None:
        """The stop signal that this rank has received. The hang watch sees by it that training makes progress."""
        return self.stop.poll()

    def acknowledge(self, signum: int) -> None:
        """All ranks have agreed to stop because of a signal that at least one of them received."""
        self.stop.acknowledge(signum)

    def stepped(self, step: int) -> None:
        """So many steps are done. Raises TrainingError if the run directory is gone."""
        if self.place.rank == 0 and self.run is not None:
            after_step(self.run, first=self.step is None)
        self.step = step

    def stacks(self) -> dict[str, Any]:
        """What ``forgather control stacks`` shows: the stack of every rank. May be called in any thread."""
        return {"ranks": [asdict(standing) for standing in self.standings()]}

    def standings(self) -> list[Standing]:
        """Where all ranks stand, the odd ones first. Waits some seconds for ranks that do not answer."""
        own, rendezvous = own_standing(self.place.rank, self.step, self.still), self.rendezvous
        if rendezvous is None:
            return [own]
        found = {own.rank: own}
        before = {n: rendezvous.store.get(f"stands/{n}") for n in range(self.place.size) if n != own.rank}
        rendezvous.store.set("where", f"{own.rank} {time.time_ns()}")
        until = time.monotonic() + _ANSWER
        while before and time.monotonic() < until:
            time.sleep(0.05)
            for other, old in list(before.items()):
                text = rendezvous.store.get(f"stands/{other}")
                if text is not None and text != old:
                    found[other] = Standing.from_document(json.loads(text)["standing"])
                    del before[other]
        for other in before:
            found[other] = silent_standing(other, rendezvous.store.get(f"place/{other}"), self.still)
        return odd_first([found[each] for each in sorted(found)])

    def exit_code(self, status: ExitStatus) -> int:
        """This process's exit code. Under torchrun's agent it only tells whether to restart the ranks, which the agent
        does unless all return 0; how the run ended is in the job folder and in ``exit.json``. Slurm restarts no rank.
        """
        if self.job_folder is not None:
            return FAILED if status.worth_a_restart and not self.stop.name else DONE
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - self.place.attempt
        if self.place.by not in ("", "Slurm") and (
            status.code == STOPPED or (status.state == "aborted" and restarts > 0)
        ):
            return DONE
        return status.code

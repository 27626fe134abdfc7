"""The process edge of one rank: its log, signals, process group and errors around ``worker.run``.

``trainer=single`` and ranks that others have started are trained from ``launch``, in its process; those that our
launcher starts are ``python -m forgather_cli.launch.rank [--config RUN/config.yaml]``, without it where another node
has it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forgather_cli.config.schema import Config
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.launch import failures, hang, process_group, signals, watch
from forgather_cli.launch.exit_status import DONE, FAILED, MISTAKE, STOPPED, ExitStatus, done
from forgather_cli.launch.job import Job
from forgather_cli.launch.place import Place, enter, launched
from forgather_cli.launch.process import collect_less, end_with_parent, leave, leave_now
from forgather_cli.launch.rank_log import lasting_output, rank_log
from forgather_cli.launch.rendezvous import FAREWELL, Rendezvous
from forgather_cli.launch.run_lock import begin_training
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.launch.rank_log import LogFile

_WAIT_FOR_CONFIG = 600.0  # seconds
_FAILED_FAREWELL = 5.0  # seconds; ranks that were killed will never say goodbye
_SEES_DIRECTORY = 10.0  # seconds that a network file system gets to show what another node has written


@dataclass(frozen=True)
class Start:
    """What a rank is to train, and where."""

    run: RunDir
    config: Callable[[], Config]
    going_on: bool | None = None
    """True to go on from the newest checkpoint whatever the config says; None: after a restart."""


class Rank:
    """This process's part in a run: what it knows of the other ranks, and what they hear of it.

    ``job``: the launcher's folder, where one of ours has started it. ``settle`` is called with the status of the job if
    this process ends without returning, and is to leave the run directory as that status asks.
    """

    def __init__(
        self,
        place: Place,
        *,
        job: Job | None = None,
        rendezvous: Rendezvous | None = None,
        settle: Callable[[ExitStatus], None] = lambda status: None,
    ) -> None:
        self.place, self.job, self.rendezvous = place, job, rendezvous
        self.settle = settle
        self.run: RunDir | None = None
        self.log: LogFile | None = None
        self.ended = threading.Event()
        """Set when this rank ends by itself, and needs not be told any more."""
        self.stop: signals.StopSignal
        self.step: int | None = None
        """Optimizer steps of the run so far, once one of this process is done."""
        self.hang: hang.HangWatch | None = None

    def train(self, find: Callable[[Rank], Start]) -> ExitStatus:
        """Train what ``find`` says. Never raises: errors are told, shown, and returned as the status."""
        with ExitStack() as stack:
            try:
                self.stop = stack.enter_context(signals.watching(watch.hooks(self)))
                stack.enter_context(watch.others(self))
                start = find(self)
                self.run = start.run
                self.log = self._open_log(stack, start.run)
                status = self._work(start)
            except (Exception, SystemExit) as error:  # the edge of the process
                status = failures.status_of(self, error)
            self.ended.set()
            failures.tell(self, status)
            watch.leave(self, patience=_FAILED_FAREWELL if status.failed else FAREWELL)
            if self.place.rank == 0 and self.run is not None and not status.failed:  # else a restart may ask for it
                self.run.secret.unlink(missing_ok=True)
        return status

    def exit_code(self, status: ExitStatus) -> int:
        """What this process returns: torchrun's agent of our launcher restarts what does not return 0.

        How a run ended is in the job's folder and in ``exit.json``.
        """
        if self.job is not None:
            return FAILED if status.worth_a_restart and not self.stop.name else DONE
        restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - self.place.attempt
        if self.place.by and (status.code == STOPPED or (status.state == "aborted" and restarts > 0)):
            return DONE
        return status.code

    def meet(self) -> Rendezvous | None:
        """Connect to the other ranks, once; None alone. Raises SetupError."""
        if self.rendezvous is None and self.place.size > 1:
            self.rendezvous = Rendezvous(
                self.place, self.job.rendezvous_folder(self.place.attempt) if self.job else None
            )
        return self.rendezvous

    def _open_log(self, stack: ExitStack, run: RunDir) -> LogFile:
        try:
            return stack.enter_context(rank_log(run.rank_log(self.place.rank), terminal=self.place.rank == 0))
        except OSError as error:
            raise SetupError(f"output_dir: {error.filename} cannot be written: {error.strerror}") from error

    def _work(self, start: Start) -> ExitStatus:
        config, place = start.config(), self.place
        rendezvous = self.meet()
        going_on = place.attempt > 0 and _can_go_on(config, start.run) if start.going_on is None else start.going_on
        if rendezvous is not None and place.rank == 0:
            rendezvous.share(start.run, going_on=going_on)
        if going_on:
            config = replace(config, resume_from_checkpoint=True, resume_components="all")
        with (
            process_group.initialised(config, place, rendezvous),
            watch.progress(self, config.hang_timeout),
            hang.watched(self, config),
        ):
            if start.run.evaluation.exists():
                return self._evaluate(config, start.run)
            from forgather_cli import worker

            return worker.run(
                config,
                start.run,
                should_stop=lambda: self.stop.signum,
                on_stop=self.stop.honour,
                on_step=self._stepped,
                stacks=lambda: {"ranks": [asdict(standing) for standing in hang.standings_of_all(self)]},
            ).finish()

    def _evaluate(self, config: Config, run: RunDir) -> ExitStatus:
        """Of ``forgather eval``. Signals end it at once, since nobody asks ``stop`` for them."""
        from forgather_cli.evaluation import evaluate_source

        logging.getLogger("forgather_cli").setLevel(logging.WARNING)  # as in one process
        request = json.loads(run.evaluation.read_text(encoding="utf-8"))
        with contextlib.redirect_stdout(sys.stderr):  # what the launcher prints is one document
            report = evaluate_source(Path(request.pop("source")), config, **request)
        if self.place.rank == 0:
            run.report.write_text(json.dumps(report), encoding="utf-8")
        return done(self.place.rank)

    def _stepped(self, step: int) -> None:
        """A step is done. After the first one settings, data and model were found sound."""
        if self.step is None and self.place.rank == 0 and self.run is not None:
            begin_training(self.run)
        self.step = step


def _can_go_on(config: Config, run: RunDir) -> bool:
    """True if a restart goes on with the run. One that began from another's checkpoint begins there again at first."""
    return bool(run.checkpoint_steps()) or not isinstance(config.resume_from_checkpoint, str)


# -------------------------------------------------------------------------------------------------------- what to train


def saved(path: Path) -> Callable[[Rank], Start]:
    """What the config file of a start says, for ranks that see it."""

    def find(rank: Rank) -> Start:
        from forgather_cli.config.decode import load_saved

        several = rank.job is not None and rank.job.nodes > 1  # whose working directories may differ
        return Start(RunDir(path.parent.resolve() if several else path.parent), lambda: load_saved(path))

    return find


def shared(rank: Rank) -> Start:
    """What rank 0 shares, once it does. Raises SetupError where this node does not see its run directory."""
    from forgather_cli.config.decode import load_saved

    rendezvous = rank.meet()
    assert rendezvous is not None
    begun = time.monotonic()
    told: float | None = None
    while (answer := rendezvous.shared())[0] is None:
        now, problem = time.monotonic(), answer[1]
        told = now if told is None and problem else told
        if told is not None and now > told + _SEES_DIRECTORY:
            raise SetupError(problem)
        if now > begun + _WAIT_FOR_CONFIG:
            raise SetupError(f"rank 0 has not told what to train within {_WAIT_FOR_CONFIG:g} s; see its output")
        time.sleep(0.05)
    found = answer[0]
    assert found is not None
    run = RunDir(Path(found.root))
    config = run.root / found.config
    return Start(run, lambda: replace(load_saved(config), output_dir=str(run.root)), going_on=found.going_on)


def uneven(rank: Rank) -> Start:
    """Nothing: ranks are numbered by nodes of one size."""
    here, world = rank.place.local_size, rank.place.size
    raise ConfigError(f"nproc_per_node: must be the same on every node, got {here} here of {world} ranks; set it")


# ---------------------------------------------------------------------------------------------------------- the process


@lasting_output()
def main() -> int:
    """A rank that our launcher started."""
    try:
        job = Job.entered()
    except FileNotFoundError:  # the launcher was stopped and has taken its folder along
        return FAILED
    if job is None:
        print("forgather_cli.launch.rank is started by forgather train", file=sys.stderr)
        return MISTAKE
    end_with_parent(job.launcher)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until there is a log to print stacks to
    place = launched(job.node)
    enter(place)
    job.attempt(place.attempt).enter(place.rank)
    rank = Rank(place, job=job)
    path = Path(sys.argv[2]) if sys.argv[1:2] == ["--config"] else None
    find = shared if path is None else saved(path)
    status = rank.train(find if place.size == place.local_size * job.nodes else uneven)
    code = rank.exit_code(status)
    if status.failed:  # other ranks may be gone: nothing is worth waiting for that an exit might wait for
        leave_now(code)
    return code


if __name__ == "__main__":
    collect_less()
    leave(main())

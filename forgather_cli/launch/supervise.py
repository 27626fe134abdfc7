"""The launcher while its ranks train: it hands on signals, tells of restarts, and finds out why a run ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from forgather_cli.errors import SetupError
from forgather_cli.launch.exit_status import FAILED, MISTAKE, ExitStatus, Kind, cut, done, first_cause, killed
from forgather_cli.launch.job import Attempt, Job
from forgather_cli.launch.layout import Layout
from forgather_cli.launch.processes import children, is_running
from forgather_cli.launch.signals import STOP_SIGNALS, counts_again, end_process, listening
from forgather_cli.run_dir import RunDir

_LOOK = 0.1  # seconds
_PATIENCE = 5.0  # seconds that ranks get to end, after the first has failed
_UNWINDING = 20.0  # seconds that they get to exit, after all have told how they ended
_REAPED = 1.0  # seconds


class Supervisor:
    """Starts the ranks of this node and stays until they have ended.

    ``run`` is None on nodes that do not hold the run directory, which ``leave_directory`` leaves as a status asks.
    """

    def __init__(
        self, layout: Layout, job: Job, run: RunDir | None, leave_directory: Callable[[ExitStatus], None]
    ) -> None:
        self._layout, self._job, self._run, self._leave_directory = layout, job, run, leave_directory
        self._codes: dict[int, int] = {}
        self._trouble: BaseException | None = None
        self._asked: int | None = None
        self._watched: set[int] = set()
        self._exits: dict[int, int] = {}
        """Exit code by process id."""
        self._gone: dict[int, float] = {}
        self._failed_at: float | None = None
        self._told_at: float | None = None
        self._silent: set[int] = set()
        self._attempts_seen = 1

    def train(self, config: Path | None) -> ExitStatus:
        """Run the ranks; returns how the job ended, the first cause of it where it failed."""

        def run() -> None:
            try:
                from forgather_cli.launch.agent import run_agent

                self._codes = run_agent(self._layout, self._job, config)
            except BaseException as error:  # the edge of the thread
                self._trouble = error

        agent = threading.Thread(target=run, name="forgather-agent", daemon=True)
        with listening(self._arrived, (*STOP_SIGNALS, signal.SIGUSR2)):
            agent.start()
            while agent.is_alive():
                agent.join(_LOOK)
                self._look()
        return self._status()

    # ------------------------------------------------------------------------------------------------------- meanwhile

    def _attempt(self) -> Attempt:
        return self._job.attempt(max(0, self._job.attempts() - 1))

    def _look(self) -> None:
        """Note who is gone, tell of a restart, and end ranks that do not end by themselves."""
        attempts = self._job.attempts()
        if attempts > self._attempts_seen:
            cause = first_cause(self._causes(self._job.attempt(attempts - 2), {}))
            reason = cause.message if cause is not None else "a rank failed"
            rank_of = f"rank {cause.rank}: " if cause is not None and cause.kind in (Kind.MISTAKE, Kind.ERROR) else ""
            restart = f"restart {attempts - 1} of {self._layout.restarts}, from the newest checkpoint"
            print(f"\n{restart}: {rank_of}{reason}", file=sys.stderr, flush=True)
            self._attempts_seen = attempts
            self._gone, self._failed_at, self._told_at, self._silent = {}, None, None, set()
        attempt, now = self._attempt(), time.time()
        pids, statuses = attempt.pids(), attempt.statuses()

        def watch_exit(pid: int) -> None:
            """Learn the exit code of a rank, in a thread: the agent tells those of the last start only."""
            with contextlib.suppress(OSError):  # it was quick, or this system has no waitid
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the agent is to see it too
                if end is not None:
                    self._exits[pid] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

        for rank, pid in pids.items():
            if pid not in self._watched:
                self._watched.add(pid)
                threading.Thread(target=watch_exit, args=(pid,), name="forgather-exit", daemon=True).start()
            if rank not in self._gone and not is_running(pid):
                self._gone[rank] = now
        if self._failed_at is None and any(status.failed for status in statuses):
            self._failed_at = now
        if self._told_at is None and len(statuses) == self._layout.ranks_per_node:
            self._told_at = now
        late = self._failed_at is not None and now > self._failed_at + _PATIENCE
        if late or (self._told_at is not None and now > self._told_at + _UNWINDING):
            silent = pids.keys() - self._gone.keys()
            self._silent |= silent
            _kill(pids[rank] for rank in silent)

    # --------------------------------------------------------------------------------------------------------- signals

    def _arrived(self, signum: int) -> None:
        pids = self._attempt().pids()
        if signum == signal.SIGUSR2:
            _kill(pids.values(), signum)
        elif (self._asked is not None and counts_again(signum)) or not pids:
            end_process(128 + signum, lambda: self._cut(signum, early=self._asked is None))
        elif self._asked is None:
            self._asked = signum
            self._job.ask_to_stop(signum)
            if self._layout.node:
                print(f"{signal.Signals(signum).name}: told to all ranks", file=sys.stderr, flush=True)

    def _cut(self, signum: int, *, early: bool) -> int:
        doomed = {*self._attempt().pids().values(), *children(os.getpid())}  # some have not told their rank yet
        _kill(doomed)
        until = time.monotonic() + _REAPED
        while any(is_running(pid) for pid in doomed) and time.monotonic() < until:
            time.sleep(0.02)
        status = cut(0, self._run, signum, early)
        print(f"\n{status.message}", file=sys.stderr, flush=True)
        self._leave_directory(status)
        self._job.discard()
        return status.code

    # ------------------------------------------------------------------------------------------------------- the end

    def _status(self) -> ExitStatus:
        attempt = self._attempt()
        told = attempt.statuses()
        if self._trouble is not None and not isinstance(self._trouble, SetupError):
            raise self._trouble
        if self._trouble is not None and len(told) < self._layout.ranks_per_node:
            # the agents have not met, or not again: what our ranks told of a failure is nearer to the cause
            if self._job.attempts() == 0:
                return ExitStatus(0, Kind.MISTAKE, MISTAKE, str(self._trouble))
            return first_cause(told) or ExitStatus(0, Kind.LOST, FAILED, str(self._trouble))
        cause = first_cause(self._causes(attempt, self._codes))
        return cause or min(told, key=lambda status: status.rank, default=done(0))

    def _causes(self, attempt: Attempt, codes: dict[int, int]) -> list[ExitStatus]:
        """What the ranks of this node have told, and what became of those that could not.

        ``codes``: exit codes by rank on this node that are known besides.
        """
        first = self._layout.node * self._layout.ranks_per_node
        here = range(first, first + self._layout.ranks_per_node)
        ends = {rank: self._exits[pid] for rank, pid in attempt.pids().items() if pid in self._exits}
        ends |= {first + local: code for local, code in codes.items()}
        statuses = {status.rank: status for status in attempt.statuses()}
        # of a rank of this node that was killed the exit code says more than what the others have noticed
        causes = [each for each in statuses.values() if each.cause.kind != Kind.KILLED or each.cause.rank not in here]
        for rank in set(here) - statuses.keys():
            log = self._run.rank_log(rank) if self._run is not None else f"logs/rank-{rank}.log"
            code = ends.get(rank)
            by_agent = code == -signal.SIGTERM and any(end for other, end in ends.items() if other != rank)
            if rank in self._silent:
                message = f"rank {rank} gave no answer and was killed; its log is {log}"
                causes.append(ExitStatus(rank, Kind.STUCK, FAILED, message))
            elif not by_agent:  # which ends the others when one has failed
                causes.append(killed(rank, code, log, self._gone.get(rank, time.time())))
        return causes


def _kill(pids: Iterable[int], signum: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

"""The launcher while its ranks train: it passes on stop signals, reports restarts, and finds out why a run ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from forgather_cli.errors import SetupError, ranks_named
from forgather_cli.launch.exit_status import FAILED, MISTAKE, ExitStatus, Kind, cut, done, first_cause, killed
from forgather_cli.launch.job import Attempt, Job
from forgather_cli.launch.layout import Layout
from forgather_cli.launch.processes import children, is_running
from forgather_cli.launch.signals import STOP_SIGNALS, counts_again, end_process, handle_signals
from forgather_cli.run_dir import RunDir
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import tell

_INTERVAL = 0.1  # seconds between two looks at the ranks
_PATIENCE = 5.0  # seconds that ranks get to end, after the first has failed
_UNWINDING = 20.0  # seconds that they get to exit, after all have reported how they ended
_REAPED = 1.0  # seconds that killed processes get to disappear


class Supervisor:
    """Starts the ranks of this node, under torchrun's agent in a thread, and stays until they have ended.

    ``run`` is None on all nodes but the one that holds the run directory. ``conclude_run(status)`` is called before
    this process ends at once, by a second signal.
    """

    def __init__(
        self, layout: Layout, job: Job, run: RunDir | None, conclude_run: Callable[[ExitStatus], None]
    ) -> None:
        self._layout, self._job, self._run, self._conclude_run = layout, job, run, conclude_run
        self._agent_codes: dict[int, int] = {}
        self._agent_error: BaseException | None = None
        self._stop_signum: int | None = None
        self._watched: set[int] = set()
        """Process ids."""
        self._exit_codes: dict[int, int] = {}
        """By process id."""
        self._gone_at: dict[int, float] = {}
        """By rank: when its process was found gone."""
        self._failed_at: float | None = None
        self._all_ended_at: float | None = None
        self._silent: set[int] = set()
        """Ranks that were killed because they did not end by themselves."""
        self._attempts_seen = 1
        self._has_imported, self._is_starting = False, True

    def run(self, config: Path | None) -> ExitStatus:
        """Run the ranks on the config file ``config``; returns how the job ended, with the cause where it failed."""

        def run() -> None:
            try:
                from forgather_cli.launch.agent import run_agent

                self._has_imported = True
                self._agent_codes = run_agent(self._layout, self._job, config)
            except BaseException as error:  # the edge of the thread
                self._agent_error = error

        agent = threading.Thread(target=run, name="forgather-agent", daemon=True)
        with handle_signals(self._on_signal, (*STOP_SIGNALS, signal.SIGUSR2)), ExitStack() as starting:
            starting.enter_context(doing(self._awaited))
            agent.start()
            while agent.is_alive():
                agent.join(_INTERVAL)
                self._check_ranks()
                if self._is_starting and not self._absent():
                    self._is_starting = False
                    starting.close()  # ranks speak for themselves
        return self._status()

    # ------------------------------------------------------------------------------------------------------- the ranks

    def _attempt(self) -> Attempt:
        return self._job.attempt(max(0, self._job.attempts() - 1))

    def _absent(self) -> list[int]:
        """Ranks of this node that have not begun."""
        first = self._layout.node * self._layout.ranks_per_node
        return sorted({*range(first, first + self._layout.ranks_per_node)} - self._attempt().pids().keys())

    def _awaited(self) -> str:
        """What this launcher waits for."""
        if not self._has_imported:
            return "importing torch to start the ranks"
        if self._job.attempts() == 0 and self._layout.nodes > 1:
            return f"waiting for all {self._layout.nodes} nodes at {self._layout.endpoint}"
        return f"waiting for {ranks_named(self._absent())} to begin"

    def _check_ranks(self) -> None:
        """Note which ranks are gone, report a restart, and kill ranks that do not end by themselves."""
        attempts = self._job.attempts()
        if attempts > self._attempts_seen:
            cause = first_cause(self._causes(self._job.attempt(attempts - 2), {}))
            reason = cause.message if cause is not None else "a rank failed"
            rank_of = f"rank {cause.rank}: " if cause is not None and cause.kind in (Kind.MISTAKE, Kind.ERROR) else ""
            restart = f"restart {attempts - 1} of {self._layout.restarts}, from the newest checkpoint"
            tell(f"\n{restart}: {rank_of}{reason}", sys.stderr)
            self._attempts_seen = attempts
            self._gone_at, self._failed_at, self._all_ended_at, self._silent = {}, None, None, set()
        attempt, now = self._attempt(), time.time()
        pids, statuses = attempt.pids(), attempt.statuses()

        def watch_exit(pid: int) -> None:
            """Note a rank's exit code, in a thread: the agent returns those of the last start only."""
            try:
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # leave it for the agent
            except OSError:  # which was faster, or this system has no waitid
                from forgather_cli.launch.agent import exit_code

                if (code := exit_code(pid)) is not None:
                    self._exit_codes[pid] = code
                return
            if end is not None:
                self._exit_codes[pid] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

        for rank, pid in pids.items():
            if pid not in self._watched:
                self._watched.add(pid)
                threading.Thread(target=watch_exit, args=(pid,), name="forgather-exit", daemon=True).start()
            if rank not in self._gone_at and not is_running(pid):
                self._gone_at[rank] = now
        if self._failed_at is None and any(status.failed for status in statuses):
            self._failed_at = now
        if self._all_ended_at is None and len(statuses) == self._layout.ranks_per_node:
            self._all_ended_at = now
        late = self._failed_at is not None and now > self._failed_at + _PATIENCE
        if late or (self._all_ended_at is not None and now > self._all_ended_at + _UNWINDING):
            silent = pids.keys() - self._gone_at.keys()
            self._silent |= silent
            _kill(pids[rank] for rank in silent)

    # --------------------------------------------------------------------------------------------------------- signals

    def _on_signal(self, signum: int) -> None:
        """Pass a first stop signal on to the ranks; end all at once after a second, or if no rank has begun."""
        pids = self._attempt().pids()
        if signum == signal.SIGUSR2:
            _kill(pids.values(), signum)
        elif (self._stop_signum is not None and counts_again(signum)) or not pids:
            end_process(128 + signum, lambda: self._end_now(signum, early=self._stop_signum is None))
        elif self._stop_signum is None:
            self._stop_signum = signum
            self._job.request_stop(signum)
            if self._layout.node:
                print(f"{signal.Signals(signum).name}: told to all ranks", file=sys.stderr, flush=True)

    def _end_now(self, signum: int, *, early: bool) -> int:
        """Kill all ranks and conclude the run; returns this process's exit code."""
        doomed = {*self._attempt().pids().values(), *children(os.getpid())}  # some have not reported their rank yet
        _kill(doomed)
        until = time.monotonic() + _REAPED
        while any(is_running(pid) for pid in doomed) and time.monotonic() < until:
            time.sleep(0.02)
        status = cut(0, self._run, signum, early)
        print(f"\n{status.message}", file=sys.stderr, flush=True)
        self._conclude_run(status)
        self._job.discard()
        return status.code

    # ------------------------------------------------------------------------------------------------------- the end

    def _status(self) -> ExitStatus:
        """How the job ended."""
        attempt = self._attempt()
        reported = attempt.statuses()
        if self._agent_error is not None and not isinstance(self._agent_error, SetupError):
            raise self._agent_error
        if self._agent_error is not None and len(reported) < self._layout.ranks_per_node:
            # the nodes have not met, or not again after a restart: what our ranks reported is nearer to the cause
            if self._job.attempts() == 0:
                return ExitStatus(0, Kind.MISTAKE, MISTAKE, str(self._agent_error))
            return first_cause(reported) or ExitStatus(0, Kind.LOST, FAILED, str(self._agent_error))
        cause = first_cause(self._causes(attempt, self._agent_codes))
        return cause or min(reported, key=lambda status: status.rank, default=done(0))

    def _causes(self, attempt: Attempt, codes: dict[int, int]) -> list[ExitStatus]:
        """The statuses that the ranks of this node reported, and for those that reported none what their exit says.

        ``codes``: the agent's exit codes, by rank on this node.
        """
        first = self._layout.node * self._layout.ranks_per_node
        here = range(first, first + self._layout.ranks_per_node)
        ends = {rank: self._exit_codes[pid] for rank, pid in attempt.pids().items() if pid in self._exit_codes}
        ends |= {first + local: code for local, code in codes.items()}
        statuses = {status.rank: status for status in attempt.statuses()}
        # the exit code of a killed rank of this node says more than what other ranks noticed of it
        causes = [each for each in statuses.values() if each.cause.kind != Kind.KILLED or each.cause.rank not in here]
        for rank in set(here) - statuses.keys():
            log = self._run.rank_log(rank) if self._run is not None else f"logs/rank-{rank}.log"
            code = ends.get(rank)
            by_agent = code == -signal.SIGTERM and any(end for other, end in ends.items() if other != rank)
            if rank in self._silent:
                message = f"rank {rank} gave no answer and was killed; its log is {log}"
                causes.append(ExitStatus(rank, Kind.STUCK, FAILED, message))
            elif not by_agent:  # the agent ends the other ranks when one has failed
                causes.append(killed(rank, code, log, self._gone_at.get(rank, time.time())))
        return causes


def _kill(pids: Iterable[int], signum: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

"""What becomes of a failure in a rank: which rank caused it, who hears of it, where it is shown, how the process ends.

Threads keep watch, since the main thread may wait in a collective. They end the process when its launcher is gone, when
another rank has failed, when the ranks' store is gone, or when training does not react to a stop signal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, NoReturn, cast

from forgather_cli.errors import CallbackError, PartError, TrainingError
from forgather_cli.launch import signals
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.error_report import report_failure
from forgather_cli.launch.exit_status import FAILED, ExitStatus, Kind, caused_by, cut, first_cause, from_error, killed
from forgather_cli.launch.job import Job
from forgather_cli.launch.processes import is_orphan
from forgather_cli.launch.rendezvous import within
from forgather_cli.launch.run_lock import check_in_place
from forgather_cli.launch.signals import StopSignal, end_process, say
from forgather_cli.launch.stacks import SAVES, SILENT, main_thread_stack, saves, standing_at, waits_for_others
from forgather_cli.run_dir import name_file

ANSWER = 3.0
"""Seconds in which the ranks' store answers, or counts as gone."""
_HEARSAY = 2.0  # seconds in which the cause of a broken connection gets known
_TRANSPORT = re.compile(r"gloo|NCCL|ProcessGroup|TCPStore|c10d", re.IGNORECASE)
_LOST = re.compile(r"connection|closed by|reset by|broken pipe|refused|aborted|remote process|to recv", re.IGNORECASE)
_TOO_LONG = re.compile(r"timed? ?out", re.IGNORECASE)
_NEAR, _FAR = 0.2, 1.0  # seconds between two looks at a folder, at a store of the network
_SETTLE = 1.0  # seconds in which a rank may end by itself, for the same reason as the one that was first
_ECHO = 2.0  # seconds; a scheduler and torchrun, each of which signals the ranks
_AFTER_YOU = 5.0  # seconds that a rank which waits for others leaves them to say where they stand


def status_of(rank: RankContext, error: BaseException) -> ExitStatus:
    """The exit status for an error. A broken connection names the rank whose failure broke it, if that can be found; of
    what fails without a run directory only that is told.
    """
    number = rank.place.rank
    if isinstance(error, PartError | CallbackError) and rank.run is not None:
        name_file(error, rank.run.option_files())
    if rank.step is not None and rank.run is not None:
        try:
            check_in_place(rank.run)
        except TrainingError as gone:  # whatever could not be written there
            return from_error(number, gone)
    broken = _broken_connection(error) if rank.place.size > 1 else None
    if broken is None:
        return from_error(number, error)
    text = "".join(traceback.format_exception(error))
    too_long = bool(_TOO_LONG.search(str(broken)))
    cause = known_cause(rank, patience=0.0 if too_long else _HEARSAY)
    if cause is not None:
        return caused_by(number, cause)
    if too_long:
        where = standing_at(traceback.extract_tb(error.__traceback__))
        message = f"hang_timeout passed in a collective: rank {number} stands at {where}"
        return ExitStatus(number, Kind.WAITED, FAILED, message, traceback=text)
    reason = (str(broken).splitlines() or [type(broken).__name__])[0]
    message = f"rank {number} lost the connection to another rank ({reason})"
    return ExitStatus(number, Kind.LOST, FAILED, message, traceback=text)


def _broken_connection(error: BaseException) -> BaseException | None:
    """The error in the chain of causes that is a lost or silent connection to another rank; None if there is none."""
    dist = sys.modules.get("torch.distributed")
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        text = str(each)
        of_transport = dist is not None and isinstance(each, dist.DistError)
        of_transport |= isinstance(each, RuntimeError) and bool(_TRANSPORT.search(text))
        if of_transport and (_LOST.search(text) or _TOO_LONG.search(text)):
            return each
        seen.add(id(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return None


# ------------------------------------------------------------------------------------------------- of other ranks


def known_cause(rank: RankContext, *, patience: float = 0.0) -> ExitStatus | None:
    """The failure of another rank that is a cause (``ExitStatus.is_cause``), if found within ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        cause = any_failure(rank)
        if cause is not None and cause.is_cause:
            return cause
        if time.monotonic() >= until:
            return None
        time.sleep(0.1)


def any_failure(rank: RankContext) -> ExitStatus | None:
    """The first failure of another rank known now. A store or a process of this node that is gone counts as one."""
    if rank.rendezvous is None:
        return None
    found = [within(ANSWER, rank.rendezvous.failure)]
    dead = within(ANSWER, rank.rendezvous.dead_neighbour)
    if dead is not None and dead != rank.place.rank:
        log = rank.run.rank_log(dead) if rank.run is not None else "in logs/"
        found.append(killed(dead, None, log, time.time()))
    return first_cause(status for status in found if status is not None)


# ------------------------------------------------------------------------------------------------------- of this one


def announce(rank: RankContext, status: ExitStatus) -> None:
    """Report to the launcher and to the other ranks how this one ended. A failure is logged, and shown by one rank."""
    if rank.job_folder is not None:
        rank.job_folder.attempt(rank.place.attempt).write_status(status)
    if not status.failed:
        return
    rendezvous = rank.rendezvous
    if rendezvous is None and status.kind != Kind.CUT:  # it failed before it had connected to the others
        rendezvous = within(ANSWER, rank.connect)
    first = rendezvous is None or within(ANSWER, lambda: rendezvous.fail(status.cause)) is not False
    # our launcher shows failures of its ranks; of ranks that others have started, the first to fail shows its own
    log = cast("IO[str] | None", rank.log)
    tried_again = status.cause.smaller_batch is not None
    streams: list[IO[str]] = [] if log is None else [log]
    if rank.job_folder is None and not tried_again and (first or status.kind == Kind.STUCK):
        if rank.place.rank == 0 or rank.log is None:
            streams = [sys.stderr]
        else:
            streams.append(rank.log.terminal)
    for stream in streams:
        report_failure(status.cause if first else status, stream, rank_named=rank.place.size > 1)


def end_at_once(rank: RankContext, status: ExitStatus, *, farewell: float = 0.0) -> NoReturn:
    """Announce a status and end this process, from any thread."""
    end_process(status.code, lambda: last_words(rank, status, farewell=farewell))


def end_stuck(rank: RankContext, kind: Kind, reason: str, stack: traceback.StackSummary) -> NoReturn:
    """Print ``stack``, where the main thread is stuck, and end this process."""
    close_bars()
    say("".join(traceback.format_list(stack)).rstrip())
    where = f"rank {rank.place.rank} stands at {standing_at(stack)}"
    end_at_once(rank, ExitStatus(rank.place.rank, kind, FAILED, f"{reason}: {where}"))


def last_words(rank: RankContext, status: ExitStatus, *, farewell: float = 0.0) -> int:
    """Announce a status and conclude the run in its directory; returns the exit code. The process ends right after.

    ``farewell``: seconds that other ranks get to disconnect from the store, if this rank serves it.
    """
    close_bars()
    announce(rank, status)
    rank.conclude_run(status.cause)
    if farewell:
        leave_store(rank, patience=farewell)
    return rank.exit_code(status)


def close_bars() -> None:
    """Take a progress bar off the terminal; given up where the main thread holds the terminal."""
    bars = sys.modules.get("forgather_cli.terminal.bars")
    if bars is not None:
        within(0.5, bars.close_bars)


def leave_store(rank: RankContext, *, patience: float) -> None:
    """Tell the other ranks that this one does not need their store any more."""
    rendezvous = rank.rendezvous
    if rendezvous is not None:
        within(patience + 1, lambda: rendezvous.leave(patience=patience))


# -------------------------------------------------------------------------------------------------- threads that watch


@contextmanager
def watch_signals_and_ranks(rank: RankContext) -> Iterator[StopSignal]:
    """Inside, threads watch stop signals, the launcher and the other ranks. Only in the main thread."""

    def watch_launcher(job: Job) -> None:
        while not rank.ended.wait(_NEAR):
            if is_orphan(job.launcher):
                os._exit(FAILED)
            if (signum := job.stop_signal()) is not None:
                rank.stop.on_stop_request(signum)

    def watch_ranks() -> None:
        while not rank.ended.wait(_NEAR if rank.rendezvous_folder else _FAR):
            with suppress(RuntimeError, ValueError, TypeError):  # a store that goes just now, a stranger's message
                if rank.rendezvous is not None and (failure := rank.rendezvous.failure()) is not None:
                    _end_because_of(rank, failure)

    def is_cleanup() -> bool:
        """Whether a SIGTERM comes from torchrun's agent, which sends it to the other ranks when one has failed."""
        if (failure := any_failure(rank)) is not None:
            threading.Thread(target=_end_because_of, args=(rank, failure), daemon=True).start()
        return failure is not None

    stop = StopSignal(
        end_now=lambda signum, early: last_words(rank, cut(rank.place.rank, rank.run, signum, early)),
        on_request=lambda: _enforce_grace(rank),
        is_cleanup=is_cleanup,
        echo=_ECHO if rank.place.by else 0.0,
    )
    with signals.watch_stop_signals(stop) as rank.stop:
        if rank.job_folder is not None:
            threading.Thread(
                target=watch_launcher, args=(rank.job_folder,), name="forgather-launcher", daemon=True
            ).start()
        if rank.place.size > 1:
            threading.Thread(target=watch_ranks, name="forgather-ranks", daemon=True).start()
        try:
            yield rank.stop
        finally:
            rank.ended.set()


def _end_because_of(rank: RankContext, failure: ExitStatus) -> None:
    """Another rank has failed: end this process, unless it ends by itself."""
    if rank.ended.wait(_SETTLE):
        return
    cause = known_cause(rank) or failure
    status, stack = caused_by(rank.place.rank, cause), main_thread_stack()
    if cause.kind == Kind.WAITED and not waits_for_others(stack):  # it is this rank that the other one waited for
        message = f"{cause.message.partition(': rank ')[0]}: rank {rank.place.rank} stands at {standing_at(stack)}"
        status = ExitStatus(rank.place.rank, Kind.STUCK, cause.code, message)
    end_at_once(rank, status, farewell=ANSWER)


def _enforce_grace(rank: RankContext) -> None:
    """End this process if the ranks do not stop within the grace period, and report which of them is stuck."""
    me = rank.place.rank
    while not rank.stop.acknowledged.wait(signals.GRACE):
        stack = main_thread_stack()
        if saves(stack):  # the save that the signal asks for, which save_timeout limits
            continue
        reason = f"{rank.stop.name} was not acted on within {signals.GRACE:g} s"
        if rank.place.size == 1 or not waits_for_others(stack):
            end_stuck(rank, Kind.UNHEEDED, reason, stack)
        if rank.stop.acknowledged.wait(_AFTER_YOU):
            return
        standings = within(2 * ANSWER, rank.standings) or []
        if any(each.doing == SAVES for each in standings):
            continue
        where = f"rank {me} stands at {standing_at(stack)}"
        odd = next((each for each in standings if each.odd), None)
        if odd is not None:
            where = f"rank {odd.rank} {f'{SILENT}:' if odd.doing == SILENT else 'stands at'} {odd.where}"
        end_at_once(rank, ExitStatus(me, Kind.UNHEEDED, FAILED, f"{reason}: {where}"))

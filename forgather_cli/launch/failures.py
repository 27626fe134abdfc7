"""What becomes of a failure in a rank: whose it is, who is told, where it is shown, and how the process ends."""

from __future__ import annotations

import re
import sys
import time
import traceback
from typing import IO, NoReturn, cast

from forgather_cli.launch.context import RankContext
from forgather_cli.launch.error_report import report_failure
from forgather_cli.launch.exit_status import FAILED, ExitStatus, Kind, first_cause, from_error, killed, told
from forgather_cli.launch.rendezvous import within
from forgather_cli.launch.signals import end_process, say
from forgather_cli.launch.stacks import standing_at

ANSWER = 3.0
"""Seconds in which the ranks' store answers, or counts as gone."""
_HEARSAY = 2.0  # seconds in which the cause of a broken connection gets known
_TRANSPORT = re.compile(r"gloo|NCCL|ProcessGroup|TCPStore|c10d", re.IGNORECASE)
_LOST = re.compile(r"connection|closed by|reset by|broken pipe|refused|aborted|remote process|to recv", re.IGNORECASE)
_TOO_LONG = re.compile(r"timed? ?out", re.IGNORECASE)


def status_of(rank: RankContext, error: BaseException) -> ExitStatus:
    """The exit status that an error means; one that comes of another rank's failure names that, if it gets known."""
    number = rank.place.rank
    broken = _broken_connection(error) if rank.place.size > 1 else None
    if broken is None:
        return from_error(number, error)
    text = "".join(traceback.format_exception(error))
    too_long = bool(_TOO_LONG.search(str(broken)))
    cause = known_cause(rank, patience=0.0 if too_long else _HEARSAY)
    if cause is not None:
        return told(number, cause)
    if too_long:
        where = standing_at(traceback.extract_tb(error.__traceback__))
        message = f"hang_timeout passed in a collective: rank {number} stands at {where}"
        return ExitStatus(number, Kind.WAITED, FAILED, message, traceback=text)
    reason = (str(broken).splitlines() or [type(broken).__name__])[0]
    message = f"rank {number} lost the connection to another rank ({reason})"
    return ExitStatus(number, Kind.LOST, FAILED, message, traceback=text)


def _broken_connection(error: BaseException) -> BaseException | None:
    """The error of a lost or silent connection that an error came of."""
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
    """Another rank's failure that needs no further explanation, if it is told within ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        cause = any_failure(rank)
        if cause is not None and cause.is_cause:
            return cause
        if time.monotonic() >= until:
            return None
        time.sleep(0.1)


def any_failure(rank: RankContext) -> ExitStatus | None:
    """What is known now of other ranks' failures; a store that is gone is one, and a process of this node that is."""
    if rank.rendezvous is None:
        return None
    found = [within(ANSWER, rank.rendezvous.failure)]
    dead = within(ANSWER, rank.rendezvous.dead_neighbour)
    if dead is not None and dead != rank.place.rank:
        log = rank.run.rank_log(dead) if rank.run is not None else "in logs/"
        found.append(killed(dead, None, log, time.time()))
    return first_cause(status for status in found if status is not None)


# ------------------------------------------------------------------------------------------------------- of this one


def tell(rank: RankContext, status: ExitStatus) -> None:
    """Tell the launcher and the other ranks how this one ended, and show a failure where it is to be seen once."""
    if rank.job is not None:
        rank.job.attempt(rank.place.attempt).tell(status)
    if not status.failed:
        return
    rendezvous = rank.rendezvous
    if rendezvous is None and status.kind != Kind.CUT:  # it failed before it came to meet the others
        rendezvous = within(ANSWER, rank.connect)
    first = rendezvous is None or within(ANSWER, lambda: rendezvous.fail(status.cause)) is not False
    # the launcher shows what its ranks tell; of ranks that others started, the first to fail speaks for all
    log = cast("IO[str] | None", rank.log)
    tried_again = status.cause.smaller_batch is not None
    streams: list[IO[str]] = [] if log is None else [log]
    if rank.job is None and not tried_again and (first or status.kind == Kind.STUCK):
        if rank.place.rank == 0 or rank.log is None:
            streams = [sys.stderr]
        else:
            streams.append(rank.log.terminal)
    for stream in streams:
        report_failure(status.cause if first else status, stream, rank_named=rank.place.size > 1)


def end_at_once(rank: RankContext, status: ExitStatus, *, farewell: float = 0.0) -> NoReturn:
    """End this process from any thread, after all who must know its status do."""
    end_process(status.code, lambda: last_words(rank, status, farewell=farewell))


def end_stuck(rank: RankContext, kind: Kind, reason: str, stack: traceback.StackSummary) -> NoReturn:
    """End this process, whose main thread stands at ``stack`` and does not go on; the stack is shown."""
    close_bars()
    say("".join(traceback.format_list(stack)).rstrip())
    where = f"rank {rank.place.rank} stands at {standing_at(stack)}"
    end_at_once(rank, ExitStatus(rank.place.rank, kind, FAILED, f"{reason}: {where}"))


def last_words(rank: RankContext, status: ExitStatus, *, farewell: float = 0.0) -> int:
    """Tell a status and leave the run directory as it asks; returns the exit code of a process that ends right after.

    ``farewell``: seconds that other ranks get to leave the store, if this one offers it.
    """
    close_bars()
    tell(rank, status)
    rank.leave_directory(status.cause)
    if farewell:
        leave_store(rank, patience=farewell)
    return rank.exit_code(status)


def close_bars() -> None:
    """Take a progress bar off the terminal; given up where the main thread holds the terminal."""
    bars = sys.modules.get("forgather_cli.callbacks.bars")
    if bars is not None:
        within(0.5, bars.close_bars)


def leave_store(rank: RankContext, *, patience: float) -> None:
    """Let the other ranks know that this one needs their store no more."""
    rendezvous = rank.rendezvous
    if rendezvous is not None:
        within(patience + 1, lambda: rendezvous.leave(patience=patience))

"""What becomes of an error in a rank: whose failure it is, who is told, and where it is shown."""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, cast

from forgather_cli.errors import CallbackError, ConfigError, DivergenceError, ForgatherError, OutOfMemoryError
from forgather_cli.launch.ending import ERROR, LOST, MISTAKE, STUCK, WAITED, Ending, first_cause, killed, told
from forgather_cli.launch.meeting import within
from forgather_cli.launch.outcome import FAILED
from forgather_cli.launch.report import report_ending
from forgather_cli.launch.signals import standing_at

if TYPE_CHECKING:
    from forgather_cli.rank import Rank

_HEARSAY = 2.0  # seconds in which the cause of a broken connection gets known
_ANSWER = 3.0  # seconds in which the store answers, or counts as gone
_TRANSPORT = re.compile(r"gloo|NCCL|ProcessGroup|TCPStore|c10d", re.IGNORECASE)
_LOST = re.compile(r"connection|closed by|reset by|broken pipe|refused|aborted|remote process|to recv", re.IGNORECASE)
_TOO_LONG = re.compile(r"timed? ?out", re.IGNORECASE)


def ending_of(rank: Rank, error: BaseException) -> Ending:
    """The ending that an error means; one that comes of another rank's failure names that, if it gets known."""
    number = rank.place.rank
    broken = _broken_connection(error) if rank.place.size > 1 else None
    if broken is not None:
        return _because_of_others(rank, error, broken)
    if isinstance(error, ForgatherError):
        problems = tuple(error.problems) if isinstance(error, ConfigError) else ()
        users = error.__cause__ if isinstance(error, CallbackError) else None  # who will want to mend it
        diverged = isinstance(error, DivergenceError)
        batch, smaller = (error.batch, error.smaller_batch) if isinstance(error, OutOfMemoryError) else (None, None)
        return Ending(number, MISTAKE, error.exit_code, str(error), problems, _text(users) if users else "", diverged,
                      batch, smaller)  # fmt: skip
    return Ending(number, ERROR, FAILED, f"{type(error).__name__}: {error}", traceback=_text(error))


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _broken_connection(error: BaseException) -> BaseException | None:
    """The error of a lost or silent connection that an error came of."""
    dist = sys.modules.get("torch.distributed")
    for each in _chain(error):
        text = str(each)
        of_transport = dist is not None and isinstance(each, dist.DistError)
        of_transport |= isinstance(each, RuntimeError) and bool(_TRANSPORT.search(text))
        if of_transport and (_LOST.search(text) or _TOO_LONG.search(text)):
            return each
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _because_of_others(rank: Rank, error: BaseException, broken: BaseException) -> Ending:
    number, too_long = rank.place.rank, bool(_TOO_LONG.search(str(broken)))
    cause = known_cause(rank, patience=0.0 if too_long else _HEARSAY)
    if cause is not None:
        return told(number, cause)
    reason = (str(broken).splitlines() or [type(broken).__name__])[0]
    if not too_long:
        return Ending(number, LOST, FAILED, f"rank {number} lost the connection to another rank ({reason})",
                      traceback=_text(error))  # fmt: skip
    where = standing_at(traceback.extract_tb(error.__traceback__))
    message = f"hang_timeout passed in a collective: rank {number} stands at {where}"
    return Ending(number, WAITED, FAILED, message, traceback=_text(error))


def known_cause(rank: Rank, *, patience: float = 0.0) -> Ending | None:
    """Another rank's failure that needs no further explanation, if it is told within ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        cause = any_failure(rank)
        if cause is not None and cause.is_cause:
            return cause
        if time.monotonic() >= until:
            return None
        time.sleep(0.1)


def any_failure(rank: Rank) -> Ending | None:
    """What is known now of other ranks' failures; a store that is gone is one."""
    return first_cause(_heard(rank))


def _heard(rank: Rank) -> Iterator[Ending]:
    yield from endings_here(rank)
    if rank.meeting is None:
        return
    failure = within(_ANSWER, rank.meeting.failure)
    if failure is not None:
        yield failure
    dead = within(_ANSWER, rank.meeting.dead_neighbour)
    if dead is not None and dead != rank.place.rank:
        log = rank.run.rank_log(dead) if rank.run is not None else "in logs/"
        yield killed(dead, None, log, time.time())


def endings_here(rank: Rank) -> list[Ending]:
    """Failures of other ranks that the launcher started on this node."""
    if rank.job is None:
        return []
    endings = rank.job.attempt(rank.place.attempt).endings()
    return [ending for ending in endings if ending.failed and ending.rank != rank.place.rank]


def tell(rank: Rank, ending: Ending) -> None:
    """Tell the launcher and the other ranks how this one ended, and show a failure where it is to be seen once."""
    if rank.job is not None:
        rank.job.attempt(rank.place.attempt).tell(ending)
    if not ending.failed:
        return
    first = True
    if rank.meeting is not None:
        meeting = rank.meeting
        first = within(_ANSWER, lambda: meeting.fail(ending.cause)) is not False
    for stream in _streams(rank, ending, first):
        report_ending(ending.cause if first else ending, stream, rank_named=rank.place.size > 1)


def _streams(rank: Rank, ending: Ending, first: bool) -> list[IO[str]]:
    """The launcher shows what its ranks tell; of ranks that others started, the first to fail speaks for all."""
    log = cast("IO[str] | None", rank.log)
    tried_again = ending.cause.smaller_batch is not None
    if rank.job is not None or tried_again or not (first or ending.kind == STUCK):
        return [] if log is None else [log]
    if rank.place.rank == 0 or log is None:
        return [sys.stderr]
    assert rank.log is not None
    return [log, rank.log.terminal]

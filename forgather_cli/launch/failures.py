"""What becomes of an error in a rank: whose failure it is, who is told, and where it is shown."""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, cast

from forgather_cli.errors import CallbackError, ConfigError, DivergenceError, ForgatherError, OutOfMemoryError
from forgather_cli.launch.exit_status import FAILED, ExitStatus, Kind, first_cause, killed, told
from forgather_cli.launch.rendezvous import within
from forgather_cli.launch.report import report_failure
from forgather_cli.launch.signals import standing_at

if TYPE_CHECKING:
    from forgather_cli.launch.rank import Rank

_HEARSAY = 2.0  # seconds in which the cause of a broken connection gets known
_ANSWER = 3.0  # seconds in which the store answers, or counts as gone
_TRANSPORT = re.compile(r"gloo|NCCL|ProcessGroup|TCPStore|c10d", re.IGNORECASE)
_LOST = re.compile(r"connection|closed by|reset by|broken pipe|refused|aborted|remote process|to recv", re.IGNORECASE)
_TOO_LONG = re.compile(r"timed? ?out", re.IGNORECASE)


def status_of(rank: Rank, error: BaseException) -> ExitStatus:
    """The status that an error means; one that comes of another rank's failure names that, if it gets known."""
    number = rank.place.rank
    broken = _broken_connection(error) if rank.place.size > 1 else None
    if broken is not None:
        return _because_of_others(rank, error, broken)
    if isinstance(error, ForgatherError):
        problems = tuple(error.problems) if isinstance(error, ConfigError) else ()
        users = error.__cause__ if isinstance(error, CallbackError) else None  # who will want to mend it
        diverged = isinstance(error, DivergenceError)
        batch, smaller = (error.batch, error.smaller_batch) if isinstance(error, OutOfMemoryError) else (None, None)
        trace = _text(users) if users else ""
        return ExitStatus(number, Kind.MISTAKE, error.exit_code, str(error), problems, trace, diverged, batch, smaller)
    return ExitStatus(number, Kind.ERROR, FAILED, f"{type(error).__name__}: {error}", traceback=_text(error))


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


def _because_of_others(rank: Rank, error: BaseException, broken: BaseException) -> ExitStatus:
    number, too_long = rank.place.rank, bool(_TOO_LONG.search(str(broken)))
    cause = known_cause(rank, patience=0.0 if too_long else _HEARSAY)
    if cause is not None:
        return told(number, cause)
    reason = (str(broken).splitlines() or [type(broken).__name__])[0]
    if not too_long:
        return ExitStatus(number, Kind.LOST, FAILED, f"rank {number} lost the connection to another rank ({reason})",
                      traceback=_text(error))  # fmt: skip
    where = standing_at(traceback.extract_tb(error.__traceback__))
    message = f"hang_timeout passed in a collective: rank {number} stands at {where}"
    return ExitStatus(number, Kind.WAITED, FAILED, message, traceback=_text(error))


def known_cause(rank: Rank, *, patience: float = 0.0) -> ExitStatus | None:
    """Another rank's failure that needs no further explanation, if it is told within ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        cause = any_failure(rank)
        if cause is not None and cause.is_cause:
            return cause
        if time.monotonic() >= until:
            return None
        time.sleep(0.1)


def any_failure(rank: Rank) -> ExitStatus | None:
    """What is known now of other ranks' failures; a store that is gone is one."""
    return first_cause(_heard(rank))


def _heard(rank: Rank) -> Iterator[ExitStatus]:
    yield from statuses_here(rank)
    if rank.rendezvous is None:
        return
    failure = within(_ANSWER, rank.rendezvous.failure)
    if failure is not None:
        yield failure
    dead = within(_ANSWER, rank.rendezvous.dead_neighbour)
    if dead is not None and dead != rank.place.rank:
        log = rank.run.rank_log(dead) if rank.run is not None else "in logs/"
        yield killed(dead, None, log, time.time())


def statuses_here(rank: Rank) -> list[ExitStatus]:
    """Failures of other ranks that the launcher started on this node."""
    if rank.job is None:
        return []
    statuses = rank.job.attempt(rank.place.attempt).statuses()
    return [status for status in statuses if status.failed and status.rank != rank.place.rank]


def tell(rank: Rank, status: ExitStatus) -> None:
    """Tell the launcher and the other ranks how this one ended, and show a failure where it is to be seen once."""
    if rank.job is not None:
        rank.job.attempt(rank.place.attempt).tell(status)
    if not status.failed:
        return
    first = True
    if rank.rendezvous is not None:
        rendezvous = rank.rendezvous
        first = within(_ANSWER, lambda: rendezvous.fail(status.cause)) is not False
    for stream in _streams(rank, status, first):
        report_failure(status.cause if first else status, stream, rank_named=rank.place.size > 1)


def _streams(rank: Rank, status: ExitStatus, first: bool) -> list[IO[str]]:
    """The launcher shows what its ranks tell; of ranks that others started, the first to fail speaks for all."""
    log = cast("IO[str] | None", rank.log)
    tried_again = status.cause.smaller_batch is not None
    if rank.job is not None or tried_again or not (first or status.kind == Kind.STUCK):
        return [] if log is None else [log]
    if rank.place.rank == 0 or log is None:
        return [sys.stderr]
    assert rank.log is not None
    return [log, rank.log.terminal]

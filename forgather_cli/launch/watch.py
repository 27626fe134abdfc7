"""The threads of a rank that look after it while its main thread may wait in a collective.

They end the process when its launcher is gone, when another rank has failed, or when the ranks' store is gone; and they
hand on what others were told by a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from traceback import StackSummary, format_list
from typing import TYPE_CHECKING

from forgather_cli.launch import failures, signals
from forgather_cli.launch.exit_status import FAILED, ExitStatus, Kind, cut, first_cause, told
from forgather_cli.launch.job import Job
from forgather_cli.launch.process import is_orphan
from forgather_cli.launch.rendezvous import within
from forgather_cli.launch.signals import (
    Hooks,
    end_process,
    is_debugged,
    main_thread_stack,
    saves,
    standing_at,
    waits_for_others,
)

if TYPE_CHECKING:
    from forgather_cli.launch.rank import Rank

_NEAR, _FAR = 0.2, 1.0  # seconds between two looks at the launcher's folder, at the ranks' store
_SETTLE = 1.0  # seconds in which a rank may end by itself, for the same reason as the one that was first
_ECHO = 2.0  # seconds; a scheduler and torchrun, each of which signals the ranks
_ANSWER = 3.0  # seconds in which the store answers, or counts as gone


@contextmanager
def others(rank: Rank) -> Iterator[None]:
    """Watch the launcher and the other ranks inside."""
    if rank.job is not None:
        _start(rank, "forgather-job", _NEAR, partial(_look_at_job, rank, rank.job))
    if rank.place.size > 1:
        _start(rank, "forgather-store", _FAR, partial(_look_at_store, rank))
    try:
        yield
    finally:
        rank.ended.set()


def _start(rank: Rank, name: str, seconds: float, look: Callable[[], None]) -> None:
    def run() -> None:
        while not rank.ended.wait(seconds):
            with suppress(RuntimeError, ValueError, TypeError):  # a store that goes just now, a stranger's message
                look()

    threading.Thread(target=run, name=name, daemon=True).start()


@contextmanager
def progress(rank: Rank, timeout: float) -> Iterator[None]:
    """End this process if training stands still for ``timeout`` seconds inside, as ``hang_timeout`` asks.

    A rank that waits for others is left to the timeout of its collective, so that the one they wait for is named.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch_progress, args=(rank, timeout, over), name="forgather-hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _watch_progress(rank: Rank, timeout: float, over: threading.Event) -> None:
    look = min(1.0, timeout / 5)
    polls, still = 0, 0.0  # seconds that this thread has run, so that a process stopped by Ctrl-Z does not hang
    while not over.wait(look):
        before, polls = polls, rank.stop.polls
        still = still + look if polls == before > 0 else 0.0
        if still < timeout:
            continue
        stack = main_thread_stack()
        if not (saves(stack) or is_debugged(stack) or (rank.place.size > 1 and waits_for_others(stack))):
            end_process(FAILED, partial(_stands_still, rank, timeout, stack))


def _stands_still(rank: Rank, timeout: float, stack: StackSummary) -> int:
    close_bars()
    print("".join(format_list(stack)).rstrip(), file=sys.stderr, flush=True)
    where = f"rank {rank.place.rank} stands at {standing_at(stack)}"
    status = ExitStatus(rank.place.rank, Kind.STUCK, FAILED, f"hang_timeout: no progress within {timeout:g} s: {where}")
    failures.tell(rank, status)
    rank.settle(status)
    return rank.exit_code(status)


def _look_at_job(rank: Rank, job: Job) -> None:
    if is_orphan(job.launcher):
        os._exit(FAILED)
    asked = job.stop_asked()
    if asked is not None:
        rank.stop.told(asked)
    failure = first_cause(failures.statuses_here(rank))
    if failure is not None:
        _end_because_of(rank, failure)


def _look_at_store(rank: Rank) -> None:
    rendezvous = rank.rendezvous
    if rendezvous is None:
        return
    failure = rendezvous.failure()
    if failure is not None:
        _end_because_of(rank, failure)
        return
    asked = rendezvous.stop_asked()
    if asked is not None and asked[1] != rank.place.rank:
        rank.stop.told(asked[0], by=f"in rank {asked[1]}")


def _end_because_of(rank: Rank, failure: ExitStatus) -> None:
    """Another rank has failed: end this process, unless it does so by itself."""
    if rank.ended.wait(_SETTLE):
        return
    cause = failures.known_cause(rank) or failure
    end_process(cause.code, lambda: _last_words(rank, cause))


def _last_words(rank: Rank, cause: ExitStatus) -> int:
    close_bars()
    status = told(rank.place.rank, cause)
    stack = main_thread_stack()
    if cause.kind == Kind.WAITED and not waits_for_others(stack):
        message = f"{cause.message.partition(': rank ')[0]}: rank {rank.place.rank} stands at {standing_at(stack)}"
        status = ExitStatus(rank.place.rank, Kind.STUCK, cause.code, message)
    failures.tell(rank, status)
    rank.settle(status.cause)
    leave(rank, patience=_ANSWER)
    return rank.exit_code(status)


# -------------------------------------------------------------------------------------------------------------- signals


def hooks(rank: Rank) -> Hooks:
    """What a signal means to this rank and to the others."""
    return Hooks(
        at_once=partial(_cut, rank),
        hung=partial(_hung, rank),
        abandoned=partial(_abandoned, rank),
        heard=partial(_heard, rank),
        saving=partial(_saving, rank),
        echo=_ECHO if rank.place.by else 0.0,
        others_save=partial(_others_save, rank) if rank.place.size > 1 else None,
    )


def _cut(rank: Rank, signum: int, early: bool) -> int:
    close_bars()
    status = cut(rank.place.rank, rank.run, signum, early)
    failures.tell(rank, status)
    rank.settle(status)
    return rank.exit_code(status)


def _hung(rank: Rank, signum: int, where: str, waits: bool) -> int:
    """A signal that training did not get to: what it stands in, with the stack printed before."""
    close_bars()
    name = signal.Signals(signum).name
    reason = f"{name} was not acted on within {signals.GRACE:g} s: rank {rank.place.rank} stands at {where}"
    status = ExitStatus(rank.place.rank, Kind.WAITED if waits else Kind.UNHEEDED, FAILED, reason)
    failures.tell(rank, status)
    rank.settle(status)
    return rank.exit_code(status)


def _abandoned(rank: Rank) -> bool:
    """torchrun's agent sends SIGTERM to the ranks that are left when one has failed."""
    if rank.place.size == 1 and rank.job is None:
        return False
    failure = failures.any_failure(rank)
    if failure is not None:
        threading.Thread(target=_end_because_of, args=(rank, failure), daemon=True).start()
    return failure is not None


def _heard(rank: Rank, signum: int) -> None:
    rendezvous = rank.rendezvous
    if rendezvous is not None:
        within(_ANSWER, lambda: rendezvous.ask_to_stop(signum))


def _saving(rank: Rank) -> None:
    if rank.rendezvous is not None:
        within(_ANSWER, rank.rendezvous.say_busy)


def _others_save(rank: Rank) -> bool:
    rendezvous = rank.rendezvous
    return rendezvous is not None and bool(within(_ANSWER, lambda: rendezvous.busy_since(signals.GRACE + 10)))


# ------------------------------------------------------------------------------------------------------------------ end


def close_bars() -> None:
    """Take a progress bar off the terminal; given up where the main thread holds the terminal."""
    bars = sys.modules.get("forgather_cli.callbacks.bars")
    if bars is not None:
        within(0.5, bars.close_bars)


def leave(rank: Rank, *, patience: float) -> None:
    """Let the other ranks know that this one needs their store no more."""
    rendezvous = rank.rendezvous
    if rendezvous is not None:
        within(patience + 1, lambda: rendezvous.leave(patience=patience))

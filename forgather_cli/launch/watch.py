"""The threads of a rank that look after it while its main thread may wait in a collective.

They end the process when its launcher is gone, when another rank has failed, when the ranks' store is gone, or when a
signal to stop is not acted on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from forgather_cli.launch import failures, signals
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.exit_status import FAILED, ExitStatus, Kind, cut, told
from forgather_cli.launch.hang import standings_of_all
from forgather_cli.launch.job import Job
from forgather_cli.launch.processes import is_orphan
from forgather_cli.launch.rendezvous import within
from forgather_cli.launch.signals import StopSignal
from forgather_cli.launch.stacks import SAVES, SILENT, main_thread_stack, saves, standing_at, waits_for_others

_NEAR, _FAR = 0.2, 1.0  # seconds between two looks at a folder, at a store of the network
_SETTLE = 1.0  # seconds in which a rank may end by itself, for the same reason as the one that was first
_ECHO = 2.0  # seconds; a scheduler and torchrun, each of which signals the ranks
_AFTER_YOU = 5.0  # seconds that a rank which waits for others leaves them to say where they stand


@contextmanager
def watched(rank: RankContext) -> Iterator[StopSignal]:
    """Watch signals, the launcher and the other ranks inside. Only in the main thread."""

    def watch_launcher(job: Job) -> None:
        while not rank.ended.wait(_NEAR):
            if is_orphan(job.launcher):
                os._exit(FAILED)
            if (asked := job.stop_asked()) is not None:
                rank.stop.told(asked)

    def watch_ranks() -> None:
        while not rank.ended.wait(_NEAR if rank.rendezvous_folder else _FAR):
            with suppress(RuntimeError, ValueError, TypeError):  # a store that goes just now, a stranger's message
                if rank.rendezvous is not None and (failure := rank.rendezvous.failure()) is not None:
                    _end_because_of(rank, failure)

    def is_abandoned() -> bool:
        """torchrun's agent sends SIGTERM to the ranks that are left when one has failed."""
        if (failure := failures.any_failure(rank)) is not None:
            threading.Thread(target=_end_because_of, args=(rank, failure), daemon=True).start()
        return failure is not None

    stop = StopSignal(
        at_once=lambda signum, early: failures.last_words(rank, cut(rank.place.rank, rank.run, signum, early)),
        noted=lambda: _await_stop(rank),
        abandoned=is_abandoned,
        echo=_ECHO if rank.place.by else 0.0,
    )
    with signals.watching(stop) as rank.stop:
        if rank.job is not None:
            threading.Thread(target=watch_launcher, args=(rank.job,), name="forgather-launcher", daemon=True).start()
        if rank.place.size > 1:
            threading.Thread(target=watch_ranks, name="forgather-ranks", daemon=True).start()
        try:
            yield rank.stop
        finally:
            rank.ended.set()


def _end_because_of(rank: RankContext, failure: ExitStatus) -> None:
    """Another rank has failed: end this process, unless it does so by itself."""
    if rank.ended.wait(_SETTLE):
        return
    cause = failures.known_cause(rank) or failure
    status, stack = told(rank.place.rank, cause), main_thread_stack()
    if cause.kind == Kind.WAITED and not waits_for_others(stack):  # it is this rank that the other one waited for
        message = f"{cause.message.partition(': rank ')[0]}: rank {rank.place.rank} stands at {standing_at(stack)}"
        status = ExitStatus(rank.place.rank, Kind.STUCK, cause.code, message)
    failures.end_at_once(rank, status, farewell=failures.ANSWER)


def _await_stop(rank: RankContext) -> None:
    """End this process if training does not get to a signal, and tell which rank it stands in."""
    me = rank.place.rank
    while not rank.stop.honoured.wait(signals.GRACE):
        stack = main_thread_stack()
        if saves(stack):  # what was asked for; save_timeout is its limit
            continue
        reason = f"{rank.stop.name} was not acted on within {signals.GRACE:g} s"
        if rank.place.size == 1 or not waits_for_others(stack):
            failures.end_stuck(rank, Kind.UNHEEDED, reason, stack)
        if rank.stop.honoured.wait(_AFTER_YOU):
            return
        standings = within(2 * failures.ANSWER, lambda: standings_of_all(rank)) or []
        if any(each.doing == SAVES for each in standings):
            continue
        where = f"rank {me} stands at {standing_at(stack)}"
        odd = next((each for each in standings if each.odd), None)
        if odd is not None:
            where = f"rank {odd.rank} {f'{SILENT}:' if odd.doing == SILENT else 'stands at'} {odd.where}"
        failures.end_at_once(rank, ExitStatus(me, Kind.UNHEEDED, FAILED, f"{reason}: {where}"))

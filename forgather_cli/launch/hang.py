"""A run that makes no progress, or whose ranks wait for a slow one: told on the terminal and in ``RUN/hang.json``.

Each rank has two threads that look at it: one counts and ends the process after ``hang_timeout``, one reports and may
wait for answers of other ranks. Training is not touched.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime

from forgather_cli.config.schema import Config
from forgather_cli.documents.regular_files import write_whole
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.exit_status import Kind
from forgather_cli.launch.failures import end_stuck
from forgather_cli.launch.processes import process_state
from forgather_cli.launch.stacks import (
    COMPILES,
    DEBUGGED,
    SAVES,
    Collective,
    is_debugged,
    main_thread_stack,
    own_standing,
    saves,
    standing_at,
    table,
    thread_stack,
    waits_for_others,
)

log = logging.getLogger(__name__)

_MEDIANS = 5  # steps of the usual length without progress are suspicious
_FEW = 3  # steps whose lengths must be known; the first ones compile and warm up
_LOOKS = 100  # within hang_report_after
_ASKED = 1.0  # seconds between two looks at whether others ask where this rank stands


@contextmanager
def watch_progress(rank: RankContext, config: Config) -> Iterator[None]:
    """Inside, report what makes no progress, end it as ``hang_timeout`` asks, and answer those who ask where this rank
    stands.
    """
    over = threading.Event()
    report = HangReport(rank, config)
    threading.Thread(target=_count, args=(rank, config, over), name="forgather-hang", daemon=True).start()
    threading.Thread(target=report.run, args=(over,), name="forgather-report", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _count(rank: RankContext, config: Config, over: threading.Event) -> None:
    """Count the seconds without progress, and end this process after ``hang_timeout``. It waits for nobody.

    A rank that waits for others is left to the timeout of its collective, so that the one they wait for is named.
    """
    timeout = config.hang_timeout
    look = min(1.0, timeout / 5, config.hang_report_after / 10)
    polls = 0
    while not over.wait(look):
        before, polls = polls, rank.stop.polls
        # seconds that this thread has run, so that a process stopped by Ctrl-Z does not hang
        rank.still = rank.still + look if polls == before > 0 else 0.0
        if rank.still < timeout:
            continue
        stack = main_thread_stack()
        if saves(stack) or is_debugged(stack) or (rank.place.size > 1 and waits_for_others(stack)):
            continue
        end_stuck(rank, Kind.STUCK, f"hang_timeout: no progress within {timeout:g} s", stack)


class HangReport:
    """Tells of a run that makes no progress, once this rank has made none for longer than is usual.

    Suspicious are ``hang_report_after`` seconds, and 5 median steps if that is longer; before the first steps have
    shown their length, half of ``hang_timeout``. A compilation, a breakpoint, and a save within half of its
    ``save_timeout`` are not reported. A pause that was reported and ended by itself counts as usual from then on.
    """

    def __init__(self, rank: RankContext, config: Config) -> None:
        self._rank, self._config = rank, config
        self._every = config.hang_report_after / _LOOKS
        self._lengths: deque[float] = deque(maxlen=50)
        """Seconds of the last steps."""
        self._step: tuple[int, float] | None = None
        """The newest step, and when it was seen."""
        self._still = self._usual = 0.0
        """Seconds without progress at the last look, and of pauses that have ended by themselves."""
        self._next_look_at_store = self._next_try = 0.0
        self._is_reporter = False
        self._together: list[Collective | None] = []
        """The collectives that all ranks stood in at the last try, where none of them stood out."""
        self._report: dict[str, object] = {}
        """What hang.json says, while it is true."""
        self._answered: str | None = None
        # ranks of a pipeline have different work
        equal = rank.place.size > 1 and not config.trainer.cuts_layers
        self._own_time = OwnTime(rank, _LOOKS) if equal else None

    def run(self, over: threading.Event) -> None:
        """The thread."""
        while not over.wait(self._every):
            try:
                self._look(time.monotonic())
            except Exception as error:  # of a store that goes just now, or torch's: whatever it is, training goes on
                log.debug("hang report: %s: %s", type(error).__name__, error)

    def _look(self, now: float) -> None:
        step, config = self._rank.step, self._config
        if step is not None and (self._step is None or step != self._step[0]):
            if self._step is not None:
                self._lengths.append((now - self._step[1]) / abs(step - self._step[0]))
            self._step = (step, now)
        if now >= self._next_look_at_store:
            self._next_look_at_store = now + min(_ASKED, 10 * self._every)
            self._answer()
        if self._own_time is not None and len(self._lengths) >= _FEW:
            self._own_time.look()
        still = self._rank.still
        if still < self._still and self._is_reporter:
            self._goes_on()
        self._still = still
        limit = max(config.hang_report_after, config.hang_timeout / 2)
        if len(self._lengths) >= _FEW:
            limit = max(config.hang_report_after, _MEDIANS * statistics.median(self._lengths), 2 * self._usual)
        if still >= limit and now >= self._next_try:
            self._suspect()
            self._next_try = time.monotonic() + config.hang_report_after / 4

    # ------------------------------------------------------------------------------------------------------- suspicion

    def _suspect(self) -> None:
        """Of all ranks that are suspicious, one asks the others and reports, once."""
        rendezvous, me = self._rank.rendezvous, str(self._rank.place.rank)
        self._is_reporter = self._is_reporter or rendezvous is None or rendezvous.store.add("hang", me)
        if self._report or not self._is_reporter:
            return
        polls = self._rank.stop.polls
        standings = self._rank.standings()
        usual = (COMPILES, DEBUGGED)
        early = [each.doing == SAVES and each.seconds < self._config.save_timeout / 2 for each in standings]
        if any(early) or any(each.doing in usual for each in standings) or self._rank.stop.polls != polls:
            return
        together = [standing.collective for standing in standings]
        if len(together) > 1 and not any(standing.odd for standing in standings) and together != self._together:
            self._together = together  # all have come to one collective, the end of a save perhaps: does it pass?
            return
        lengths = round(statistics.median(self._lengths), 3) if self._lengths else None
        self._report = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self._still, 1),
            "median_step_seconds": lengths,
            "ended_after_seconds": None,
            "ranks": [asdict(standing) for standing in standings],
        }
        self._write()
        odd = [f"rank {standing.rank} {standing.odd}" for standing in standings if standing.odd]
        said = "; ".join(odd) or ("no rank stands out" if len(standings) > 1 else f"it {standings[0].doing}")
        head = f"no progress for {self._still:.0f} s: {said}"
        ends = f"hang_timeout={self._config.hang_timeout:g} ends the job. The whole table is in hang.json"
        self._say("\n".join([head, *table(standings), f"nothing is stopped; {ends}"]))

    def _goes_on(self) -> None:
        self._is_reporter, self._together = False, []
        if self._rank.rendezvous is not None:
            self._rank.rendezvous.store.delete("hang")
        if self._report:
            self._usual = max(self._usual, self._still)
            self._report["ended_after_seconds"] = round(self._still, 1)
            self._write()
            self._report = {}
            self._say(f"training continues after {self._still:.0f} s")

    def _write(self) -> None:
        assert self._rank.run is not None
        try:
            write_whole(self._rank.run.hang, json.dumps(self._report, indent=1) + "\n")
        except OSError as error:
            log.error("%s cannot be written: %s", self._rank.run.hang, error.strerror)

    def _say(self, text: str) -> None:
        """On the terminal and in this rank's log."""
        log.warning("%s", text)
        if self._rank.place.rank != 0 and self._rank.log is not None:
            with suppress(OSError, ValueError):
                print(text, file=self._rank.log.terminal, flush=True)

    # ---------------------------------------------------------------------------------------------------------- answers

    def _answer(self) -> None:
        rendezvous = self._rank.rendezvous
        asked = None if rendezvous is None else rendezvous.store.get("where")
        if rendezvous is not None and asked is not None and asked != self._answered:
            self._answered = asked
            me = self._rank.place.rank
            answer = {"asked": asked, "standing": asdict(own_standing(me, self._rank.step, self._rank.still))}
            rendezvous.store.set(f"stands/{me}", json.dumps(answer))


# -------------------------------------------------------------------------------------------------- slow ranks

_FACTOR = 1.2
_EXCESS = 0.05  # of the time: what the number of looks can tell apart
_WINDOWS = 5
_DEPTH = 12  # innermost calls that tell whether a thread waits


class OwnTime:
    """The share of time that this rank's main thread spends outside of collectives, by looking at it now and then.

    A look counts as waiting if the thread stands in a collective or a backward and does not run: on the CPU ddp waits
    for others inside the backward, where only the kernel knows whether it computes. It sees what the host does: a slow
    loader or callback, a busy core. A device that is slower than the others is not seen, since hosts run ahead of their
    devices.

    Costs training nothing but the looks: some microseconds each, with the interpreter's lock.
    """

    def __init__(self, rank: RankContext, looks: int) -> None:
        """``looks``: of one window, after which the ranks are compared."""
        self._rank, self._rendezvous, self._looks = rank, rank.rendezvous, looks
        self._seen = self._waited = 0
        self._lines: Counter[str] = Counter()
        """Where it stood outside of collectives."""
        self._windows = 0
        self._in_a_row: Counter[int] = Counter()
        self._compared: list[int] = []

    def look(self) -> None:
        """Count one more; at the end of a window tell it, and on rank 0 compare."""
        thread = threading.main_thread()
        stack = thread_stack(thread, _DEPTH)
        if waits_for_others(stack) and process_state(f"self/task/{thread.native_id}") != "R":
            self._waited += 1
        else:
            self._lines[standing_at(stack)] += 1
        self._seen += 1
        if self._seen < self._looks or self._rendezvous is None:
            return
        self._windows += 1
        line = self._lines.most_common(1)[0][0] if self._lines else ""
        me = self._rank.place.rank
        self._rendezvous.store.set(f"own/{me}", json.dumps([self._windows, 1 - self._waited / self._seen, line]))
        self._seen = self._waited = 0
        self._lines.clear()
        if me == 0:
            self._compare()

    def _compare(self) -> None:
        """Of rank 0. Windows are as long on every rank, though they do not begin together."""
        assert self._rendezvous is not None
        texts = [self._rendezvous.store.get(f"own/{rank}") for rank in range(self._rank.place.size)]
        if None in texts:
            return
        windows, shares, lines = zip(*(json.loads(text or "") for text in texts), strict=True)
        if any(now == before for now, before in zip(windows, self._compared, strict=False)):
            return  # a rank that is late has told nothing new
        self._compared = list(windows)
        usual = statistics.median_low(shares)
        for rank, share in enumerate(shares):
            slow = share > _FACTOR * usual and share - usual > _EXCESS
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if slow else 0
            if self._in_a_row[rank] == _WINDOWS:
                log.warning(
                    "rank %d is slow, and the others wait for it: its own work takes %.0f %% of the time, the median "
                    "is %.0f %%; most often it stands at %s", rank, 100 * share, 100 * usual, lines[rank],
                )  # fmt: skip

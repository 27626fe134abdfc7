"""A run that makes no progress: which rank the others wait for, told on the terminal and in ``RUN/hang.json``.

Each rank has one thread that looks at it. Training is not touched; ``hang_timeout`` ends it, if it comes to that.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forgather_cli.config.schema import Config, PipelineSettings
from forgather_cli.launch.stacks import (
    COMPILES,
    DEBUGGED,
    SAVES,
    SILENT,
    WAITS,
    Standing,
    own_standing,
    silent_standing,
    table,
)
from forgather_cli.launch.straggler import OwnTime

if TYPE_CHECKING:
    from forgather_cli.launch.rank import Rank

log = logging.getLogger(__name__)

_MEDIANS = 5  # steps of the usual length without progress are suspicious
_FEW = 3  # steps whose lengths must be known; the first ones compile and warm up
_LOOKS = 100  # within hang_report_after
_ASKED = 1.0  # seconds between two looks at whether others ask where this rank stands
_ANSWER = 3.0  # seconds that a rank gets to answer


@contextmanager
def watched(rank: Rank, config: Config) -> Iterator[None]:
    """Report what hangs inside, and answer those who ask where this rank stands."""
    over = threading.Event()
    watch = HangWatch(rank, config)
    rank.hang = watch
    threading.Thread(target=watch.run, args=(over,), name="forgather-suspect", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class HangWatch:
    """Knows how long this rank has made no progress, and how long that is usual.

    Suspicious are ``hang_report_after`` seconds, and 5 median steps if that is longer; before the first steps have
    shown their length, half of ``hang_timeout``. A compilation, a breakpoint, and a save within half of its
    ``save_timeout`` are not reported. A pause that was reported and ended by itself counts as usual from then on.
    """

    def __init__(self, rank: Rank, config: Config) -> None:
        self._rank, self._config = rank, config
        self._every = config.hang_report_after / _LOOKS
        self._lengths: deque[float] = deque(maxlen=50)
        """Seconds of the last steps."""
        self._step: tuple[int, float] | None = None
        """The newest step, and when it was seen."""
        self._polls = 0
        self._still = 0.0  # seconds that this thread has run: a process stopped by Ctrl-Z does not hang
        self._usual = 0.0
        self._next_look_at_store = self._next_try = 0.0
        self._is_reporter = False
        self._report: dict[str, object] = {}
        """What hang.json says, while it is true."""
        self._answered: str | None = None
        # ranks of a pipeline have different work
        equal = rank.place.size > 1 and not isinstance(config.trainer, PipelineSettings)
        self._own_time = OwnTime(rank, _LOOKS) if equal else None

    @property
    def seconds(self) -> float:
        """Without progress."""
        return self._still

    def run(self, over: threading.Event) -> None:
        """The thread."""
        before = time.monotonic()
        while not over.wait(self._every):
            now = time.monotonic()
            try:
                self._look(now, min(now - before, 10 * self._every))
            except Exception as error:  # of a store that goes just now, or torch's: whatever it is, training goes on
                log.debug("hang watch: %s: %s", type(error).__name__, error)
            before = now

    def _look(self, now: float, elapsed: float) -> None:
        step, polls = self._rank.step, self._rank.stop.polls
        if step is not None and (self._step is None or step != self._step[0]):
            if self._step is not None:
                self._lengths.append((now - self._step[1]) / abs(step - self._step[0]))
            self._step = (step, now)
        if now >= self._next_look_at_store:
            self._next_look_at_store = now + min(_ASKED, 10 * self._every)
            self._answer()
        if self._own_time is not None and len(self._lengths) >= _FEW:
            self._own_time.look()
        if polls != self._polls or not polls:
            if self._is_reporter:
                self._goes_on()
            self._polls, self._still = polls, 0.0
            return
        self._still += elapsed
        if self._still >= self._limit() and now >= self._next_try:
            self._suspect()
            self._next_try = time.monotonic() + self._config.hang_report_after / 4

    def _limit(self) -> float:
        after = self._config.hang_report_after
        if len(self._lengths) < _FEW:
            return max(after, self._config.hang_timeout / 2)
        return max(after, _MEDIANS * statistics.median(self._lengths), 2 * self._usual)

    # ------------------------------------------------------------------------------------------------------- suspicion

    def _suspect(self) -> None:
        """Of all ranks that are suspicious, one asks the others and reports, once."""
        rendezvous, me = self._rank.rendezvous, str(self._rank.place.rank)
        self._is_reporter = self._is_reporter or rendezvous is None or rendezvous.take("hang", me)
        if self._report or not self._is_reporter:
            return
        standings = standings_of_all(self._rank)
        if any(self._is_usual(standing) for standing in standings) or self._rank.stop.polls != self._polls:
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
        self._say(report_text(standings, self._still, self._config.hang_timeout))

    def _is_usual(self, standing: Standing) -> bool:
        saves = standing.doing == SAVES and standing.seconds < self._config.save_timeout / 2
        return saves or standing.doing in (COMPILES, DEBUGGED)

    def _goes_on(self) -> None:
        self._is_reporter = False
        if self._rank.rendezvous is not None:
            self._rank.rendezvous.tell("hang", "")
        if self._report:
            self._usual = max(self._usual, self._still)
            self._report["ended_after_seconds"] = round(self._still, 1)
            self._write()
            self._report = {}
            self._say(f"training goes on after {self._still:.0f} s")

    def _write(self) -> None:
        """hang.json, whole or not at all."""
        assert self._rank.run is not None
        path = self._rank.run.hang
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(self._report, indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            log.error("%s cannot be written: %s", path, error.strerror)

    def _say(self, text: str) -> None:
        """On the terminal and in this rank's log."""
        log.warning("%s", text)
        if self._rank.place.rank != 0 and self._rank.log is not None:
            with suppress(OSError, ValueError):
                print(text, file=self._rank.log.terminal, flush=True)

    # ---------------------------------------------------------------------------------------------------------- answers

    def _answer(self) -> None:
        rendezvous = self._rank.rendezvous
        asked = None if rendezvous is None else rendezvous.told("where")
        if rendezvous is not None and asked is not None and asked != self._answered:
            self._answered = asked
            answer = {"asked": asked, "standing": asdict(own_standing(self._rank, self._still))}
            rendezvous.tell(f"stands/{self._rank.place.rank}", json.dumps(answer))


def standings_of_all(rank: Rank) -> list[Standing]:
    """Where all ranks stand, the odd ones first. Waits some seconds for ranks that do not answer."""
    seconds = 0.0 if rank.hang is None else rank.hang.seconds
    own = own_standing(rank, seconds)
    rendezvous = rank.rendezvous
    if rendezvous is None:
        return [own]
    found = {own.rank: own}
    before = {other: rendezvous.told(f"stands/{other}") for other in range(rank.place.size) if other != own.rank}
    rendezvous.tell("where", f"{own.rank} {time.time_ns()}")
    until = time.monotonic() + _ANSWER
    while before and time.monotonic() < until:
        time.sleep(0.05)
        for other, old in list(before.items()):
            text = rendezvous.told(f"stands/{other}")
            if text is not None and text != old:
                found[other] = Standing.from_document(json.loads(text)["standing"])
                del before[other]
    for other in before:
        found[other] = silent_standing(other, rendezvous.told(f"place/{other}"), seconds)
    return odd_first([found[each] for each in sorted(found)])


def odd_first(standings: Sequence[Standing]) -> list[Standing]:
    """With a reason for each rank that the others wait for, as far as that can be known.

    That is one that does not answer, or that does not wait while others do; where that tells nothing, one whose last
    collective fewer ranks have come to than another, and of equally many those for which it is ``unusual``.
    """
    reasons = {standing.rank: SILENT for standing in standings if standing.doing == SILENT}
    awake = [standing for standing in standings if standing.doing != SILENT]
    busy = [standing for standing in awake if standing.doing != WAITS]
    if 0 < len(busy) < len(awake):
        reasons |= {standing.rank: "is what the others wait for" for standing in busy}
    elif not reasons:
        shared = Counter(str(standing.collective) for standing in awake)
        few, many = min(shared.values()), max(shared.values())
        strange = [standing.rank for standing in awake if standing.unusual]
        if few < many:
            rare = [standing.rank for standing in awake if shared[str(standing.collective)] < many]
            reasons |= dict.fromkeys(rare, "is in another collective than most")
        elif len(shared) > 1 and len(strange) < len(awake):
            reasons |= dict.fromkeys(strange, "is in a collective that never came there before")
    named = [replace(standing, odd=reasons.get(standing.rank, "")) for standing in standings]
    return sorted(named, key=lambda standing: (standing.doing != SILENT, not standing.odd, standing.rank))


def report_text(standings: Sequence[Standing], seconds: float, hang_timeout: float) -> str:
    """What the terminal shows of ranks that make no progress."""
    odd = [f"rank {standing.rank} {standing.odd}" for standing in standings if standing.odd]
    said = "; ".join(odd) or ("no rank stands out" if len(standings) > 1 else f"it {standings[0].doing}")
    return "\n".join(
        [
            f"no progress for {seconds:.0f} s: {said}",
            *table(standings),
            f"nothing is stopped; hang_timeout={hang_timeout:g} ends the job. The whole table is in hang.json",
        ]
    )

"""Ranks that take longer than the others for their own work, which makes all of them slow."""

from __future__ import annotations

import json
import logging
import statistics
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from forgather_cli.launch.signals import standing_at, thread_stack, waits_for_others

if TYPE_CHECKING:
    from forgather_cli.launch.rank import Rank

log = logging.getLogger(__name__)

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

    def __init__(self, rank: Rank, looks: int) -> None:
        """``looks``: of one window, after which the ranks are compared."""
        self._rank, self._meeting, self._looks = rank, rank.rendezvous, looks
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
        if waits_for_others(stack) and not _runs(thread.native_id):
            self._waited += 1
        else:
            self._lines[standing_at(stack)] += 1
        self._seen += 1
        if self._seen < self._looks or self._meeting is None:
            return
        self._windows += 1
        line = self._lines.most_common(1)[0][0] if self._lines else ""
        me = self._rank.place.rank
        self._meeting.tell(f"own/{me}", json.dumps([self._windows, 1 - self._waited / self._seen, line]))
        self._seen = self._waited = 0
        self._lines.clear()
        if me == 0:
            self._compare()

    def _compare(self) -> None:
        """Of rank 0. Windows are as long on every rank, though they do not begin together."""
        assert self._meeting is not None
        texts = [self._meeting.told(f"own/{rank}") for rank in range(self._rank.place.size)]
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


def _runs(thread: int | None) -> bool:
    """True if a thread of this process is on a core, or ready to be; False where the system does not tell."""
    if sys.platform != "linux":
        return False
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False

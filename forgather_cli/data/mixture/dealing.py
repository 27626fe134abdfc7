"""Dealing: whole sequences by quotas; before every position the count of each source is less than one from its quota.

**Windows.** Copy j of a source is its j-th sequence. It may be dealt from its release on, the position in which the
quota begins to pass j - 1, and must be dealt before its deadline, the first position at which the quota has reached
j. Whoever keeps to these windows has dealt, before any position, at least each quota rounded down and at most each
quota rounded up: that is the bound. Every position gets, of the copies that are released, the one with the earliest
deadline, of equal ones the first source's (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32,
1980).

**Why no deadline is missed.** Quotas (quotas.py) never fall and add up to the position. Nothing else is used, so that
it holds for staircases and ends too. A copy is gained, from 0 to 1, within its window. So copies whose windows lie in
[s, t) are at most t - s; and for jobs of one position each, this is all it takes for the earliest deadline first to
miss none (Hall's condition; for windows it need only be asked of intervals). No position is left over: the copies
released before p + 1 are the quotas at p + 1, rounded up, together at least p + 1. Deadlines are those of the quotas
that follow; with those that the present weights promise the bound breaks.

**Blocks.** So that no position needs a walk to it, positions are cut into blocks. At a border each count is the quota
rounded up or down, and a block is dealt when it is entered, a problem of its own with windows cut at its borders. Let
b be a border and a the one before. Of the copies that have begun at b, a share f of each is gained, 0 < f < 1; u is 1
for those that are to be dealt before b, else 0; sum(u) = sum(f), a whole number. Hall's condition holds on both sides
if
  1. over the copies due at t or before, for any t, sum(u) >= sum(f). Then copies to be dealt in [b, t) are at most t
     - b: they are gained there, but for f, and the copies with u = 1 are not among them;
  2. over the copies released at s or later, for any s, sum(u) <= sum(f) rounded up, without copies dealt before a.
     Then copies to be dealt in [s, b) are fewer than b - s + 1, if s > a;
  3. a copy that was dealt before a has u = 1.
To find u, copies are taken by their deadlines, each where 2. allows it, behind those of 3. This meets 1.: Consider
fractions v in place of u, 1 for copies of 3. and f for all others, less what copies of 3. have more than their f,
taken off those others that had begun at a, latest deadlines first. There is that much, and v meets 1., since 1. held
at a and f has only grown; it meets 2. and 3. by its making. The sets of 2. are nested, so that whole numbers can do
what fractions can: for any t some u has, over the copies due at t or before, at least sum(v); and taking by deadlines
(which is greedy in a matroid) gets the most that is possible for every t.

By 3. a border needs the one before it if a copy has begun before that, as with weights of less than one in a block.
Then a chain of borders is rounded, without dealing what lies between them; all other borders stand for themselves.
"""

from __future__ import annotations

from heapq import heappop, heappush, heappushpop
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.mixture.quotas import Quotas

FIRST_BLOCK, LARGEST_BLOCK = 1 << 12, 1 << 18
"""Borders are these and the powers of two between them, then the multiples of the largest. They are format."""


class _Copy(NamedTuple):
    """A sequence whose share has begun, before a border, but is not complete there."""

    deadline: int
    release: int
    source: int
    share: int


class Dealing:
    """Which source, and which of its sequences, stands at which position, counted from 0."""

    def __init__(self, quotas: Quotas, blocks: tuple[int, int] = (FIRST_BLOCK, LARGEST_BLOCK)) -> None:
        self.quotas = quotas
        self._first, self._largest = blocks
        self._borders: dict[int, list[int]] = {}
        self._tables: dict[int, tuple[NDArray[Any], NDArray[np.int64]]] = {}

    def start(self, position: int) -> int:
        """Where the block begins that the position lies in."""
        if position < self._first:
            return 0
        return 1 << position.bit_length() - 1 if position < self._largest else position - position % self._largest

    def stop(self, start: int) -> int:
        """Where the block ends that begins there."""
        return min(start + max(self._first, min(start, self._largest)), self.quotas.end)

    def table(self, start: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """(sources, numbers of their sequences from 0) of the positions of the block that begins there."""
        if start not in self._tables:
            kept = list(self._tables.items())[-1:]  # the one before: who reads ahead and who looks back share a Dealing
            self._tables = dict([*kept, (start, self._deal(start))])
        return self._tables[start]

    def counts(self, position: int) -> NDArray[np.int64]:
        """Sequences of each source before the position."""
        position = min(position, self.quotas.end)
        start = self.start(position)
        counts = np.array(self.counts_at(start), np.int64)
        if position > start:
            counts += np.bincount(self.table(start)[0][: position - start], minlength=len(counts))
        return counts

    def counts_at(self, border: int) -> list[int]:
        """Sequences of each source before a border."""
        chain = []
        each = border
        while each not in self._borders:
            before = self.start(each - 1) if each else 0
            whole, begun, unit = self._begun(each)
            chain.append((each, before, whole, begun, unit))
            if all(copy.release >= before for copy in begun):
                break
            each = before
        for each, before, whole, begun, unit in reversed(chain):
            self._borders[each] = _round(whole, begun, unit, self._borders.get(before, whole))
        return self._borders[border]

    def _begun(self, position: int) -> tuple[list[int], list[_Copy], int]:
        """Complete copies of each source before the position, those that have begun, the unit of their shares."""
        values, unit = self.quotas.at(position)
        whole = [value // unit for value in values]
        begun = [
            _Copy(self.quotas.deadline(source, count + 1), self.quotas.release(source, count), source, value % unit)
            for source, (value, count) in enumerate(zip(values, whole, strict=True))
            if value % unit
        ]
        return whole, begun, unit

    def _deal(self, begin: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        end = self.stop(begin)
        firsts, lasts = self.counts_at(begin), self.counts_at(end)
        values, unit = self.quotas.at(begin)
        releases, keys = [], []
        for source, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            release, deadline = self._windows(source, begin, end)
            copies = slice(first - values[source] // unit, last - values[source] // unit)
            releases.append(release[copies])
            keys.append(deadline[copies] * len(values) + source)  # of equal deadlines the first source
        released_at = np.concatenate(releases)
        take = iter(np.concatenate(keys)[np.argsort(released_at, kind="stable")].tolist()).__next__
        waiting: list[int] = []
        order: list[int] = []
        for count in np.bincount(released_at, minlength=end - begin).tolist():
            for _ in range(count - 1):
                heappush(waiting, take())
            order.append(heappushpop(waiting, take()) if count else heappop(waiting))
        sources = (np.array(order, np.int64) % len(values)).astype(np.int16)
        numbers = np.empty(end - begin, np.int64)
        numbers[np.argsort(sources, kind="stable")] = np.concatenate([*map(np.arange, firsts, lasts)])
        return sources, numbers

    def _windows(self, source: int, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Releases and deadlines of the copies with a share in [begin, end), counted from begin and cut at both."""
        segments = self.quotas.segments[self.quotas.find(begin) : self.quotas.find(end - 1) + 1]
        starts = [begin, *(segment.begin for segment in segments[1:]), end]
        releases: list[NDArray[Any]] = []
        deadlines: list[NDArray[Any]] = []
        for segment, (start, stop) in zip(segments, pairwise(starts), strict=True):
            rate, unit = segment.rates[source], segment.unit
            value = segment.values[source] + rate * (start - segment.begin)
            after = value + rate * (stop - start)
            if start == begin:
                releases.append(np.zeros(int(value % unit > 0), np.int64))
            if rate:
                # the quota has reached k more whole copies (k * unit - share) / rate positions behind the start
                share = value % unit
                k = np.arange(1, after // unit - value // unit + 1).astype(object)  # no number is too large
                deadlines.append(start - begin - (share - k * unit) // rate)
                k = np.arange(-(-value // unit), -(-after // unit)).astype(object) - value // unit
                releases.append(start - begin + (k * unit - share) // rate)
        deadlines.append(np.full(int(after % unit > 0), end - begin))
        return np.concatenate(releases).astype(np.int64), np.concatenate(deadlines).astype(np.int64)


def _round(whole: list[int], begun: list[_Copy], unit: int, before: list[int]) -> list[int]:
    """The counts at a border, of complete copies and some of those begun. ``before``: those at the border before."""
    counts = [max(pair) for pair in zip(whole, before, strict=True)]
    missing = sum(copy.share for copy in begun) // unit + sum(whole) - sum(counts)
    newest = sorted(begun, key=lambda copy: -copy.release)
    rooms = [-(-share // unit) for share in accumulate(copy.share for copy in newest)]  # of the i + 1 newest
    for copy in sorted(begun):  # by deadline
        first = newest.index(copy)
        if missing and counts[copy.source] == whole[copy.source] and all(rooms[first:]):
            rooms[first:] = [room - 1 for room in rooms[first:]]
            counts[copy.source] += 1
            missing -= 1
    return counts

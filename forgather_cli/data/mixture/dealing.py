"""Dealing: whole sequences by quotas, with every count less than one away from its quota before every position.

Copy j of a source, its j-th sequence, may stand from the position on in which its quota begins to pass j - 1, its
release, and must stand before its deadline, the first position at which the quota has reached j. A dealing that keeps
to that has dealt, before any position, between the quota rounded down and the quota rounded up of each source, which
is the bound. Each position gets the released copy with the earliest deadline (Tijdeman, "The chairman assignment
problem", Discrete Mathematics 32, 1980: less than one away, however many sources there are and however their shares
change).

**Why it works**, with staircases and ends alike: quotas (quotas.py) never fall, and add up to the position. The
copies whose windows, from release to deadline, lie in [s, t) gain all of their sequence there, so they are at most t
- s. For unit jobs with windows this is all it takes for the earliest deadline first to keep every deadline (Hall's
condition, on intervals). And no position stays empty: before p + 1, copies have been released as many as the quotas
rounded up add up to, at least p + 1. Deadlines must come from the quotas that follow: those that the present weights
would give break the bound.

**Blocks.** A position far away is found without a walk: positions are cut into blocks, the counts at a block's border
are each quota rounded up or down, and a block is dealt when it is entered, as a problem of its own with windows cut
at its borders. At border b, copies have begun: a share f of each is gained, 0 < f < 1. Those that are dealt before b
(u = 1, else u = 0; as many as all f add up to) must leave what is to be dealt on both sides enough room. With the
border before at a:
  1. For any t, over the copies with deadlines up to t, sum(f - u) <= 0. So copies due in (b, t] are at most t - b:
     they gain their sequences there, but for the f gained before, and those with u = 1 are done.
  2. For any s > a, over the copies released from s on, sum(u) <= sum(f) rounded up. So copies that can only stand in
     [s, b) are fewer than b - s + 1.
  3. A copy that was dealt before a has been dealt before b.
Such u exist. Take 1 for copies dealt before a; of others that had begun at a, f, but from those with the latest
deadlines on less by what the former have too much, which (1.) at a allows, since f only grows; and f for those begun
since. These fractions fulfil all three. Sums over sets of which each contains the next can be made whole, rounded up,
with u of 0 and 1; and to take copies by their deadlines, each where 2. and 3. let it, takes from all sets of earliest
deadlines as many as can be, at least as many as those fractions. By 3. a border depends on the one before, but only
where a copy has begun before that: weights of less than one in a block. Else it is rounded by itself; and where it is
not, a chain of borders is, which needs no dealing.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heappushpop
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.mixture.quotas import Quotas

FIRST_BLOCK, LARGEST_BLOCK = 1 << 12, 1 << 18
"""Blocks end at FIRST_BLOCK times 1, 2, 4, ... up to LARGEST_BLOCK, then at its multiples. This is format."""
_SMALL = 1 << 62 - 19  # what times a block's length is below 2**62


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
        self._doublings = (self._largest // self._first).bit_length() - 1
        self._borders: dict[int, list[int]] = {}
        self._tables: dict[int, tuple[NDArray[Any], NDArray[np.int64]]] = {}

    def block(self, position: int) -> int:
        """The number of the block that position lies in."""
        if position < self._largest:
            return (position // self._first).bit_length()
        return self._doublings + position // self._largest

    def border(self, block: int) -> int:
        """Where it begins; for the last, behind it, where the quotas end."""
        if block > self._doublings:
            begin = (block - self._doublings) * self._largest
        else:
            begin = self._first << block >> 1 if block else 0
        return min(begin, self.quotas.end)

    def table(self, block: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """(sources, numbers of their sequences from 0) of the block's positions."""
        if block not in self._tables:
            kept = list(self._tables.items())[-1:]  # the one before: who reads ahead and who looks back share a Dealing
            self._tables = dict([*kept, (block, self._deal(block))])
        return self._tables[block]

    def counts(self, position: int) -> NDArray[np.int64]:
        """Sequences of each source before the position."""
        position = min(position, self.quotas.end)
        block = self.block(position)
        begin = self.border(block)
        counts = np.array(self.counts_at(block), np.int64)
        if position > begin:
            counts += np.bincount(self.table(block)[0][: position - begin], minlength=len(counts))
        return counts

    def counts_at(self, block: int) -> list[int]:
        """Sequences of each source before the block."""
        chain = []
        number = block
        while number not in self._borders:
            border, since = self.border(number), self.border(max(number - 1, 0))
            whole, begun, unit = self._begun(border)
            chain.append((number, since, whole, begun, unit))
            if all(copy.release >= since for copy in begun):
                break
            number -= 1
        for number, since, whole, begun, unit in reversed(chain):
            self._borders[number] = _round(whole, begun, unit, since, self._borders.get(number - 1, whole))
        return self._borders[block]

    def _begun(self, position: int) -> tuple[list[int], list[_Copy], int]:
        """Complete copies of each source before the position, those that have begun, the unit of their shares."""
        values, unit = self.quotas.at(position)
        begun = []
        for source, value in enumerate(values):
            count, share = divmod(value, unit)
            if share:
                release, deadline = self.quotas.release(source, count), self.quotas.deadline(source, count + 1)
                begun.append(_Copy(deadline, release, source, share))
        return [value // unit for value in values], begun, unit

    def _deal(self, block: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        begin, end = self.border(block), self.border(block + 1)
        firsts, lasts = self.counts_at(block), self.counts_at(block + 1)
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
        pieces = self.quotas.pieces[self.quotas.find(begin) : self.quotas.find(end - 1) + 1]
        starts = [begin, *(piece.begin for piece in pieces[1:]), end]
        rows = []
        for piece, (start, stop) in zip(pieces, pairwise(starts), strict=True):
            rate, unit = piece.rates[source], piece.unit
            value = piece.values[source] + rate * (start - piece.begin)
            after = value + rate * (stop - start)
            share, common = value % unit, gcd(rate, unit)
            # Copy k from here on is complete after (k * over - share / unit) / under positions, where only share / unit
            # may be no whole number: rounded as the quotient is, it changes nothing.
            over, under, share = (unit // common, rate // common, share * unit // common) if rate else (0, 1, 0)
            low, high = share // unit, -(-share // unit)
            if stop - start == 1:  # released in the position and due behind it, where sources end with large numbers
                over, under, low, high = 0, 1, -1, 0
            due = after // unit - value // unit
            free = -(-after // unit) + (-value // unit)
            rows.append((start - begin, over, under, low, high, due, free, int(value % unit > 0)))
        columns = list(zip(*rows, strict=True))
        kind = np.int64 if max(columns[1]) < _SMALL else object
        at, over_, under_, low_, high_ = (np.array(column, kind) for column in columns[:5])
        piece_of, k = _counted(columns[5])
        deadlines = at[piece_of] - (low_[piece_of] - (k + 1) * over_[piece_of]) // under_[piece_of]
        piece_of, k = _counted(columns[6])
        k += np.array(columns[7], np.int64)[piece_of]
        releases = at[piece_of] + (k * over_[piece_of] - high_[piece_of]) // under_[piece_of]
        if columns[7][0]:
            releases = np.append(0, releases)
        if after % unit:
            deadlines = np.append(deadlines, end - begin)
        return np.asarray(releases, np.int64), np.asarray(deadlines, np.int64)


def _counted(counts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(i, k): k from 0 below ``counts[i]``, for each i in turn."""
    each = np.repeat(np.arange(len(counts)), counts)
    return each, np.arange(len(each)) - (np.cumsum(counts) - counts)[each]


def _round(whole: list[int], begun: list[_Copy], unit: int, since: int, before: list[int]) -> list[int]:
    """The counts at a border: of the copies that have begun, those are dealt that the module's three conditions leave.

    ``since``: the border before; ``before``: the counts there, which matter only where copies had begun there.
    """
    counts = [max(pair) for pair in zip(whole, before, strict=True)]
    missing = sum(copy.share for copy in begun) // unit + sum(whole) - sum(counts)
    newest = sorted((copy for copy in begun if copy.release > since), key=lambda copy: -copy.release)
    rooms = [-(-share // unit) for share in accumulate(copy.share for copy in newest)]  # of the i + 1 newest
    for copy in sorted(begun):  # by deadline
        if not missing:
            break
        if counts[copy.source] > whole[copy.source]:
            continue
        if copy in newest:
            sets = range(newest.index(copy), len(newest))
            if not all(rooms[i] for i in sets):
                continue
            for i in sets:
                rooms[i] -= 1
        counts[copy.source] += 1
        missing -= 1
    return counts

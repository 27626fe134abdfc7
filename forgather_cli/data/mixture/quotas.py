"""Quotas: how many sequences each source should have had at each position, as exact fractions.

A quota is piecewise linear; its slope is the source's share of the weights, as they were typed. The quotas of all
sources add up to the position: with weights 0.6, 0.3 and 0.1 they are 3/5, 3/10 and 1/10 of it.

**A line** between two entries of the schedule is a staircase of 64 steps of about equal length, or of one position
each where it has fewer. Weights are shares: the line goes from the first entry's shares to the second's, each entry
divided by its sum, and a step has those of its middle. The staircase itself is the quota, which is linear in pieces
by that.

**An end.** A source ends where its quota reaches what it holds. In the position in which it would pass that, it gets
exactly the rest, and the others share what is left of the position by their weights (several may end in one). From
then on the others' weights are what they are, among themselves. So slopes change between positions only, never within
one. Where none that is left has a weight, or a source of ``stops`` has ended, the quotas end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FOREVER = 1 << 62
"""No run gets to this position."""
STEPS = 64
"""Of the staircase that a line is. Like all rules here it is format: it says which sample stands where."""
Integers = NDArray[Any]
"""Python's own, of any size, one for each source."""


class Segment(NamedTuple):
    """From ``begin`` on, quotas are ``(values + rates * (position - begin)) / unit``."""

    begin: int
    values: Integers
    rates: Integers
    """They add up to ``unit``."""
    unit: int


class Quotas:
    """Of all sources, at positions that are counted from 0."""

    def __init__(
        self, entries: Sequence[tuple[int, Sequence[Fraction]]], holds: Sequence[int | None], stops: Sequence[bool]
    ) -> None:
        """``entries``: (position, weights) in order; positions may lie before 0, two equal ones are a jump. The first's
        weights hold from the beginning on, the last's for ever. ``holds``: sequences of each source; None: no end.
        """
        self.segments: list[Segment] = []
        self.ends: list[tuple[int, int]] = []
        """(position, source), of all that end."""
        self.end = FOREVER
        self._num_sources = len(holds)
        held = np.array([2 * FOREVER if each is None else each for each in holds], object)
        self._build(_staircases(entries), held, np.array(stops, bool))
        self._begins = [segment.begin for segment in self.segments]

    def find(self, position: int) -> int:
        """The index of the segment that position lies in."""
        return bisect_right(self._begins, position) - 1

    def at(self, position: int) -> tuple[list[int], int]:
        """(numerators, denominator)."""
        position = min(position, self.end)
        if not position:
            return [0] * self._num_sources, 1
        begin, values, rates, unit = self.segments[self.find(position)]
        return (values + rates * (position - begin)).tolist(), unit

    def release(self, source: int, count: int) -> int:
        """The position in which the quota, which does so, begins to pass ``count``."""
        index = bisect_left(self.segments, True, key=lambda segment: segment.values[source] > count * segment.unit) - 1
        begin, values, rates, unit = self.segments[index]
        return int(begin + (count * unit - values[source]) // rates[source])

    def deadline(self, source: int, count: int) -> int:
        """The first position before which the quota has reached ``count``; where it never does, one behind the end."""
        index = bisect_left(self.segments, True, key=lambda segment: segment.values[source] >= count * segment.unit) - 1
        begin, values, rates, unit = self.segments[index]
        return int(begin - (values[source] - count * unit) // rates[source]) if rates[source] else FOREVER

    def _build(self, changes: list[tuple[int, Integers]], held: Integers, stops: NDArray[np.bool_]) -> None:
        position, values, unit = 0, held * 0, 1
        ended = held == 0
        for (_, weights), until in zip(changes, [*(begin for begin, _ in changes[1:]), FOREVER], strict=True):
            while position < until:
                rates = weights * ~ended
                if not rates.any() or (stops & ended).any():
                    self.end = position
                    return
                total = rates.sum()
                unit, before = lcm(unit, total // gcd(*rates)), unit
                values, rates = values * (unit // before), rates * unit // total
                lasts = [-(-rest // rate) for rest, rate in zip(held * unit - values, rates, strict=True) if rate]
                steady = min(until - position, min(lasts) - 1)  # up to the position in which the first of them ends
                if steady:
                    self.segments.append(Segment(position, values, rates, unit))
                    values, position = values + rates * steady, position + steady
                if position < until:
                    values, rates, unit = _last_position(values, rates, unit, held)
                    self.segments.append(Segment(position, values, rates, unit))
                    values, position = values + rates, position + 1
                    full = values == held * unit
                    self.ends += [(position, int(source)) for source in np.flatnonzero(full & ~ended)]
                    ended = full


def _last_position(values: Integers, rates: Integers, unit: int, held: Integers) -> tuple[Integers, Integers, int]:
    """Values, rates and unit of a position in which sources end: these get what they have left."""
    rests = held * unit - values
    ending = held < 0
    while True:
        left = unit - (rests * ending).sum()
        weights = rates * ~ending
        if left and not weights.any():  # what others have begun before their weights became 0 is made whole
            weights = -values % unit * ~ending
        weights = weights // (gcd(*weights) or 1)
        total = weights.sum() or 1
        more = (weights > 0) & (weights * left >= rests * total)
        if not more.any():
            return values * total, rests * ending * total + weights * left, unit * total
        ending |= more


def _staircases(entries: Sequence[tuple[int, Sequence[Fraction]]]) -> list[tuple[int, Integers]]:
    """(position, weights from there on, as whole numbers)."""
    shares = [np.array(weights, object) / sum(weights) for _, weights in entries]
    common = lcm(*(share.denominator for row in shares for share in row))
    rows = [np.array([int(share * common) for share in row], object) for row in shares]
    changes = [(entries[0][0], rows[0])]  # up to there
    for ((begin, _), first), ((end, _), second) in pairwise(zip(entries, rows, strict=True)):
        steps = min(STEPS if (first != second).any() else 1, end - begin)
        for step in range(steps):
            middle = 2 * step + 1  # in halves of a step
            changes.append((begin + (end - begin) * step // steps, first * (2 * steps - middle) + second * middle))
    return [*changes, (entries[-1][0], rows[-1])]

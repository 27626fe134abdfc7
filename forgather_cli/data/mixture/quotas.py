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
from typing import NamedTuple

FOREVER = 1 << 62
"""No run gets to this position."""
STEPS = 64
"""Of the staircase that a line is. Like all rules here it is format: it says which sample stands where."""


class Piece(NamedTuple):
    """From ``begin`` on, source i has had ``(values[i] + rates[i] * (position - begin)) / unit``."""

    begin: int
    values: list[int]
    rates: list[int]
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
        self.pieces: list[Piece] = []
        self.ends: list[tuple[int, int]] = []
        """(position, source), of all that end."""
        self.end = FOREVER
        self.num_sources = len(holds)
        self._build(_staircases(entries), holds, stops)
        self._begins = [piece.begin for piece in self.pieces]

    def find(self, position: int) -> int:
        """The index of the piece that position lies in."""
        return bisect_right(self._begins, position) - 1

    def at(self, position: int) -> tuple[list[int], int]:
        """(numerators, denominator)."""
        if not position:
            return [0] * self.num_sources, 1
        begin, values, rates, unit = self.pieces[self.find(position)]
        return [value + rate * (position - begin) for value, rate in zip(values, rates, strict=True)], unit

    def release(self, source: int, count: int) -> int:
        """The position in which the quota, which does so, begins to pass ``count``."""
        index = bisect_left(self.pieces, True, key=lambda piece: piece.values[source] > count * piece.unit) - 1
        begin, values, rates, unit = self.pieces[index]
        return begin + (count * unit - values[source]) // rates[source]

    def deadline(self, source: int, count: int) -> int:
        """The first position before which the quota has reached ``count``; where it never does, one behind the end."""
        index = bisect_left(self.pieces, True, key=lambda piece: piece.values[source] >= count * piece.unit) - 1
        begin, values, rates, unit = self.pieces[index]
        return begin - (values[source] - count * unit) // rates[source] if rates[source] else FOREVER

    def _build(self, changes: list[tuple[int, list[int]]], holds: Sequence[int | None], stops: Sequence[bool]) -> None:
        position, values, unit = 0, [0] * len(holds), 1
        ended = {source for source, held in enumerate(holds) if held == 0}
        for (_, weights), (until, _) in pairwise([*changes, (FOREVER, [])]):
            while position < until:
                rates = [0 if source in ended else weight for source, weight in enumerate(weights)]
                if not any(rates) or any(stops[source] for source in ended):
                    self.end = position
                    return
                common = gcd(*rates)
                total = sum(rates) // common
                unit, before = lcm(unit, total), unit
                values = [value * (unit // before) for value in values]
                rates = [rate // common * (unit // total) for rate in rates]
                lasts = [  # up to where it ends
                    -((value - held * unit) // rate)
                    for held, value, rate in zip(holds, values, rates, strict=True)
                    if held is not None and rate
                ]
                steady = min([until - position, *(last - 1 for last in lasts)])
                if steady:
                    self.pieces.append(Piece(position, values, rates, unit))
                    values = [value + rate * steady for value, rate in zip(values, rates, strict=True)]
                    position += steady
                if position < until:
                    values, rates, unit = _last_position(values, rates, unit, holds)
                    self.pieces.append(Piece(position, values, rates, unit))
                    values = [value + rate for value, rate in zip(values, rates, strict=True)]
                    position += 1
                    full = {i for i, held in enumerate(holds) if held is not None and values[i] == held * unit}
                    self.ends += [(position, source) for source in sorted(full - ended)]
                    ended |= full


def _last_position(
    values: list[int], rates: list[int], unit: int, holds: Sequence[int | None]
) -> tuple[list[int], list[int], int]:
    """Values, rates and unit of a position in which sources end: these get what they have left."""
    rests = {source: held * unit - values[source] for source, held in enumerate(holds) if held is not None}
    ending: dict[int, int] = {}
    while True:
        left = unit - sum(ending.values())
        weights = {source: rate for source, rate in enumerate(rates) if rate and source not in ending}
        if left and not weights:  # what the others have begun before their weights became 0 is made whole
            weights = {i: -value % unit for i, value in enumerate(values) if value % unit and i not in ending}
        common = gcd(*weights.values())
        total = sum(weights.values()) // common if weights else 1
        weights = {source: weight // common for source, weight in weights.items()}
        more = {i: rests[i] for i, weight in weights.items() if i in rests and weight * left >= rests[i] * total}
        if not more:
            rates = [ending.get(i, 0) * total + weights.get(i, 0) * left for i in range(len(rates))]
            return [value * total for value in values], rates, unit * total
        ending |= more


def _staircases(entries: Sequence[tuple[int, Sequence[Fraction]]]) -> list[tuple[int, list[int]]]:
    """(position, weights from there on, as whole numbers)."""
    shares = [[weight / sum(weights) for weight in weights] for _, weights in entries]
    common = lcm(*(share.denominator for row in shares for share in row))
    rows = [[int(share * common) for share in row] for row in shares]
    changes = [(entries[0][0], rows[0])]  # up to there
    for (begin, first), (end, second) in pairwise(zip([position for position, _ in entries], rows, strict=True)):
        steps = min(STEPS if first != second else 1, end - begin)
        for step in range(steps):
            ahead, behind = 2 * steps - 2 * step - 1, 2 * step + 1  # in halves of a step, from its middle
            weights = [a * ahead + b * behind for a, b in zip(first, second, strict=True)]
            changes.append((begin + (end - begin) * step // steps, weights))
    return [*changes, (entries[-1][0], rows[-1])]

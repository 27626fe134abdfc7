"""Quotas by their definitions, position by position."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from forgather_cli.data.mixture.dealing import FIRST_BLOCK, LARGEST_BLOCK, Dealing
from forgather_cli.data.mixture.quotas import FOREVER, Quotas

Entries = list[tuple[int, list[Fraction]]]


@dataclass
class Case:
    entries: Entries
    holds: list[int | None]
    stops: list[bool]
    blocks: tuple[int, int] = (FIRST_BLOCK, LARGEST_BLOCK)
    """Small ones: borders are what is hard."""

    def dealing(self) -> Dealing:
        return Dealing(Quotas(self.entries, self.holds, self.stops), self.blocks)


def exactly(*weights: object) -> list[Fraction]:
    return [Fraction(str(weight)) for weight in weights]


def shares_at(position: int, shares: Entries) -> list[Fraction]:
    """Of one position, by the definition of a line."""
    found = shares[0][1]
    for (begin, first), (end, second) in pairwise(shares):
        if begin <= position < end:
            steps = min(64, end - begin)
            step = max(k for k in range(steps) if begin + (end - begin) * k // steps <= position)
            middle = Fraction(2 * step + 1, 2 * steps)
            found = [a + (b - a) * middle for a, b in zip(first, second, strict=True)]
        elif end <= position:
            found = second
    return found


def quotas_of(case: Case, length: int) -> list[list[Fraction]]:
    """Before each position; shorter where all ends before."""
    sources = range(len(case.holds))
    quotas = [[Fraction(0)] * len(sources)]
    entries = [(at, [weight / sum(weights) for weight in weights]) for at, weights in case.entries]
    while len(quotas) <= length:
        before = quotas[-1]
        rests = [FOREVER if held is None else held - quota for held, quota in zip(case.holds, before, strict=True)]
        shares = shares_at(len(quotas) - 1, entries)
        open_ = {i for i in sources if rests[i] and shares[i]}
        if not open_ or any(case.stops[i] and not rests[i] for i in sources):
            break
        gains = [Fraction(0)] * len(sources)
        while open_ and (left := 1 - sum(gains)):
            total = sum(shares[i] for i in open_)
            full = {i for i in open_ if left * shares[i] / total >= rests[i]}
            for i in full or open_:
                gains[i] = Fraction(rests[i]) if full else left * shares[i] / total
            open_ = open_ - full if full else set()
        if left := 1 - sum(gains):  # only sequences that others have begun are left
            lacks = [-before[i] % 1 if rests[i] and not gains[i] else Fraction(0) for i in sources]
            gains = [gain + left * lack / sum(lacks) for gain, lack in zip(gains, lacks, strict=True)]
        quotas.append([quota + gain for quota, gain in zip(before, gains, strict=True)])
    return quotas

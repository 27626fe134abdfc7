"""Quotas and the dealing against their definitions, position by position; every prefix within one of its quota."""

from __future__ import annotations

import hashlib
import math
import random
import time
from fractions import Fraction

import numpy as np
import pytest
from by_definition import Case, exactly, quotas_of, shares_at

from forgather_cli.data.mixture.dealing import LARGEST_BLOCK, Dealing
from forgather_cli.data.mixture.quotas import Quotas


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    count = rng.randint(2, 20)
    least, digits = rng.choice([0, 0, 1]), rng.choice([10, 10, 10**16])

    def weights() -> list[Fraction]:
        found = [
            Fraction(rng.randint(least, 4 * digits), digits)
            if rng.random() < 0.8
            else Fraction(1, 10 ** rng.randint(1, 6))
            for _ in range(count)
        ]
        return found if any(found) else [Fraction(1)] * count

    position = rng.choice([0, 0, -50, 20])
    entries = [(position, weights())]
    for _ in range(rng.randint(0, 4)):
        position += rng.choice([0, 1, 5, 40, 100, 300])  # a jump, lines shorter and longer than a staircase has steps
        entries.append((position, weights()))
    holds = [rng.choice([None, None, None, rng.randint(0, 60)]) for _ in range(count)]
    stops = [rng.random() < 0.05 for _ in range(count)]
    return Case(entries, holds, stops, rng.choice([(1, 8), (2, 4), (4, 32), (16, 16), (8, 128)]))


def check(case: Case, length: int) -> None:
    dealing = case.dealing()
    quotas = quotas_of(case, length)
    end = len(quotas) - 1
    assert dealing.quotas.end == end if end < length else dealing.quotas.end >= length
    for position, row in enumerate(quotas):
        values, unit = dealing.quotas.at(position)
        assert [Fraction(value, unit) for value in values] == row
    walked: list[tuple[int, int]] = []
    counts = [0] * len(case.holds)
    begin = 0
    while begin < end:
        stop = dealing.stop(begin)
        assert dealing.start(begin) == dealing.start(stop - 1) == begin
        assert dealing.counts_at(begin) == counts
        walked += zip(*(part.tolist() for part in dealing.table(begin)), strict=True)
        if stop <= end:
            assert walked[begin:] == earliest_first(quotas[: stop + 1], begin, counts, dealing.counts_at(stop))
        for position, (source, number) in enumerate(walked[begin:end], begin):
            assert number == counts[source]  # in order, none twice, none left out
            counts[source] += 1
            values, unit = dealing.quotas.at(position + 1)
            assert all(abs(count * unit - value) < unit for count, value in zip(counts, values, strict=True)), position
        begin = stop
    assert dealing.counts(end).tolist() == counts
    for position, source in dealing.quotas.ends:
        if position <= end:
            assert dealing.counts(position)[source] == case.holds[source]
    for position in random.Random(end).sample(range(end), min(end, 5)):  # without a walk there
        other = case.dealing()
        start = other.start(position)
        assert tuple(part[position - start] for part in other.table(start)) == walked[position]


def earliest_first(
    quotas: list[list[Fraction]], begin: int, firsts: list[int], lasts: list[int]
) -> list[tuple[int, int]]:
    """A block that ends with ``quotas``, by the definitions of release and deadline."""
    whole = [[math.floor(quota) for quota in row] for row in quotas]
    begun = [[math.ceil(quota) for quota in row] for row in quotas]
    counts, dealt = [*firsts], []
    for position in range(begin, len(quotas) - 1):
        due = []
        for source, count in enumerate(counts):
            if count < min(lasts[source], begun[position + 1][source]):
                later = (t for t in range(position + 1, len(quotas)) if whole[t][source] > count)
                due.append((next(later, len(quotas) - 1), source))
        _, source = min(due)
        dealt.append((source, counts[source]))
        counts[source] += 1
    return dealt


@pytest.mark.parametrize("seed", range(24))
def test_every_prefix_is_within_one_of_its_quota(seed: int) -> None:
    check(drawn(seed), 160)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 300))
def test_more_of_these(seed: int) -> None:
    check(drawn(seed), 600)


def test_two_sources_end_in_one_position() -> None:
    """The second only by what the first leaves to it."""
    quotas = Quotas([(0, exactly(0.49, 0.3, 0.21))], [1, 1, None], [False] * 3)
    assert quotas.ends == [(3, 0), (3, 1)]
    values, unit = quotas.at(3)
    assert values == [unit] * 3


@pytest.mark.parametrize("seed", range(8))
def test_borders_are_found_from_anywhere(seed: int) -> None:
    """With sources whose sequences take many blocks, so that each border is tied to the one before."""
    rng = random.Random(seed)
    weights = [[Fraction(rng.choice([1, 2, 3, 60]), rng.randint(1, 9)) for _ in range(12)] for _ in range(3)]
    case = Case([(0, weights[0]), (90, weights[1]), (110, weights[2])], [None] * 12, [False] * 12, (2, 4))
    check(case, 160)
    dealing = case.dealing()
    border = 0
    while border < 200:  # forwards, each from what is known of the one before
        assert Dealing(dealing.quotas, case.blocks).counts_at(border) == dealing.counts_at(border)
        border = dealing.stop(border)


def cut_short(seed: int) -> Case:
    """Equal sources, of which a few go on alone, while others have begun sequences."""
    rng = random.Random(seed)
    count = rng.randint(4, 14)
    at, first = rng.randint(1, count - 1), [Fraction(1)] * count
    later = [Fraction(rng.choice([0, 0, 1])) for _ in range(count - 1)]
    return Case([(0, first), (at, first), (at, [*later, Fraction(1)])], [None] * count, [False] * count)


def by_present_weights(case: Case, quotas: list[list[Fraction]]) -> list[int]:
    """The sources, where deadlines are those that the weights of the position itself promise."""
    counts, dealt = [0] * len(case.holds), []
    for position, before in enumerate(quotas[:-1]):
        shares, begun = shares_at(position, case.entries), quotas[position + 1]
        due = [
            ((count + 1 - before[source]) * sum(shares) / shares[source] if shares[source] else math.inf, source)
            for source, count in enumerate(counts)
            if begun[source] > count
        ]
        dealt.append(min(due)[1])
        counts[dealt[-1]] += 1
    return dealt


def is_within_one(dealt: list[int], quotas: list[list[Fraction]]) -> bool:
    counts = [0] * len(quotas[0])
    for source, row in zip(dealt, quotas[1:], strict=True):
        counts[source] += 1
        if any(abs(count - quota) >= 1 for count, quota in zip(counts, row, strict=True)):
            return False
    return True


def test_deadlines_are_read_from_what_is_to_come() -> None:
    """By the present weights alone they are missed after some jumps, which random schedules find."""
    missed = []
    for seed in range(60):
        case = cut_short(seed)
        quotas = quotas_of(case, 40)
        assert is_within_one(case.dealing().table(0)[0][:40].tolist(), quotas)
        missed += [seed] if not is_within_one(by_present_weights(case, quotas), quotas) else []
    assert 3 <= len(missed) < 30, missed


def worst(weights: list[Fraction], dealt: list[Fraction], length: int) -> float:
    """The largest distance from the quotas of ``weights`` at the prefixes of what is dealt by others."""
    count = len(weights)
    dealing = Dealing(Quotas([(0, dealt)], [None] * count, [False] * count))
    parts, begin = [], 0
    while begin < length:
        parts.append(dealing.table(begin)[0])
        begin = dealing.stop(begin)
    sources = np.concatenate(parts)[:length]
    unit = math.lcm(*(weight.denominator for weight in weights))
    wholes = [int(weight * unit) for weight in weights]
    total, places = sum(wholes), np.arange(1, length + 1)
    return max(
        int(np.abs(np.cumsum(sources == i) * total - places * whole).max()) / total for i, whole in enumerate(wholes)
    )


FEW = exactly(0.7, 0.2, 0.07, 0.03)
FIFTEEN = exactly(*(round(0.01 * 1.35**k, 3) for k in range(15)))
RARE = exactly(1, 1e-6, 1e-6, 0.5)


@pytest.mark.parametrize("weights", [FEW, FIFTEEN, RARE], ids=["few", "fifteen", "rare"])
def test_200_000_sequences_stay_within_one(weights: list[Fraction]) -> None:
    assert worst(weights, weights, 200_000) < 1
    rounded = [Fraction(round(weight / sum(weights) * 1024), 1024) for weight in weights]  # the measure sees a drift
    assert worst(weights, [weight or Fraction(1, 1024) for weight in rounded], 200_000) > 10


def test_weights_are_taken_as_typed() -> None:
    """Of a float the digits that were typed, and numbers that no machine integer holds, anywhere in a run."""
    assert Quotas([(0, exactly(0.1, 0.2, 0.7))], [None] * 3, [False] * 3).at(10) == ([10, 20, 70], 10)
    weights = exactly("0.12345678901234567", "0.98765432109876543", "3.1415926535897932", 1e-9)
    dealing = Dealing(Quotas([(0, weights)], [None] * 4, [False] * 4))
    for position in (1, 5000, 10**12 + 7):
        quotas = [position * weight / sum(weights) for weight in weights]
        assert all(abs(int(count) - quota) < 1 for count, quota in zip(dealing.counts(position), quotas, strict=True))


def test_a_block_takes_little_time_wherever_it_is() -> None:
    """Also behind begun sequences of sources without a weight since, which tie each border to the one before."""
    weights = [Fraction(1, 20 + i) for i in range(20)]
    fewer = [weight if i < 10 else Fraction(0) for i, weight in enumerate(weights)]
    dealing = Dealing(Quotas([(0, weights), (1001, weights), (1001, fewer)], [None] * 20, [False] * 20))
    start = time.process_time()
    dealing.table(0)
    assert time.process_time() - start < 0.1  # a run does not begin by dealing what it reads hours later
    far = dealing.start(10**9)
    assert dealing.stop(far) - far == LARGEST_BLOCK <= 1 << 20
    start = time.process_time()
    dealing.table(far)
    assert time.process_time() - start < 10  # of minutes that it takes where all before it is dealt
    start = time.process_time()
    dealing.table(dealing.stop(far))
    assert time.process_time() - start < 10


def test_dealings_stay_as_they_were() -> None:
    """Runs of versions before go on by a position."""
    line = [(0, FEW), (5000, FEW[::-1]), (5000, exactly(0, 1, 0, 2))]
    dealings = [
        Dealing(Quotas([(0, FEW)], [None] * 4, [False] * 4)),
        Dealing(Quotas(line, [None, 900, 1500, None], [False] * 4)),
        Dealing(Quotas([(0, FIFTEEN)], [10**6] * 15, [False] * 15)),
    ]
    found = [dealing.table(start)[0].tolist() for dealing in dealings for start in (0, 1 << 12, 1 << 15)]
    assert hashlib.sha256(str(found).encode()).hexdigest()[:32] == "0cdc715eb3289803fdf5fadfb81d0409"

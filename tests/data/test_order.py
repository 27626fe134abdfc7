"""The global order: a permutation, a function of (seed, epoch), with a free seek; or grouped by length."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest

from forgather_cli.data.order import LengthGroupedOrder, Order


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 100, 4095, 4096, 4097, 10_001])
def test_every_sample_once(length: int) -> None:
    assert sorted(Order(length, 42, 0)[:]) == list(range(length))


def test_a_slice_is_a_slice_of_the_whole() -> None:
    whole = Order(10_000, 7, 3)[0:10_000]
    order = Order(10_000, 7, 3)
    for start, stop in ((4096, 4100), (0, 8), (4090, 4100), (9_990, 10_000), (5, 9_000), (17, 17)):
        assert order[start:stop] == whole[start:stop]
    assert order[9_999:20_000] == whole[9_999:]


def test_seed_and_epoch_change_the_order() -> None:
    orders = [Order(1000, seed, epoch)[:] for seed in (0, 1, 2**40) for epoch in (0, 1, 7)]
    grouped = [LengthGroupedOrder(np.arange(40), seed, epoch)[:] for seed in (0, 1) for epoch in (0, 1, 2)]
    for found in (orders, grouped):  # grouped by length even for few samples
        assert len({tuple(order) for order in found}) == len(found)
    assert Order(1000, 1, 7)[:] == Order(1000, 1, 7)[:]
    assert Order(10, 1, 1, shuffle=False)[2:5] == [2, 3, 4]


def test_looks_random() -> None:
    """Neighbours are uncorrelated, every place is as likely as any other, small sets reach all permutations."""
    assert len({tuple(Order(3, seed, 0)[:]) for seed in range(200)}) == 6
    order = np.array(Order(20_000, 5, 0)[:], float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    firsts = np.array([Order(10, seed, 0)[0:1][0] for seed in range(5000)])
    counts = np.bincount(firsts, minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 33  # chi-squared with 9 degrees of freedom: 33 is 1 in 10,000


def test_orders_stay_as_they_were() -> None:
    """Runs of versions before go on by a position."""
    orders = [
        Order(length, seed, epoch)[:] for length in (1, 2, 3, 5, 4096, 5000) for seed, epoch in ((0, 0), (2**40, 7))
    ]
    lengths = np.arange(5000) * 7919 % 499
    orders += [LengthGroupedOrder(lengths[:count], 7, 3)[:] for count in (3, 7, 5000)]
    assert hashlib.sha256(str(orders).encode()).hexdigest()[:32] == "bc8846857cd60a3dbf9fcf52169e03ea"


def test_seek_needs_no_walk_through_the_data() -> None:
    start = time.process_time()
    assert len(Order(10**12, 3, 1)[10**12 - 8 : 10**12]) == 8
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("length", [1, 3, 7, 4096, 10_001])
def test_samples_of_like_length_come_together(length: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, length)
    whole = LengthGroupedOrder(lengths, 7, 3)[0:length]
    assert sorted(whole) == list(range(length))
    assert LengthGroupedOrder(lengths, 7, 3)[2:900] == whole[2:900]
    assert lengths[whole[0]] == lengths.max()
    size = min(1024, -(-length // 4))
    shuffled = Order(length, 7, 3)[:]
    for start in range(0, length, size):
        told = lengths[whole[start : start + size]]
        assert (np.diff(told[1:]) <= 0).all()  # the first may have changed places with the longest of all
        both = set(whole[start : start + size]) ^ set(shuffled[start : start + size])
        assert both <= {whole[0], *whole[::size]}

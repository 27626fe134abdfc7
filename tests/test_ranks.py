"""The pool of rank processes that other tests stand on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks


def summed(value: int) -> tuple[int, int]:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def failing_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


def dying(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(1)
    dist.barrier()


def test_a_failing_rank_is_told_first_and_the_pool_goes_on() -> None:
    before = run_ranks(2, os.getpid)
    with pytest.raises(RankError, match="rank 1 says no") as caught:
        run_ranks(2, failing_on, 1)
    assert isinstance(caught.value.first, ValueError)
    assert run_ranks(2, summed, 0) == [(0, 1), (1, 1)]
    assert run_ranks(2, os.getpid) == before


def asleep() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


@pytest.mark.full
def test_a_silent_rank_says_where_it_is() -> None:
    with pytest.raises(RankError, match=r"(?s)ranks \[1\] gave no answer within 10 s.*rank 1 is at.* in asleep"):
        run_ranks(2, asleep, timeout=10)


@pytest.mark.full
def test_a_pool_with_a_dead_rank_is_replaced() -> None:
    with pytest.raises(RankError, match="the process died"):
        run_ranks(2, dying, 1)
    assert run_ranks(2, summed, 0) == [(0, 1), (1, 1)]

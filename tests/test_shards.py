"""What a rank holds of a tensor, on meshes of one to three dimensions; torch's own cutting is the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forgather_cli.errors import SetupError
from forgather_cli.shards import (
    Box,
    RowExchange,
    box_of,
    fill_local,
    local,
    needs_exchange,
    not_finite,
    row_group,
    rows_of,
)

LAYOUTS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Replicate())),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(1), Shard(0))),
    ((2, 2), (Shard(1), Shard(1))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), (_StridedShard(1, split_factor=2), Shard(1))),
    ((2, 2, 1), (Replicate(), _StridedShard(1, split_factor=1), Shard(1))),
    ((1, 2, 2), (Shard(0), Shard(2), Shard(1))),
]
SHAPES = [(8, 8, 4), (5, 7, 3), (1, 2, 9), (9, 1, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).mul(7).remainder(101).reshape(shape).to(dtype)


def laid_out() -> Iterator[tuple[DeviceMesh, tuple[Any, ...], list[tuple[torch.Tensor, DTensor]]]]:
    """Each layout: its mesh, its placements, and tensors with what this rank has of them."""
    for mesh_shape, placements in LAYOUTS:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b", "c")[: len(mesh_shape)])
        # torch distributes strided shards only evenly; FSDP2 makes uneven ones, in the test below
        shapes = SHAPES[:1] if any(isinstance(p, _StridedShard) for p in placements) else SHAPES
        full = [numbers(shape, dtype) for shape in shapes for dtype in DTYPES]
        yield mesh, placements, [(t, distribute_tensor(t, mesh, placements, src_data_rank=None)) for t in full]


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """As one of four ranks that do not talk."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(4))
def test_memory_is_the_box(rank: int) -> None:
    with as_rank(rank):
        for mesh, placements, tensors in laid_out():
            cuts = [n for n, p in enumerate(placements) if not p.is_replicate()]
            by_rows = len(cuts) == 1 and placements[cuts[0]].dim == 0
            for whole, tensor in tensors:
                box = box_of(tensor)
                assert torch.equal(local(tensor), whole[box.slices]), (placements, whole.shape)
                assert needs_exchange(tensor) == any(getattr(p, "dim", 0) for p in placements)
                assert row_group(tensor) is (mesh.get_group(cuts[0]) if by_rows else None)
                local(tensor).zero_()
                fill_local(tensor, whole)
                assert torch.equal(local(tensor), whole[box.slices])


def test_plain_tensors_are_held_whole() -> None:
    assert box_of(torch.ones(3, 2)) == Box((0, 0), (3, 2))
    assert (rows_of(torch.ones(3, 2)), rows_of(torch.ones(()))) == ((0, 3), (0, 1))
    fill_local(scalar := torch.zeros(()), torch.ones(()))
    assert scalar == 1


def test_tensors_that_hold_what_is_not_finite_are_named() -> None:
    small, infinity = torch.float8_e5m2, torch.tensor([1.0, -torch.inf])
    void = {"nan": torch.tensor([torch.nan, 1.0]), "bf16": infinity.bfloat16(), "fp8": infinity.to(small)}
    sound = {"int": torch.ones(2, dtype=torch.int64), "one": torch.ones(2).to(small), "none": torch.ones(0)}
    assert not_finite({**sound, **void}) == list(void)
    assert not_finite(sound) == not_finite({}) == []


def test_what_is_not_one_box_is_refused() -> None:
    with as_rank(0):
        mesh = init_device_mesh("cpu", (2, 2))
        for placements, told in (
            ((_StridedShard(0, split_factor=2), Replicate()), "apart"),
            ((Shard(0), Partial()), "sums"),
        ):
            made = DTensor.from_local(torch.ones(4, 2), mesh, placements, run_check=False, shape=(8, 2), stride=(2, 1))
            with pytest.raises(SetupError, match=told):
                box_of(made)


def rows_of_all() -> None:
    """The exchange gives whole rows, which together are all."""
    for mesh, placements, tensors in laid_out():
        exchange = RowExchange(each for _, each in tensors if needs_exchange(each))
        copies = math.prod(n for n, p in zip(mesh.shape, placements, strict=True) if p.is_replicate())
        for whole, tensor in tensors:
            start, stop = rows_of(tensor)
            rows = exchange.rows(tensor) if needs_exchange(tensor) else local(tensor)
            assert torch.equal(rows, whole[start:stop]), (placements, whole.shape, whole.dtype)
            held = torch.zeros(whole.shape[0])
            held[start:stop] = 1
            dist.all_reduce(held)
            assert held.tolist() == [copies] * len(held)


class Net(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, rows)
        self.down = nn.Linear(rows, 6)


def fully_sharded_over_tensor_parallel(rows: int, mesh_shape: tuple[int, int]) -> dict[str, tuple[Box, Any]]:
    """Each parameter of a net that torch's own functions have cut: its box, and whether the memory is that box."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("shard", "tensor"))
    net = Net(rows)
    for name, parameter in net.named_parameters():
        parameter.data = numbers(tuple(parameter.shape)) + len(name)
    full = {name: p.detach().clone() for name, p in net.named_parameters()}
    parallelize_module(net, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["shard"])
    held = {}
    for name, p in net.named_parameters():
        held[name] = box_of(p)
        assert torch.equal(local(p), full[name][box_of(p).slices]), name
        rows_here = RowExchange([p]).rows(p) if needs_exchange(p) else local(p)
        assert torch.equal(rows_here, full[name][slice(*rows_of(p))]), name
    return held


@pytest.mark.parametrize(("rows", "mesh"), [(8, (2, 2)), (6, (2, 2)), (9, (2, 2)), (7, (4, 1)), (5, (1, 4))])
def test_what_fsdp2_makes_of_tensor_parallelism_is_one_box(rows: int, mesh: tuple[int, int]) -> None:
    held = run_ranks(4, fully_sharded_over_tensor_parallel, rows, mesh)
    assert sum(math.prod(each["up.weight"].sizes) for each in held) == 6 * rows
    if (rows, mesh) == (8, (2, 2)):
        assert [each["up.weight"] for each in held] == [Box((n, 0), (2, 6)) for n in (0, 4, 2, 6)]
        assert [each["down.weight"] for each in held] == [Box((m, n), (3, 4)) for m in (0, 3) for n in (0, 4)]


def test_ranks_exchange_columns_for_rows() -> None:
    run_ranks(4, rows_of_all)

"""Grids of ranks: the dimensions of a mesh, and the group that one process makes for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from forgather_cli.strategies.mesh import Degrees, have_a_group, mesh_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_mesh_has_the_dimensions_with_several_ranks_and_shard_always() -> None:
    assert Degrees() == Degrees(pipeline=1, replicate=1, shard=1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    for degrees, expected in (
        (Degrees(shard=8), [("shard", 8)]),
        (Degrees(replicate=8), [("replicate", 8), ("shard", 1)]),
        (Degrees(2, 2, 2), [("pipeline", 2), ("replicate", 2), ("shard", 2)]),
    ):
        mesh = mesh_of(CPU, degrees)
        assert list(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) == expected


def test_one_process_has_a_group_of_its_own_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    have_a_group(CPU)
    have_a_group(CPU)  # there is one
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    for _ in range(2):
        at_exit[-1]()
        assert not dist.is_initialized()


def test_the_ranks_that_the_environment_names_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        have_a_group(CPU)

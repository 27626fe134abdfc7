"""Which rows each rank of a worker sends, and that all get what one has fetched: on real ranks of every layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forgather_cli.diloco.parts import Parts


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def exchanged(layout: str) -> tuple[list[tuple[str, int, int]], dict[str, torch.Tensor]]:
    """What this rank sends, and its full weights after all parts were set to twice their values."""
    made = model()
    if layout == "fsdp2":
        fully_shard(made)
    elif layout == "hsdp":
        fully_shard(made, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    rank = dist.get_rank()
    parameters = dict(made.named_parameters())
    if layout == "stages":  # each rank has other parameters, and both have the first
        parameters = {n: p for n, p in parameters.items() if n == "0.weight" or (int(n[0]) == 2) == (rank == 1)}
    parts = Parts(parameters, dist.group.WORLD, rank)
    parts.set({part: 2 * parts.values(part).clone() for part in parts.own}, [name for name, _ in parts.shapes])
    full = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in parameters.items()}
    return [(part.name, part.start, part.rows) for part in parts.own], full


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("stages", 2)])
def test_every_row_is_sent_once_and_reaches_every_rank_that_holds_it(layout: str, ranks: int) -> None:
    found = run_ranks(ranks, exchanged, layout)
    rows = sorted((name, row) for own, _ in found for name, start, count in own for row in range(start, start + count))
    before = model().state_dict()
    assert rows == sorted((name, row) for name, value in before.items() for row in range(len(value)))
    for _, full in found:
        assert all(torch.equal(value, 2 * before[name]) for name, value in full.items())
    if layout in ("ddp", "fsdp2"):
        assert all(own for own, _ in found), "the ranks share the work"

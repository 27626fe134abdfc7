"""Which ranks share what: from degrees of parallelism to a grid of ranks."""

from __future__ import annotations

import atexit
import logging
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forgather_cli.distributed import join_world

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Degrees:
    """Number of ranks in each kind of parallelism, outermost first: ranks that differ only in the last are neighbours.

    Tensor and context parallel will have their places after ``shard``: the more often ranks talk, the nearer they are.
    """

    pipeline: int = 1
    """Each holds some of the layers."""
    replicate: int = 1
    """Each holds the same."""
    shard: int = 1
    """Each holds some rows of every parameter."""


def mesh_of(device: torch.device, degrees: Degrees) -> DeviceMesh:
    """Collective. All ranks in a grid, whose dimensions are those with several ranks, and ``shard`` always.

    Groups of ranks follow from it: ``get_group(name)`` has the ranks that differ in that dimension alone.
    """
    sizes = {name: size for name, size in asdict(degrees).items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def have_a_group(device: torch.device) -> None:
    """Collective. Join the process group, or make one of this rank alone: a mesh needs one."""
    join_world(device)
    if dist.is_initialized():
        return
    log.info("trainer=fsdp2: this process trains alone, in a process group of one rank made for it")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)

"""Tensors of which a rank holds some rows: DTensors sharded over their first dimension, and plain ones, held whole."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

Full = tuple[int, ...]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank holds only some rows of ``tensor``, which is a DTensor then.

    DTensor is not imported for it, which costs half a second: a process that has none has not imported it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The memory this rank holds of ``tensor``: itself, or a DTensor's local rows. Writing to it writes the tensor."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    rows: Tensor = sharded._local_tensor  # to_local() goes through autograd; torch 2.13, tensor/_api.py
    return rows


def locals_of(tensors: list[Tensor]) -> list[Tensor]:
    """``local`` of each; free where this process has no DTensors."""
    return [local(t) for t in tensors] if "torch.distributed.tensor" in sys.modules else tensors


def held_rows(tensor: Tensor) -> tuple[int, int]:
    """Rows [start, stop) of the full tensor that ``local`` is. A 0-dim tensor counts as one row.

    Raises AssertionError for a DTensor sharded over another dimension than the first.
    """
    rows = local(tensor).shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return 0, rows
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    mesh, placements = sharded.device_mesh, sharded.placements
    assert all(p.is_replicate() or p.is_shard(0) for p in placements), placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    start = min(offset[0], tensor.shape[0]) if tensor.ndim else 0  # an empty shard's offset is past the end
    return start, start + rows


@torch.no_grad()
def fill_local(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of ``full`` into ``tensor``."""
    start, stop = held_rows(tensor)
    local(tensor).copy_(full[start:stop] if tensor.ndim else full)

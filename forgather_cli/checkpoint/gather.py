"""The one way in which ranks talk about checkpoints: small objects over a CPU process group."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def gather(value: T, group: Any) -> list[T]:
    """Collective. Every rank's ``value`` by rank, on every rank; ``[value]`` where ``group`` is None.

    Values are names, shapes, hashes and messages. Rank 0's decision is ``gather(decision, group)[0]``.
    """
    if group is None:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values

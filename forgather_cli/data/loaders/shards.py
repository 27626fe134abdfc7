"""Iterable data that every rank reads by itself: whose dataset is its own shard, and whose is everybody's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather_cli.data.loaders.data_ranks import Peers
from forgather_cli.errors import DataError


def own_shard(dataset: Any, rank: int, size: int) -> Any | None:
    """``dataset.shard(num_shards=size, index=rank)``, the protocol of the ``datasets`` library; None where a dataset
    has no such method or says (``num_shards``) that it has fewer parts than there are ranks, or for one rank."""
    shard = getattr(dataset, "shard", None)
    if size == 1 or not callable(shard) or getattr(dataset, "num_shards", size) < size:
        return None
    return shard(num_shards=size, index=rank)


def samples_by_rank(dataset: Any) -> bool:
    """True for a dataloader with a ``DistributedSampler`` or another one that names its ``num_replicas``."""
    samplers = (getattr(dataset, name, None) for name in ("sampler", "batch_sampler"))
    return any(getattr(sampler, "num_replicas", 1) > 1 for sampler in samplers)


def reads_own_shard(items: Sequence[Any], peers: Peers, dataset: str) -> bool:
    """Collective. True if ranks see different data, so that each reads a shard of its own; False if all see the same,
    of which each then takes its part. Told by the first samples, which ``items`` are on this rank.

    Raises DataError where ranks that are to read the same data do not.
    """
    seen = peers.gather(fingerprint(items))
    by_data_rank: dict[int, str] = {}
    for data_rank, found in zip(peers.data_ranks, seen, strict=True):
        if by_data_rank.setdefault(data_rank, found) != found:
            raise DataError(
                f"{dataset}: ranks that train the same samples get different ones from it; set dispatch_batches=true "
                "(rank 0 reads for all), or make it independent of the rank and of random numbers"
            )
    return len(set(seen)) > 1


def fingerprint(items: Sequence[Any]) -> str:
    """Hash of samples: tensors, arrays, numbers and text in mappings and lists; of anything else its type."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(items):
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


def _parts(value: Any) -> list[bytes]:
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (str(key).encode(), *_parts(value[key]))]
    if isinstance(value, Tensor):
        flat = value.detach().cpu().reshape(-1).view(torch.uint8)
        return [f"{value.dtype} {tuple(value.shape)}".encode(), flat.numpy().tobytes()]
    if isinstance(value, np.ndarray):
        return [f"{value.dtype} {value.shape}".encode(), value.tobytes()]
    if isinstance(value, list | tuple):
        return [part for item in value for part in _parts(item)]
    known = value is None or isinstance(value, str | bytes | int | float)
    return [repr(value).encode("utf-8", "surrogatepass") if known else type(value).__name__.encode()]

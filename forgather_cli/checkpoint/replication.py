"""Is what several ranks hold equal on all of them? Checksums where the tensors are, and who differs."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from forgather_cli.checkpoint.components import LocalShard
from forgather_cli.checkpoint.format import Piece
from forgather_cli.documents.encoding import TAG, Encoded, raw_bytes
from forgather_cli.errors import ReplicationError, ranks_named

Check = Literal["none", "quick", "tensor", "full"]
"""What is compared: nothing; names, shapes and dtypes; a checksum of 64 bits; every bit (SHA-256)."""
Sums = dict[str, int | str]
"""Tensor name -> checksum of this rank's rows."""

_CHUNK = 1 << 20
"""Elements that are worked on at a time: 16 MB beside the tensor."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_FACTOR = -7046029254386353131  # 2**64 divided by the golden ratio: odd, as everything here that is multiplied with
_NAMED = 5  # tensors that a message names

K = TypeVar("K", bound=Hashable)


class ReplicationCheck:
    """Compares what several ranks hold, save after save. What no other rank holds is not looked at again."""

    def __init__(self, level: Check) -> None:
        self.level = level
        self._alone: set[Piece] = set()

    def sums(self, shards: Mapping[str, LocalShard], pieces: Iterable[Piece]) -> Sums:
        """Checksums of what this rank holds, where some other rank may hold it too. Waits for the device."""
        if self.level not in ("tensor", "full"):
            return {}
        held = {p.spec.name: shards[p.spec.name].memory for p in pieces if p not in self._alone}
        tensors = {name: memory for name, memory in held.items() if memory.numel()}
        return checksums(tensors) if self.level == "tensor" else {n: sha256_of(t) for n, t in tensors.items()}

    def differences(self, rank: int, held: Sequence[Sequence[Piece]], sums: Sequence[Sums]) -> list[str]:
        """What all ranks hold (``held`` and ``sums`` by rank) and ``rank`` is one of: each tensor that differs, with
        the ranks.
        """
        if self.level == "none":
            return []
        specs = _grouped(((piece.spec.name, piece.spec), r) for r, pieces in enumerate(held) for piece in pieces)
        other = [
            f"{name} ({'; '.join(f'{ranks_named(r)}: {spec.dtype} {list(spec.shape)}' for spec, r in found.items())})"
            for name, found in specs.items()
            if len(found) > 1
        ]
        values = _grouped(
            ((piece, sums[r].get(piece.spec.name)), r) for r, pieces in enumerate(held) for piece in pieces
        )
        self._alone = {p for p in held[rank] if sum(map(len, values[p].values())) == 1}
        for value in values.values():
            value.pop(None, None)
        return other + _told({_described(piece): found for piece, found in values.items()})


def component_differences(digests: Sequence[Mapping[str, str]]) -> list[str]:
    """The components whose digests, by rank and key, differ, with the ranks."""
    return _told(_grouped(((key, value), rank) for rank, found in enumerate(digests) for key, value in found.items()))


def refuse(differences: Sequence[str], step: int) -> None:
    """Raise ReplicationError if there are any."""
    if differences:
        more = f" and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        raise ReplicationError(
            "ranks hold different values of state that must be equal on them, so step "
            f"{step} is not saved and training ends: {', '.join(differences[:_NAMED])}{more}; find what makes ranks "
            "differ and resume from the checkpoint before (replication_check=none looks away)"
        )


def _grouped(items: Iterable[tuple[tuple[K, Any], int]]) -> dict[K, dict[Any, list[int]]]:
    """Key -> value -> the ranks that have it."""
    result: dict[K, dict[Any, list[int]]] = {}
    for (key, value), rank in items:
        result.setdefault(key, {}).setdefault(value, []).append(rank)
    return result


def _told(found: Mapping[str, Mapping[Any, Sequence[int]]]) -> list[str]:
    return [f"{name} ({' unlike '.join(map(ranks_named, f.values()))})" for name, f in found.items() if len(f) > 1]


def _described(piece: Piece) -> str:
    if piece.box is not None:
        offsets, sizes = piece.box
        return f"{piece.spec.name} {list(sizes)} from {list(offsets)}"
    whole = piece.rows == piece.spec.num_rows
    return piece.spec.name if whole else f"{piece.spec.name} rows {piece.start} to {piece.start + piece.rows}"


# ----------------------------------------------------------------------------------------------------------- checksums


@torch.no_grad()
def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int | str]:
    """A checksum of 64 bits of each tensor, computed where it is: one changed bit always changes it, anything else,
    exchanged elements too, but for a chance of 2**-30 or less.

    Not ``torch.hash_tensor`` (2.13): that is the exclusive or of all elements, equal whatever their order.
    """
    devices = {tensor.device for tensor in tensors.values()}
    result: dict[str, int | str] = {}
    for device in devices:
        there = {name: _checksum(tensor) for name, tensor in tensors.items() if tensor.device == device}
        result.update(zip(there, torch.stack(list(there.values())).tolist(), strict=True))
    return result


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of all words times odd numbers that look random, modulo 2**64 (torch's integers wrap): 0-dim int64."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _weights(tensor.device)
    for chunk in _chunks(tensor):
        for words in chunk.view(_WORDS[tensor.element_size()]).split(_CHUNK):  # type: ignore[no-untyped-call]
            total.mul_(_FACTOR).add_(words.to(torch.int64).mul_(weights[: len(words)]).sum())
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """The same odd int64 numbers on every rank, by position (a mixer like that of splitmix64)."""
    numbers = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _FACTOR
    numbers ^= numbers >> 29
    numbers *= -4658895280553007687
    return (numbers ^ (numbers >> 32)) | 1


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in order, flat, ``_CHUNK`` at most; equal cuts whatever the strides are. Copies at most a chunk, or
    a row, of a tensor that is not contiguous.
    """
    rows = tensor.detach() if tensor.ndim else tensor.detach().unsqueeze(0)
    for part in rows.split(max(1, _CHUNK // max(1, rows[:1].numel()))):  # type: ignore[no-untyped-call]
        yield from part.contiguous().view(-1).split(_CHUNK)


def sha256_of(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes, in hex; copies a chunk at a time to the host."""
    digest = hashlib.sha256()
    for chunk in _chunks(tensor):
        content: Any = raw_bytes(chunk.cpu()).numpy()
        digest.update(content)
    return digest.hexdigest()


def digest_of(encoded: Encoded, level: Check) -> str:
    """Of a component's encoded state; at level quick only of its structure, dtypes and shapes."""
    document = _types(encoded.documents) if level == "quick" else encoded.documents
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name, tensor in sorted(encoded.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if level != "quick":
            digest.update(sha256_of(tensor).encode())
    return digest.hexdigest()


def _types(value: Any) -> Any:
    """An encoded document with the names of types for values; how values are encoded stays."""
    if isinstance(value, dict):
        return {key: item if key == TAG else _types(item) for key, item in value.items()}
    return [_types(item) for item in value] if isinstance(value, list) else type(value).__name__

"""Which rows of the model each rank of a worker sends and fetches, and how all that hold them get them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forgather_cli.checkpoint.components import LocalShard
from forgather_cli.checkpoint.format import Piece, plan
from forgather_cli.distributed import gather
from forgather_cli.errors import SetupError


@dataclass(frozen=True)
class Part:
    """Rows [start, start + rows) of a trainable parameter, sent and fetched by one rank for all that hold them."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    rows: int
    owner: int
    shared: bool
    """Other ranks hold some of these rows too."""

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Of these rows; a 0-dim parameter is one row of its own shape."""
        return (self.rows, *self.shape[1:]) if self.shape else ()


class Parts:
    """Every trainable parameter as parts, in one order on all ranks, so that ranks send about equal numbers of bytes.

    Tied parameters are there once. Making it is collective. Raises SetupError for parameters that are cut by columns.
    """

    def __init__(self, parameters: Mapping[str, Tensor], group: Any, rank: int) -> None:
        self._parameters, self._group, self._rank = parameters, group, rank
        shards = {name: LocalShard(parameter) for name, parameter in parameters.items()}
        if cut := [name for name, shard in shards.items() if shard.needs_exchange]:
            raise SetupError(f"callbacks.diloco: {cut[0]} is cut by columns among ranks; shard parameters by rows")
        self._held = {name: shard.piece(name) for name, shard in shards.items()}
        held: list[list[Piece]] = gather(list(self._held.values()), group)
        writes = plan(held, "model").writes
        found = []
        for owner, pieces in enumerate(writes):
            others = [other for at, theirs in enumerate(held) if at != owner for other in theirs]
            for piece in pieces:
                shared = any(_overlap(piece, other) for other in others)
                found.append(Part(piece.spec.name, piece.spec.shape, piece.start, piece.rows, owner, shared))
        self.all = sorted(found, key=lambda part: (part.name, part.start))
        self.own = [part for part in self.all if part.owner == rank]
        """What this rank sends and fetches."""

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and full shape of every trainable parameter of the model, on whichever rank."""
        return sorted({(part.name, part.shape) for part in self.all})

    def values(self, part: Part) -> Tensor:
        """A view of this rank's memory of its own ``part``."""
        memory = LocalShard(self._parameters[part.name]).memory
        begin = part.start - self._held[part.name].start
        return memory[begin : begin + part.rows] if part.shape else memory

    @torch.no_grad()
    def set(self, own: Mapping[Part, Tensor], names: Collection[str], share: float = 0.0) -> None:
        """Collective. Set the parameters ``names`` of all ranks to the values ``own`` (fp32, on the CPU) of each rank's
        parts, or to ``share`` of what they are and the rest of those.
        """
        for part in self.all:
            if part.name not in names:
                continue
            values = own[part] if part.owner == self._rank else None
            if part.shared:
                values = torch.empty(part.held_shape) if values is None else values
                dist.broadcast(values, src=part.owner, group=self._group)
            held = self._held.get(part.name)
            if values is None or held is None:
                continue
            memory = LocalShard(self._parameters[part.name]).memory
            if part.shape:
                start, stop = max(part.start, held.start), min(part.start + part.rows, held.start + held.rows)
                memory = memory[start - held.start : max(start, stop) - held.start]
                values = values[start - part.start : max(start, stop) - part.start]
            if share:
                values = memory.to("cpu", torch.float32).mul_(share).add_(values, alpha=1 - share)
            memory.copy_(values)


def _overlap(one: Piece, other: Piece) -> bool:
    same = one.spec.name == other.spec.name
    return same and max(one.start, other.start) < min(one.start + one.rows, other.start + other.rows)

"""One rank's share of a checkpoint: agreed on with the other ranks, and copied to host memory.

This is the only part of an asynchronous save that training waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forgather_cli.checkpoint.components import (
    Component,
    Holders,
    LocalShard,
    Sharing,
    encode_components,
    holders_of,
    state_files,
)
from forgather_cli.checkpoint.format import Piece, Plan, plan
from forgather_cli.checkpoint.replication import Check, ReplicationCheck, Sums, component_differences, digest_of, refuse
from forgather_cli.distributed import gather, joined
from forgather_cli.documents.encoding import Encoded
from forgather_cli.documents.messages import sent
from forgather_cli.errors import NotFiniteError, SetupError
from forgather_cli.shards import RowExchange, not_finite

Kinds = Mapping[str, Mapping[str, LocalShard]]
"""What a rank holds, by kind (``model/model``, ``optimizer/optimizer``: the stem of its files) and tensor name."""


@dataclass
class Snapshot:
    """What one rank writes. Read ``rows`` only after ``wait``."""

    plans: list[Plan]
    rows: list[dict[str, Tensor]]
    """By plan: the rows that the rank writes, in host memory, contiguous, by tensor name."""
    states: dict[str, Encoded]
    """By file stem."""
    components: list[Component]
    """As they are shared in this save: none is AUTO."""
    holders: Holders
    unchecked: list[str]
    """Names of tensors that may hold anything."""
    copies: list[Any] = field(default_factory=list)
    """CUDA events after the last copy of each device."""
    failure: str | None = None
    """Why the copy is not complete."""

    def wait(self) -> None:
        """Block this thread until the copies from the devices have arrived. Raises SetupError if one failed."""
        if self.failure is not None:
            raise SetupError(self.failure)
        for event in self.copies:
            event.synchronize()


@sent
@dataclass(frozen=True)
class _Holding:
    """What a rank tells the others that it holds: names, shapes, checksums; or why it cannot take part in a save."""

    pieces: list[list[Piece]] = field(default_factory=list)
    """By kind."""
    sums: list[Sums] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    """Of REPLICATED components, by key."""
    auto: dict[str, str] = field(default_factory=dict)
    """Digests of AUTO components, by key."""
    groups: dict[str, str] = field(default_factory=dict)
    """The rank's group in each PER_GROUP and PER_NODE component, by key."""
    not_finite: list[str] = field(default_factory=list)
    """Names of tensors."""
    unchecked: list[str] = field(default_factory=list)
    """Names of tensors that may hold anything."""
    failure: str | None = None


class Snapshots:
    """Takes a snapshot for each save. Between saves it keeps host memory, and what need not be compared again."""

    def __init__(self, *, group: Any, rank: int, world_size: int, check: Check, max_shard_bytes: int) -> None:
        self._group, self._rank = group, rank
        self._level: Check = check if world_size > 1 else "none"
        self._checks: dict[str, ReplicationCheck] = {}
        self._max_shard_bytes = max_shard_bytes
        self._buffers = HostBuffers()
        self._exchange = RowExchange([])

    def take(
        self, step: int, kinds: Kinds, components: Sequence[Component], *, failure: str | None, copy_host_tensors: bool
    ) -> Snapshot:
        """Collective. Agree on who writes what, compare what several ranks hold, and copy this rank's share.

        ``failure``: why this rank cannot take part. ``copy_host_tensors`` False: tensors in host memory are written
        from where they are, and the caller must not change them until they are on disk. Raises, on all ranks alike,
        SetupError where a rank has failed, CheckpointError where tensors do not fit together, ReplicationError where
        ranks differ in what must be equal, NotFiniteError.
        """
        encoded, own = self._encode_own(kinds, components, failure)
        holdings = gather(own, self._group)
        if failed := joined([other.failure for other in holdings]):
            raise SetupError(failed)
        if void := sorted({name for other in holdings for name in other.not_finite}):
            more = f" and {len(void) - 3} more" if len(void) > 3 else ""
            raise NotFiniteError(f"{', '.join(void[:3])}{more} hold values that are not finite")
        found: list[str] = []
        for n, stem in enumerate(kinds):
            pieces, sums = [other.pieces[n] for other in holdings], [other.sums[n] for other in holdings]
            found += self._checks[stem].differences(self._rank, pieces, sums)
        refuse([*found, *component_differences([other.digests for other in holdings])], step)
        kinds_of = Counter(key for key, _ in {digest for other in holdings for digest in other.auto.items()})
        auto = {key: Sharing.PER_RANK if count > 1 else Sharing.REPLICATED for key, count in kinds_of.items()}
        shared = [replace(c, sharing=auto.get(c.key, c.sharing)) for c in components]
        holders = holders_of([other.groups for other in holdings])
        states = state_files(encoded, shared, self._rank, holders)
        unchecked = sorted({name for other in holdings for name in other.unchecked})
        snapshot = Snapshot([], [], states, shared, holders, unchecked)
        held = {stem: [other.pieces[n] for other in holdings] for n, stem in enumerate(kinds)}
        snapshot.plans = [plan(held[stem], stem, self._max_shard_bytes) for stem in kinds if any(held[stem])]
        self._copy(snapshot, kinds, copy_host_tensors)
        return snapshot

    def free(self) -> None:
        """Give the host memory back; a writer that still reads it keeps it alive."""
        self._buffers.clear()

    def _encode_own(
        self, kinds: Kinds, components: Sequence[Component], failure: str | None
    ) -> tuple[dict[str, Encoded], _Holding]:
        """This rank's components, encoded, and its _Holding, where a failure is a message for the other ranks."""
        try:
            if failure is not None:
                raise SetupError(failure)
            encoded = encode_components(components, self._rank, compared=self._level != "none")
            pieces = [[shard.piece(name) for name, shard in shards.items()] for shards in kinds.values()]
            checks = [self._checks.setdefault(stem, ReplicationCheck(self._level)) for stem in kinds]
            sums = [c.sums(shards, p) for c, shards, p in zip(checks, kinds.values(), pieces, strict=True)]
            every = {name: shard for shards in kinds.values() for name, shard in shards.items()}
            void = not_finite({name: shard.tensor for name, shard in every.items() if shard.must_be_finite})
            free = [name for name, shard in every.items() if not shard.must_be_finite]
            # allocate now, while a failure can still be reported: a rank that raises later leaves the others waiting
            self._exchange = exchange_of([shard for shards in kinds.values() for shard in shards.values()])
        except SetupError as error:
            return {}, _Holding(failure=str(error))
        except (RuntimeError, MemoryError) as error:  # host memory, or a device that failed
            return {}, _Holding(failure=f"{type(error).__name__}: {error}")
        compared = [c.key for c in components if c.sharing is Sharing.REPLICATED and self._level != "none"]
        digests = {key: digest_of(encoded[key], self._level) for key in compared}
        level: Check = "quick" if self._group is None else "full"  # alone nothing is compared
        auto = {c.key: digest_of(encoded[c.key], level) for c in components if c.sharing is Sharing.AUTO}
        groups = {c.key: c.group for c in components if c.sharing.is_grouped}
        return encoded, _Holding(pieces, sums, digests, auto, groups, void, free)

    def _copy(self, snapshot: Snapshot, kinds: Kinds, copy_host_tensors: bool) -> None:
        """Collective. Copy the rows that this rank writes. A failure is reported by ``Snapshot.wait``, in the writer:
        until then this rank takes part in every exchange.
        """
        for files in snapshot.plans:
            shards = kinds[files.stem]
            snapshot.rows.append({})
            for name, rows in parts_to_write(files, self._rank, shards, self._exchange):
                must_copy = copy_host_tensors or shards[name].needs_exchange
                try:
                    if snapshot.failure is None:
                        snapshot.rows[-1][name] = self._buffers.copy((files.stem, name), rows, must_copy=must_copy)
                except (RuntimeError, MemoryError) as error:  # host memory, or a device that failed
                    snapshot.failure = f"the copy to host memory failed ({type(error).__name__}: {error})"
        memory = [shard.memory for shards in kinds.values() for shard in shards.values()]
        for device in {tensor.device for tensor in memory if tensor.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            snapshot.copies.append(event)
        self._exchange = RowExchange([])


def parts_to_write(
    plan: Plan, rank: int, shards: Mapping[str, LocalShard], exchange: RowExchange
) -> Iterator[tuple[str, Tensor]]:
    """Collective where ``shards`` need an exchange, as is each step of it. By name the rows that ``rank`` writes, where
    they are; those that came by an exchange last until the next step.
    """
    written = {piece.spec.name: piece for piece in plan.writes[rank]}
    for name, shard in sorted(shards.items()):  # in one order on all ranks
        rows = exchange.rows(shard.tensor) if shard.needs_exchange else shard.memory
        if name in written:
            begin = written[name].start - shard.piece(name).start
            yield name, rows[begin : begin + written[name].rows] if rows.ndim else rows


class HostBuffers:
    """Host memory that one save after the other is copied into; pinned for CUDA tensors.

    Kept between saves because allocating it costs more than the copy: page faults on CPU, registration on CUDA.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, key: tuple[str, str], tensor: Tensor, *, must_copy: bool) -> Tensor:
        """A contiguous copy of ``tensor`` in the host memory kept for ``key``. ``must_copy`` False: ``tensor`` itself,
        if it is contiguous and in host memory.

        From a CUDA device the copy is asynchronous: later work on the device's current stream cannot overtake it, but
        the host must wait for the stream before it reads.
        """
        if not must_copy and tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=buffer.is_pinned())

    def clear(self) -> None:
        self._buffers = {}


def exchange_of(shards: Iterable[LocalShard]) -> RowExchange:
    """What ``parts_to_write`` needs for these."""
    return RowExchange([shard.tensor for shard in shards if shard.needs_exchange])

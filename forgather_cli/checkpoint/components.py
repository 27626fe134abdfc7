"""What a checkpoint is made of besides weights and moments, and how it is shared among ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from forgather_cli.checkpoint.format import Piece
from forgather_cli.checkpoint.tensors import spec_of
from forgather_cli.documents.encoding import Encoded, Stateful
from forgather_cli.errors import SetupError
from forgather_cli.shards import box_of, is_sharded, local, needs_exchange, rows_of


class Sharing(Enum):
    """How a component's state differs between ranks, hence who stores it."""

    GLOBAL = "global"
    """Rank 0 alone has it and stores it."""
    REPLICATED = "replicated"
    """Equal on all ranks; rank 0 stores it."""
    AUTO = "auto"
    """REPLICATED in a save that finds the same on all ranks, else PER_RANK: manifests have one of the two."""
    PER_RANK = "per_rank"
    """Each rank stores its own."""
    PER_GROUP = "per_group"
    """Equal within a group of ranks; one rank of each stores it, and any rank finds its group's."""
    PER_NODE = "per_node"
    """Equal on one node; one rank of each stores it, and any rank finds its node's."""

    @property
    def is_shared(self) -> bool:
        """True if one state serves all ranks."""
        return self in (Sharing.GLOBAL, Sharing.REPLICATED)

    @property
    def is_grouped(self) -> bool:
        """True if one state serves a group of ranks, or a node."""
        return self in (Sharing.PER_GROUP, Sharing.PER_NODE)


@dataclass(frozen=True)
class Component:
    """An object whose state belongs into checkpoints under ``key``. ``required``: no resume without it.

    ``group_id``: this rank's group, for PER_GROUP; the same in a later run for the group that goes on with its state.
    """

    key: str
    object: Stateful
    sharing: Sharing
    required: bool = False
    group_id: str | int | None = None

    @property
    def group(self) -> str:
        """The group, or node, whose state this rank shares, as manifests name it."""
        given = node_index() if self.group_id is None and self.sharing is Sharing.PER_NODE else self.group_id
        assert given is not None, f"{self.key}: PER_GROUP needs a group_id"
        return str(given)

    def state(self) -> Any:
        """The object's state. Raises SetupError, naming the component, from what its ``state_dict`` raised."""
        try:
            return self.object.state_dict()
        except Exception as error:  # a user's callback may raise anything
            raise SetupError(f"{self.key}: its state_dict() failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class LocalShard:
    """What this rank holds of a tensor, on any device. A DTensor says so itself; any other is rows [start, start +
    len(tensor)) of a full tensor of ``shape`` (None: it is the full one). A 0-dim tensor counts as one row.
    """

    tensor: Tensor
    start: int = 0
    shape: tuple[int, ...] | None = None
    must_be_finite: bool = True

    @property
    def memory(self) -> Tensor:
        return local(self.tensor).detach()

    @property
    def needs_exchange(self) -> bool:
        """Whether ranks must send each other columns before any of them has whole rows to write."""
        return needs_exchange(self.tensor)

    def piece(self, name: str) -> Piece:
        """Which rows of the tensor are for this rank to write. Raises CheckpointError for a dtype that cannot be
        stored, SetupError for a DTensor that is not one box on each rank.
        """
        if is_sharded(self.tensor):
            (start, stop), box = rows_of(self.tensor), box_of(self.tensor)
            held = (box.offsets, box.sizes) if self.needs_exchange else None
            return Piece(spec_of(name, self.tensor.dtype, tuple(self.tensor.shape)), start, stop - start, held)
        here = tuple(self.tensor.shape)
        full = here if self.shape is None else tuple(self.shape)
        rows = here[0] if here else 1
        assert (len(here), here[1:]) == (len(full), full[1:]), f"{name}: rows {here} of {full}"
        assert self.start + rows <= (full[0] if full else 1), f"{name}: {rows} rows from {self.start} of {full}"
        return Piece(spec_of(name, self.tensor.dtype, full), self.start, rows)


def total_bytes(shards: Mapping[str, LocalShard]) -> int:
    """Bytes of the full tensors, over all ranks."""
    return sum(shard.piece(name).spec.num_bytes for name, shard in shards.items())


def shared_file() -> str:
    """Stem of the files with the components that one state serves."""
    return "state"


def rank_file(rank: int) -> str:
    """Stem of the files with a rank's own components."""
    return f"state-rank-{rank:05d}"


class ToCompare:
    """State that is saved as a component but not restored as one: optimizer groups, the identity to compare, a
    DiLoCo server's round.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never restored as a whole")


def node_index() -> int:
    """Which of the job's nodes this process is on, by what torchrun, Slurm or another launcher says; 0 without."""
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if name in os.environ:
            return int(os.environ[name])
    return int(os.environ.get("RANK", "0")) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def encode_components(components: Iterable[Component], rank: int, *, compared: bool = False) -> dict[str, Encoded]:
    """The components' present state by key, of those that ``rank`` may have to store; tensors are copied to host
    memory. ``compared``: of REPLICATED ones on every rank.

    Raises SetupError with the path of a value that cannot be stored.
    """
    encoded: dict[str, Encoded] = {}
    for component in components:
        if rank != 0 and component.sharing.is_shared and not (compared and component.sharing is Sharing.REPLICATED):
            continue
        encoded[component.key] = Encoded()
        encoded[component.key].add(component.key, component.state())
    return encoded


Holders = Mapping[str, Mapping[str, int]]
"""Component key -> group -> the rank whose file has the group's state."""


def holders_of(groups: Sequence[Mapping[str, str]]) -> dict[str, dict[str, int]]:
    """The lowest rank of each group, from the groups that each rank is in, by component key."""
    holders: dict[str, dict[str, int]] = {}
    for rank, found in enumerate(groups):
        for key, group in found.items():
            holders.setdefault(key, {}).setdefault(group, rank)
    return holders


def state_files(
    encoded: Mapping[str, Encoded], components: Iterable[Component], rank: int, holders: Holders
) -> dict[str, Encoded]:
    """What ``rank`` stores of encoded components, by file stem."""
    files: dict[str, Encoded] = {}
    for component in components:
        shared, key = component.sharing.is_shared, component.key
        if (shared and rank != 0) or (component.sharing.is_grouped and holders[key][component.group] != rank):
            continue
        file = files.setdefault(shared_file() if shared else rank_file(rank), Encoded())
        file.documents |= encoded[key].documents
        file.tensors |= encoded[key].tensors
    return files

"""What a checkpoint is made of besides weights and moments, and how it is shared among ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from forgather_cli.checkpoint.encoding import Encoded
from forgather_cli.checkpoint.layout import Piece
from forgather_cli.checkpoint.tensors import spec_of
from forgather_cli.errors import SetupError


class Sharing(Enum):
    """How a component's state differs between ranks, hence who stores it."""

    GLOBAL = "global"
    """Rank 0 alone has it and stores it."""
    REPLICATED = "replicated"
    """Equal on all ranks; rank 0 stores it."""
    PER_RANK = "per_rank"
    """Each rank stores its own."""
    PER_GROUP = "per_group"
    """Equal within a group of ranks; each rank stores it, so that any rank finds its group's."""
    PER_NODE = "per_node"
    """Equal on one node; each rank stores it, so that any rank finds its node's."""

    @property
    def is_shared(self) -> bool:
        """True if one state serves all ranks."""
        return self in (Sharing.GLOBAL, Sharing.REPLICATED)


class Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class Component:
    """An object whose state belongs into checkpoints under ``key``. ``required``: no resume without it."""

    key: str
    object: Stateful
    sharing: Sharing
    required: bool = False

    def state(self) -> Any:
        """The object's state. Raises SetupError, naming the component, from what its ``state_dict`` raised."""
        try:
            return self.object.state_dict()
        except Exception as error:  # a user's callback may raise anything
            raise SetupError(f"{self.key}: its state_dict() failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Rows:
    """Rows [start, start + len(tensor)) of a full tensor of ``shape``, as this rank holds them, on any device.

    ``shape`` None: the tensor is the full one. A 0-dim tensor counts as one row.
    """

    tensor: Tensor
    start: int = 0
    shape: tuple[int, ...] | None = None

    def piece(self, name: str) -> Piece:
        """Where these rows belong. Raises CheckpointError for a dtype that cannot be stored."""
        local = tuple(self.tensor.shape)
        full = local if self.shape is None else tuple(self.shape)
        rows = local[0] if local else 1
        assert (len(local), local[1:]) == (len(full), full[1:]), f"{name}: rows {local} of {full}"
        assert self.start + rows <= (full[0] if full else 1), f"{name}: {rows} rows from {self.start} of {full}"
        return Piece(spec_of(name, self.tensor.dtype, full), self.start, rows)


def total_bytes(rows: Mapping[str, Rows]) -> int:
    """Bytes of the full tensors, over all ranks."""
    return sum(row.piece(name).spec.num_bytes for name, row in rows.items())


def shared_file() -> str:
    """Stem of the files with the components that one state serves."""
    return "state"


def rank_file(rank: int) -> str:
    """Stem of the files with a rank's own components."""
    return f"state-rank-{rank:05d}"


def encode_components(components: Iterable[Component], rank: int) -> dict[str, Encoded]:
    """What ``rank`` stores of the components' present state, by file stem; tensors are copied to host memory.

    Raises SetupError with the path of a value that cannot be stored.
    """
    files: dict[str, Encoded] = {}
    for component in components:
        if component.sharing.is_shared and rank != 0:
            continue
        stem = shared_file() if component.sharing.is_shared else rank_file(rank)
        files.setdefault(stem, Encoded()).add(component.key, component.state())
    return files

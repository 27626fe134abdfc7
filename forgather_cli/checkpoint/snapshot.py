"""One rank's share of a checkpoint, copied to host memory: all that training waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forgather_cli.checkpoint.components import Rows
from forgather_cli.checkpoint.encoding import Encoded
from forgather_cli.checkpoint.layout import Plan
from forgather_cli.checkpoint.tensors import host_copy
from forgather_cli.errors import SetupError


@dataclass
class Snapshot:
    """What one rank writes. Read ``rows`` only after ``wait``."""

    plans: list[Plan]
    rows: list[dict[str, Tensor]]
    """By plan: the rank's rows in host memory, contiguous, by tensor name."""
    states: dict[str, Encoded]
    """By file stem."""
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


class HostBuffers:
    """Host memory that one save after the other is copied into; pinned for CUDA tensors.

    Kept between saves because allocating it costs more than the copy: page faults on CPU, registration on CUDA.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, plan: Plan, rank: int, rows: Mapping[str, Rows], *, share: bool) -> dict[str, Tensor]:
        """The rows that ``rank`` writes, in host memory. ``share``: host tensors are not copied where they can be
        written as they are; the caller leaves them alone until they are on disk.
        """
        names = [piece.spec.name for piece in plan.writes[rank]]
        return {name: self._one((plan.stem, name), rows[name].tensor.detach(), share) for name in names}

    def _one(self, key: tuple[str, str], tensor: Tensor, share: bool) -> Tensor:
        if share and tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        return host_copy(tensor, buffer)

    def clear(self) -> None:
        self._buffers = {}


def copy_events(rows: list[Mapping[str, Rows]]) -> list[Any]:
    """Events that come after everything the devices of ``rows`` have been given to do so far."""
    devices = {row.tensor.device for kind in rows for row in kind.values() if row.tensor.is_cuda}
    events = []
    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events

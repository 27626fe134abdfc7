"""The arithmetic of a round, one tensor at a time and in slot order: the same bits at each restart, on every machine.

Elementwise operations in fp32 only, whose results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forgather_cli.checkpoint.files import remove, sibling, sync_directory
from forgather_cli.checkpoint.format import plan
from forgather_cli.checkpoint.tensors import Named, TensorReader, whole, write_share
from forgather_cli.config.schema import OuterSettings
from forgather_cli.diloco.encoding import Compression, decode, encode
from forgather_cli.diloco.rounds import Closed
from forgather_cli.diloco.submissions import Submissions
from forgather_cli.optim.eager import unguard_step, unguarded_construction


@torch.no_grad()
def outer_step(
    master: Mapping[str, Tensor],
    momentum: dict[str, Tensor],
    closed: Closed,
    submissions: Submissions,
    outer: OuterSettings,
) -> float:
    """Update master weights and momentum in place by the submissions of a round; returns the norm of their mean change.

    A change is snapshot - local, so it takes the place of a gradient. Without submissions nothing changes.
    """
    if not closed.submissions:
        return 0.0
    squares = 0.0
    for name in sorted(master):
        gradient = torch.zeros(master[name].shape)
        for sent, weight in closed.submissions:
            gradient += submissions.delta(sent.parts, name).mul_(weight)
        squares += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        weights = master[name].detach()
        weights.grad = gradient
        nesterov = outer.nesterov and outer.momentum > 0
        with unguarded_construction():
            sgd = torch.optim.SGD([weights], outer.lr, outer.momentum, nesterov=nesterov, foreach=False)
        unguard_step(sgd)
        if name in momentum:
            sgd.state[weights]["momentum_buffer"] = momentum[name]
        sgd.step()
        if outer.momentum:
            momentum[name] = sgd.state[weights]["momentum_buffer"]
    return math.sqrt(squares)


@dataclass(frozen=True)
class Published:
    """The directory ``RUN/weights``: what workers fetch, of the newest two rounds, each file whole or not there."""

    root: Path

    def weights(self, round: int) -> Path:
        """fp32, all trainable tensors, by name: what the round starts from."""
        return self.root / f"round-{round:08d}.safetensors"

    def changes(self, round: int) -> Path:
        """From the round before to this one, as ``compression_down`` sends it."""
        return self.root / f"changes-{round:08d}.safetensors"

    def publish(self, round: int, master: Mapping[str, Tensor], compression: Compression) -> None:
        """Write what a round starts from. Of a compressed change, what is lost comes with the next one: workers hold
        the sum of the changes, the server the master weights. Raises OSError.
        """
        self.root.mkdir(exist_ok=True)
        if compression == "fp32" or round == 0:
            self.write(self.weights(round), {name: tensor.detach() for name, tensor in master.items()})
            return
        before = TensorReader(self.weights(round - 1))
        sent: dict[str, Tensor] = {}
        for name in sorted(master):
            sent |= encode(name, master[name].detach() - before.read(name), compression)
        self.write(self.changes(round), sent)
        self.write(self.weights(round), _Changed(before, self.changes(round), compression), like=master)

    def write(self, path: Path, tensors: Named, like: Mapping[str, Tensor] | None = None) -> None:
        """Write tensors, each asked for in its turn, as the file at ``path``. ``like``: their shapes, if not theirs."""
        shapes = tensors if like is None else like
        assert isinstance(shapes, Mapping)
        temporary = sibling(path, "tmp")
        pieces = [whole(name, tensor.detach()) for name, tensor in shapes.items()]
        try:
            write_share(self.root, plan([pieces], temporary.name, max_bytes=1 << 62), 0, tensors)
            temporary.with_name(f"{temporary.name}.safetensors").replace(path)
        finally:
            remove(temporary.with_name(f"{temporary.name}.safetensors"))
        sync_directory(self.root)

    def forget(self, newest: int, *, first: bool) -> None:
        """Delete all but the newest two rounds, and what killed processes have left. ``first``: keep round 0."""
        kept = {path for round in (newest, newest - 1) for path in (self.weights(round), self.changes(round))}
        if first:
            kept.add(self.weights(0))
        for path in list(self.root.iterdir()):
            if path not in kept:
                path.unlink()


class _Changed:
    """The published weights after a change, by name."""

    def __init__(self, before: TensorReader, changes: Path, compression: Compression) -> None:
        self._before, self._changes, self._compression = before, TensorReader(changes), compression

    def __getitem__(self, name: str) -> Tensor:
        shape = self._before.specs[name].shape
        keys = [key for key in (name, f"{name}:scale") if key in self._changes.specs]
        change = decode(name, {key: self._changes.read(key) for key in keys}, shape, self._compression)
        return self._before.read(name) + change


def header_of(path: Path) -> bytes:
    """The first bytes of a safetensors file: the length of its header, and the header."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))

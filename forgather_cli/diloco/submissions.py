"""What workers have sent, on disk: parts named by their content, and a manifest for each slot and round.

A part is a safetensors file with rows of some tensors as ``encoding.encode`` makes them; its metadata ``rows`` says
which: ``{name: [first row, rows]}``. The parts of a submission hold each row of each tensor once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from forgather_cli.checkpoint.files import replace_file, sibling
from forgather_cli.checkpoint.tensors import TensorReader, dtype_of
from forgather_cli.diloco.encoding import Compression, decode, encode, num_bytes
from forgather_cli.diloco.fragments import Shapes
from forgather_cli.diloco.ledger import Submission
from forgather_cli.diloco.wire import MAX_PART_HEADER
from forgather_cli.errors import CheckpointError
from forgather_cli.input_files import open_file, parse_json, read_json_object

_VALUES = 1 << 17
"""Of a tensor in memory at once."""


class Submissions:
    """The directory ``RUN/submissions``."""

    def __init__(self, root: Path, shapes: Shapes, compression: Compression) -> None:
        self.root, self._shapes, self._compression = root, shapes, compression
        self.most_bytes = sum(num_bytes(shape, "fp32") for shape in shapes.values()) + MAX_PART_HEADER
        """Of one part."""
        (root / "parts").mkdir(parents=True, exist_ok=True)

    def part(self, sha256: str) -> Path:
        """Where a part is, or will be."""
        return self.root / "parts" / f"{sha256}.safetensors"

    def has(self, sha256: str) -> bool:
        """Whether a part is there; it is wanted still then, and stays for a while."""
        try:
            os.utime(self.part(sha256))
        except FileNotFoundError:
            return False
        return True

    def write(self, submission: Submission) -> None:
        """Write and sync the manifest of a submission, whose parts are there. Raises OSError."""
        path = self.root / f"round-{submission.round:08d}-slot-{submission.slot:04d}.json"
        replace_file(path, json.dumps(asdict(submission)).encode(), sibling(path, "tmp"))

    def sent(self, round: int, slot: int) -> Submission | None:
        """What a slot has sent for a round. Raises SetupError for a manifest that cannot be read."""
        path = self.root / f"round-{round:08d}-slot-{slot:04d}.json"
        return Submission.from_document(read_json_object(path)) if path.exists() else None

    def clean(self, before: int, older_than: float, *, keep: bool) -> None:
        """Delete manifests of rounds below ``before`` unless ``keep``, and parts that no manifest names, of those that
        were last asked for before ``older_than`` (seconds since the epoch).
        """
        named = set()
        for path in list(self.root.glob("round-*-slot-*.json")):
            if not keep and int(path.name.split("-")[1]) < before:
                path.unlink()
            else:
                named |= set(read_json_object(path)["parts"])
        for path in list((self.root / "parts").iterdir()):  # of uploads that were cut too
            if path.stem not in named and path.stat().st_mtime < older_than:
                path.unlink()

    # ---------------------------------------------------------------------------------------------------- their content

    def problem(self, parts: Sequence[str], names: Collection[str]) -> str:
        """Why these parts are no submission of the parameters ``names``: reads all of them. Empty if they are one."""
        try:
            opened = [_Part(self.part(sha256)) for sha256 in parts]
            if unknown := sorted({name for part in opened for name in part.rows} - set(names)):
                return f"it has {unknown[0]}, which is not of this exchange"
            for name in names:
                at = 0
                for first, rows, values in self._pieces(opened, name):
                    if first != at:
                        return f"{name}: rows {first} to {first + rows} come twice or are not the next ones"
                    at += rows
                    if not torch.isfinite(values).all():
                        return f"{name} is not finite"
                wanted = self._shapes[name][0] if self._shapes[name] else 1
                if at != wanted:
                    return f"{name}: has {at} of {wanted} rows"
        except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"a part cannot be read: {error}"
        return ""

    def add_to(self, change: Tensor, parts: Sequence[str], name: str, weight: float) -> None:
        """Add to ``change``, fp32 of full shape, ``weight`` times what a submission that was found good says."""
        for first, rows, values in self._pieces([_Part(self.part(sha256)) for sha256 in parts], name):
            (change[first : first + rows] if change.ndim else change).add_(values.mul_(weight))

    def _pieces(self, parts: Sequence[_Part], name: str) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, rows, fp32 values) of a tensor, in the order of the rows and few at a time, so that little is in
        memory. Raises ValueError for a wrong shape.
        """
        shape = self._shapes[name]
        most = max(1, _VALUES // max(1, math.prod(shape[1:]))) if shape else 1  # rows at a time
        for part in sorted((part for part in parts if name in part.rows), key=lambda part: part.rows[name][0]):
            first, rows = part.rows[name]
            piece = (rows, *shape[1:]) if shape else ()
            wanted = encode(name, torch.empty(piece, device="meta"), self._compression)
            specs = {key: part.tensors.specs[key] for key in wanted}
            for key, like in wanted.items():
                got = (dtype_of(specs[key]), specs[key].shape)
                if got != (like.dtype, tuple(like.shape)):
                    raise ValueError(f"{key} must be {like.dtype} {list(like.shape)}, got {got[0]} {list(got[1])}")
            for start in range(0, rows, most):
                stop = min(start + most, rows)
                sent = {key: part.tensors.read(key, start, stop) for key in wanted}
                chunk = (stop - start, *shape[1:]) if shape else ()
                yield first + start, stop - start, decode(name, sent, chunk, self._compression)


class _Part:
    """A part, open for reading. Raises CheckpointError or ValueError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.tensors = TensorReader(path)
        with open_file(path) as file:
            header = parse_json(file.read(int.from_bytes(file.read(8), "little")))
        listed = parse_json(header["__metadata__"]["rows"])
        self.rows = {str(name): (int(first), int(rows)) for name, (first, rows) in listed.items()}

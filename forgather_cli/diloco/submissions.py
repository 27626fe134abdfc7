"""What workers have sent, on disk: parts named by their content, and a manifest for each slot and round.

A part is a safetensors file with rows of some tensors as ``encoding.encode`` makes them; its metadata ``rows`` says
which: ``{name: [first row, rows]}``. The parts of a submission hold each row of each tensor once.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from forgather_cli.checkpoint.files import replace_file, sibling
from forgather_cli.checkpoint.tensors import TensorReader, dtype_of
from forgather_cli.diloco.encoding import Compression, decode, encode, num_bytes
from forgather_cli.diloco.fragments import Shapes
from forgather_cli.diloco.ledger import Submission
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import open_file, read_json_object, read_state
from forgather_cli.errors import SetupError

_HEADER = 512
"""Bytes that a tensor takes in the headers of its parts."""
_VALUES = 1 << 17
"""Of a tensor that are worked on at a time."""


class Submissions:
    """The directory ``RUN/submissions``."""

    def __init__(self, root: Path, shapes: Shapes, compression: Compression) -> None:
        self.root, self._shapes, self._compression = root, shapes, compression
        self.most_bytes = 2 * sum(num_bytes(shape, compression) + _HEADER for shape in shapes.values())
        """That a worker's parts may take as long as no manifest names them: twice its change."""
        self.unnamed: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """By worker (empty: of nobody knows whom), their bytes by SHA-256, or by temporary name while they come."""
        (root / "parts").mkdir(parents=True, exist_ok=True)
        self._kept: Counter[str] = Counter()
        self._lock = threading.Lock()  # ``clean`` has a thread of its own

    def part(self, sha256: str) -> Path:
        """Where a part is, or will be."""
        return self.root / "parts" / f"{sha256}.safetensors"

    def has(self, sha256: str) -> bool:
        """Whether a part is there; it is wanted still then, and stays for a while."""
        with suppress(FileNotFoundError):
            os.utime(self.part(sha256))
            return True
        return False

    @contextmanager
    def keeping(self, parts: Sequence[str]) -> Iterator[None]:
        """Inside, ``clean`` leaves these parts alone, which no manifest names yet."""
        with self._lock:
            self._kept.update(parts)
        try:
            yield
        finally:
            for part in parts:
                self.has(part)  # for one that has read the manifests before
            with self._lock:
                self._kept -= Counter(parts)

    def write(self, submission: Submission) -> None:
        """Write and sync the manifest of a submission, whose parts are there. Raises OSError."""
        path = self.root / f"round-{submission.round:08d}-slot-{submission.slot:04d}.json"
        replace_file(path, json.dumps(asdict(submission)).encode(), sibling(path, "tmp"))
        for held in self.unnamed.values():
            for part in submission.parts:
                held.pop(part, None)

    def sent(self, round: int, slot: int) -> Submission | None:
        """What a slot has sent for a round; a manifest that cannot be read is set aside, and its worker sends again."""
        path = self.root / f"round-{round:08d}-slot-{slot:04d}.json"
        known = read_state(path, "its worker sends it again")
        return None if known is None else Submission.from_document(known)

    def forget(self, worker: str) -> None:
        """Delete the parts of a worker that no manifest names."""
        with self._lock:
            for part in self.unnamed.pop(worker, ()):
                if not self._kept[part]:
                    self.part(part).unlink(missing_ok=True)

    def drop(self, after: int) -> None:
        """Delete manifests of later rounds than ``after``, which are gone."""
        for path in list(self.root.glob("round-*-slot-*.json")):
            if int(path.name.split("-")[1]) > after:
                path.unlink()

    def clean(self, before: int, older_than: float, *, keep: bool) -> None:
        """Delete manifests of rounds below ``before`` unless ``keep``, and parts that no manifest names, of those that
        were last asked for before ``older_than`` (seconds since the epoch).
        """
        named = set()

        def lost(why: str) -> SetupError:
            return SetupError(f"{why}; restore it, or remove it, and a later save deletes the parts that it names")

        for path in list(self.root.glob("round-*-slot-*.json")):
            if not keep and int(path.name.split("-")[1]) < before:
                path.unlink()
            else:
                named |= set(read_json_object(path, lost)["parts"])
        for path in list((self.root / "parts").iterdir()):  # of uploads that were cut too
            with self._lock, suppress(FileNotFoundError):  # an upload that comes to its end now
                if path.stem not in named and not self._kept[path.stem] and path.stat().st_mtime < older_than:
                    path.unlink()

    # ---------------------------------------------------------------------------------------------------- their content

    def open(self, parts: Sequence[str]) -> Sent:
        """What these parts hold. Raises CheckpointError, OSError or what parsing raises for files that are none."""
        return Sent([_Part(self.part(sha256)) for sha256 in parts], self._shapes, self._compression)


class Sent:
    """Changes of parameters as a worker has sent them, in one part or several."""

    def __init__(self, parts: Sequence[_Part], shapes: Shapes, compression: Compression) -> None:
        self._parts, self._shapes, self._compression = parts, shapes, compression

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a parameter, fp32; a 0-dim one is a row of one number."""
        pieces = []
        for part in self._of(name):
            first, count = part.rows[name]
            own = max(start, first), min(stop, first + count)
            if own[0] < own[1]:
                keys = [key for key in (name, f"{name}:scale") if key in part.tensors.specs]
                sent = {key: part.tensors.read(key, own[0] - first, own[1] - first) for key in keys}
                pieces.append(decode(name, sent, (own[1] - own[0], *self._shapes[name][1:]), self._compression))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def norms(self, fragments: Sequence[Collection[str]]) -> tuple[float, ...]:
        """Of the change, of each fragment. Raises ValueError where it is not finite, or has not each row of their
        parameters once.
        """
        if unknown := sorted({name for part in self._parts for name in part.rows} - set().union(*fragments)):
            raise ValueError(f"it has {unknown[0]}, which is not of this exchange")
        return tuple(self._norm(names) for names in fragments)

    def _norm(self, names: Collection[str]) -> float:
        squares = 0.0
        for name in names:
            at, shape = 0, self._shapes[name]
            rows = shape[0] if shape else 1
            for part in self._of(name):
                first, count = part.rows[name]
                if first != at or first + count > rows:
                    raise ValueError(f"{name}: rows {first} to {first + count} of {rows} are not the next ones")
                at += count
                like = torch.empty((count, *shape[1:]) if shape else (), device="meta")
                for key, wanted in encode(name, like, self._compression).items():
                    spec = part.tensors.specs[key]
                    if (dtype_of(spec), spec.shape) != (wanted.dtype, tuple(wanted.shape)):
                        right, wrong = (wanted.dtype, list(wanted.shape)), (dtype_of(spec), list(spec.shape))
                        raise ValueError(f"{key} must be {right[0]} {right[1]}, got {wrong[0]} {wrong[1]}")
            if at != rows:
                raise ValueError(f"{name}: has {at} of {rows} rows")
            square = sum(square_of(self.rows(name, *chunk)) for chunk in chunks(shape))
            if not math.isfinite(square):
                raise ValueError(f"{name} is not finite; look for samples that make the loss void")
            squares += square
        return math.sqrt(squares)

    def _of(self, name: str) -> list[_Part]:
        """The parts that hold rows of a parameter, in the order of these."""
        return sorted((part for part in self._parts if name in part.rows), key=lambda part: part.rows[name][0])


class _Part:
    """A part, open for reading. Raises CheckpointError or ValueError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.tensors = TensorReader(path)
        with open_file(path) as file:
            header = parse_json(file.read(int.from_bytes(file.read(8), "little")))
        listed = parse_json(header["__metadata__"]["rows"])
        self.rows = {name: (first, rows) for name, (first, rows) in listed.items()}
        if not all(type(number) is int and number >= 0 for rows in self.rows.values() for number in rows):
            raise ValueError("its rows must be whole numbers from 0 on")


def square_of(values: Tensor) -> float:
    """The square of the norm of fp32 values, in float64: finite where all of them are."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def chunks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) that are worked on at a time, so that little of a tensor is in memory twice."""
    rows, most = shape[0] if shape else 1, max(1, _VALUES // max(1, math.prod(shape[1:])))
    return ((start, min(start + most, rows)) for start in range(0, rows, most))

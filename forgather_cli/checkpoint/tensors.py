"""Tensors as bytes of safetensors files: dtypes, host memory, writing and reading.

Written here rather than with ``safetensors.torch.save_file`` because that takes whole tensors, holds a second copy of
the bytes, and can neither hash what it writes nor write one rank's rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forgather_cli.checkpoint.files import Pieces, Range, at_once, write_file, write_ranges
from forgather_cli.checkpoint.format import MAX_SHARD_BYTES, Piece, Plan, TensorSpec, plan, read_header
from forgather_cli.documents.encoding import DTYPES, raw_bytes
from forgather_cli.documents.regular_files import open_file, read_weight_map
from forgather_cli.errors import CheckpointError
from forgather_cli.terminal.bars import Bar

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def spec_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
    """The spec of a full tensor. Raises CheckpointError for a dtype that safetensors lacks."""
    if dtype not in DTYPES:
        raise CheckpointError(f"{name}: cannot store {dtype} in a safetensors file; use one of {', '.join(_BY_NAME)}")
    return TensorSpec(name, DTYPES[dtype], tuple(shape))


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Torch's dtype of a tensor in a safetensors file."""
    return _BY_NAME[spec.dtype]


class Named(Protocol):
    """Tensors by name: a dictionary, or what makes each when it is asked for."""

    def __getitem__(self, name: str, /) -> Tensor: ...


def write_share(directory: Path, plan: Plan, rank: int, rows: Named) -> dict[str, list[Range]]:
    """``share_in_pieces`` at once."""
    return at_once(share_in_pieces(directory, plan, rank, rows))


def share_in_pieces(directory: Path, plan: Plan, rank: int, rows: Named) -> Pieces[dict[str, list[Range]]]:
    """Write what ``rank`` has to write of a plan's files into ``directory`` and sync it.

    ``rows``: by tensor name the rows that the plan has this rank write, in host memory, contiguous; each is asked for
    when it is its turn, in the order of the files. Returns the ranges by file path.
    """
    report = {}
    for file in plan.files:
        parts = plan.parts(file, rank)
        if parts:
            path = directory / file.path
            path.parent.mkdir(exist_ok=True)  # not its parents: where the save was given up, ``directory`` is gone
            contents = ((at, _content(file.header, piece, rows)) for at, piece in parts)
            report[file.path] = yield from write_ranges(path, contents)
    return report


def _content(header: bytes, piece: Piece | None, rows: Named) -> Any:
    return header if piece is None else raw_bytes(rows[piece.spec.name]).numpy()


def write_index(directory: Path, plan: Plan) -> dict[str, list[Range]]:
    """Write Hugging Face's index where a plan has several files; returns its ranges by path."""
    content = plan.index()
    if content is None:
        return {}
    path = f"{plan.stem}.safetensors.index.json"
    (directory / path).parent.mkdir(exist_ok=True)
    return {path: write_file(directory / path, content)}


def write_model_directory(directory: Path, tensors: Mapping[str, Tensor], max_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write whole tensors by name as ``model.safetensors``, or shards of ``max_bytes`` with an index."""
    specs = [spec_of(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_weights(directory, specs, host, max_bytes)


def write_weights(
    directory: Path, specs: Iterable[TensorSpec], rows: Named, max_bytes: int = MAX_SHARD_BYTES
) -> dict[str, list[Range]]:
    """``write_model_directory`` of tensors that need not be in memory together; returns the ranges by file path."""
    specs = list(specs)
    sizes = {spec.name: spec.num_bytes for spec in specs}
    files = plan([[Piece(spec, 0, spec.num_rows) for spec in specs]], "model", max_bytes)
    with Bar("writing weights", "bytes", total=sum(sizes.values())) as bar:
        return write_share(directory, files, 0, _Told(rows, sizes, bar)) | write_index(directory, files)


@dataclass(frozen=True)
class _Told:
    """``rows`` that tell a bar of each tensor that is asked for."""

    rows: Named
    sizes: dict[str, int]
    bar: Bar

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.rows[name]
        self.bar.add(self.sizes[name])
        return tensor


def whole(name: str, tensor: Tensor) -> Piece:
    """All rows of a tensor."""
    spec = spec_of(name, tensor.dtype, tuple(tensor.shape))
    return Piece(spec, 0, spec.num_rows)


class TensorReader:
    """Reads rows of the tensors in one safetensors file. Raises CheckpointError for a file that is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.specs = {name: spec for name, (spec, _) in header.items()}
        self._offsets = {name: offset for name, (_, offset) in header.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor in fresh host memory; a 0-dim tensor as it is."""
        spec = self.specs[name]
        stop = spec.num_rows if stop is None else min(stop, spec.num_rows)
        shape = (max(stop - start, 0), *spec.shape[1:]) if spec.shape else ()
        result = torch.empty(shape, dtype=_BY_NAME[spec.dtype])
        if not math.prod(shape):
            return result
        content: Any = raw_bytes(result).numpy()
        view = memoryview(content)
        try:
            with open_file(self.path) as file:
                file.seek(self._offsets[name] + start * spec.row_bytes)
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise CheckpointError(f"{self.path}: ends too early")
                    view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        return result


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Weights:
    """Opening reads headers only; nothing stays in memory, and nothing is mapped into it.

    Raises CheckpointError for a directory without safetensors files, or a damaged one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._readers = {name: reader for reader in _readers(directory) for name in reader.specs}

    @property
    def names(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._readers)

    def spec(self, name: str) -> TensorSpec:
        """Name, dtype and shape of a tensor."""
        return self._readers[name].specs[name]

    def specs(self) -> dict[str, TensorSpec]:
        """All specs by name, sorted."""
        return {name: self.spec(name) for name in self.names}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor, in host memory of its own."""
        return self._readers[name].read(name, start, stop)

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name)

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype of most of the weights; fp32 where there is none."""
        return main_dtype(self.specs().values())


def main_dtype(specs: Iterable[TensorSpec]) -> torch.dtype:
    """The floating dtype that most numbers have; fp32 where none has one."""
    counts: Counter[torch.dtype] = Counter()
    for spec in specs:
        counts[dtype_of(spec)] += spec.num_elements
    floating = [(count, dtype) for dtype, count in counts.items() if dtype.is_floating_point]
    return max(floating, key=lambda item: item[0])[1] if floating else torch.float32


def _readers(directory: Path) -> list[TensorReader]:
    if (directory / SINGLE).exists():
        return [TensorReader(directory / SINGLE)]
    if not (directory / INDEX).exists():
        raise CheckpointError(f"{directory}: has neither {SINGLE} nor {INDEX}; save the model again as safetensors")
    weight_map = read_weight_map(directory / INDEX, CheckpointError)
    readers = [TensorReader(file) for file in sorted(set(weight_map.values()))]
    found = {name for reader in readers for name in reader.specs}
    if lacking := sorted(set(weight_map) - found):
        raise CheckpointError(f"{directory}: its files lack {lacking[0]}, which {INDEX} names; it is damaged")
    return readers

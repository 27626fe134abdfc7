"""The tensors of a model directory, one at a time: ``model.safetensors``, or shards with an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from forgather_cli.checkpoint.layout import TensorSpec
from forgather_cli.checkpoint.tensors import TensorReader, dtype_of
from forgather_cli.errors import CheckpointError
from forgather_cli.input_files import read_weight_map

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

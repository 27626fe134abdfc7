"""Counts of a split: one pass over its samples through the loader of training, and its documents in the cache.

Legend: D documents, V ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.config.schema import Config
from forgather_cli.data.loaders.collate import Batch, Counts
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.data.loaders.map_style import is_map_style
from forgather_cli.data.paired.seq2seq import PairRows
from forgather_cli.data.samples import PackedDataset
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.tokens import SPLITS, Split, TokenSplit
from forgather_cli.inspection.origins import Origins
from forgather_cli.labels import IGNORED

Ints = NDArray[np.int64]
Progress = Callable[[int, int | None], None]
"""``progress(samples done, all of a split or None)``."""

_TOGETHER = 64  # samples
_DECODED = 1_000_000  # tokens whose text is measured, where ids do not tell their bytes


@dataclass
class SourceStats:
    """Documents of one file, or of a split of a dataset."""

    documents: int
    tokens: int
    targets: int | None
    """None where the samples decide."""


@dataclass
class SplitStats:
    """One split."""

    samples: int = 0
    tokens: int = 0
    """Of samples, without padding; of an encoder-decoder those of both sides."""
    targets: int = 0
    padding: int = 0
    documents: int | None = None
    """None where nothing says where they end."""
    document_tokens: int | None = None
    """Of all documents, those in no sample too."""
    bytes_per_token: float | None = None
    """Of text in UTF-8, by token of samples."""
    unknown: int = 0
    """Tokens that stand for what the vocabulary lacks."""
    cut: int = 0
    """Documents that are too long for a sample, the rest of which is in none."""
    dropped: int = 0
    """Documents that are in no sample: they are too long, or without a target."""
    sources: dict[str, SourceStats] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each document, or of each sample where there are none."""

    def document(self) -> dict[str, Any]:
        """For ``--json``: the lengths as some of them in order."""
        told = {key: value for key, value in vars(self).items() if key not in ("lengths", "sources")}
        told["lengths"] = self.quantiles()
        told["sources"] = {name: vars(each) for name, each in self.sources.items()}
        return told

    def quantiles(self) -> dict[str, float]:
        if not self.lengths:
            return {}
        named = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        found = np.quantile(self.lengths, list(named.values()), method="lower").tolist()
        return {**dict(zip(named, found, strict=True)), "mean": float(np.mean(self.lengths))}


def stats_of(config: Config, data: DataSplits, progress: Progress) -> dict[Split, SplitStats]:
    """Of each split there is."""
    return {split: _of_split(config, data, split, progress) for split in SPLITS if getattr(data, split) is not None}


def _of_split(config: Config, data: DataSplits, split: Split, progress: Progress) -> SplitStats:
    found, dataset = SplitStats(), getattr(data, split)
    cached = None if data.tokenized is None else data.tokenized.splits()[split]
    borders = None if cached is None or cached.documents is None else cached.documents.array
    total = len(dataset) if is_map_style(dataset) else None
    together = 1 if borders is None else _TOGETHER  # alone they tell their lengths
    loader = TrainLoader(
        dataset, global_batch_size=together, micro_batch_size=together, seed=0, drop_last=False, shuffle=False
    )
    ids = _Ids(data.tokenizer)
    for step in loader:
        counts = step.counts
        found.samples += counts.samples
        found.tokens += counts.tokens
        found.targets += counts.targets
        found.padding += counts.positions - counts.tokens
        for batch in step.microbatches:
            ids.add(batch, counts)
        if borders is None:
            found.lengths.append(counts.tokens)
        progress(found.samples, total)
    found.bytes_per_token, found.unknown = ids.bytes_per_token(), ids.unknown()
    if isinstance(dataset, PackedDataset):
        counted = dataset.table.counts
        found.cut, found.dropped = counted.get("cut", 0), counted.get("dropped", 0) + counted.get("empty", 0)
    if isinstance(dataset, PairRows):
        found.cut, found.dropped = dataset.num_cut, dataset.num_dropped
    if cached is not None and borders is not None:
        found.documents, found.document_tokens = len(borders) - 1, int(borders[-1])
        found.lengths = np.diff(borders).tolist()
        found.sources = _sources(Origins(config.data, data.tokenized).files(split), cached, borders)
    return found


def _sources(names: Sequence[str], split: TokenSplit, borders: Ints) -> dict[str, SourceStats]:
    """``names``: of each document's file; empty where nobody knows."""
    targets: Ints | None = None
    if split.targets is not None and len(names):
        whole = np.empty(int(borders[-1]), np.int64)
        split.targets.read(0, whole)
        targets = np.append(0, np.cumsum(whole))
        targets = np.diff(targets[borders])
    found: dict[str, SourceStats] = {}
    lengths = np.diff(borders)
    known, numbers = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    for number, name in enumerate(known.tolist()):
        of_file = numbers == number
        counted = None if targets is None else int(targets[of_file].sum())
        found[name] = SourceStats(int(of_file.sum()), int(lengths[of_file].sum()), counted)
    return found


class _Ids:
    """Counts how often each id occurs, and from that how much text there is."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        count = getattr(tokenizer, "bytes_of_tokens", None)
        self._bytes_of: Ints | None = None if count is None else count()
        self._counts = np.zeros(1, np.int64)  # (V,)
        self._decoded = self._num_bytes = 0

    def add(self, batch: Batch, counts: Counts) -> None:
        """The ids of a batch, whose ``counts`` are these."""
        read = batch["input_ids"]
        padding = counts.positions - counts.tokens - (counts.decoder_positions - counts.decoder_tokens)
        sides = [read]
        if "decoder_input_ids" in batch:
            sides.append(batch["labels"][batch["labels"] != IGNORED])
        for side in sides:
            flat = side.flatten().numpy()
            self._count(np.bincount(flat[flat >= 0]))
        pad = getattr(self._tokenizer, "pad_token_id", None)
        if pad is not None and padding and pad < len(self._counts):
            self._counts[pad] = max(self._counts[pad] - padding, 0)
        decode = getattr(self._tokenizer, "decode", None)
        if self._bytes_of is None and decode is not None and self._decoded < _DECODED:
            self._decoded += counts.tokens
            for side in sides:
                rows = side.tolist() if side.ndim == 2 else [side.tolist()]
                self._num_bytes += sum(len(decode(row, skip_special_tokens=True).encode()) for row in rows)

    def _count(self, more: Ints) -> None:
        longer, other = (self._counts, more) if len(self._counts) >= len(more) else (more, self._counts)
        longer[: len(other)] += other
        self._counts = longer

    def bytes_per_token(self) -> float | None:
        if self._bytes_of is not None:
            known = min(len(self._bytes_of), len(self._counts))
            return float(self._counts[:known] @ self._bytes_of[:known] / max(self._counts.sum(), 1))
        return self._num_bytes / self._decoded if self._decoded else None

    def unknown(self) -> int:
        number = getattr(self._tokenizer, "unk_token_id", None)
        return int(self._counts[number]) if number is not None and number < len(self._counts) else 0

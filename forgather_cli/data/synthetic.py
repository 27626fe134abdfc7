"""Random tokens made on the fly: a benchmark without a corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forgather_cli.data.order import mix
from forgather_cli.data.samples import IGNORED, batch_of, one_of

_MASK = (1 << 64) - 1


class SyntheticDataset:
    """``length`` samples of ``seq_len`` uniformly random ids below ``vocab_size``; sample i depends on (seed, i) alone.

    ``first`` is the number of the first sample, so that two splits differ. Ragged samples have 2 to ``seq_len`` tokens
    and are padded without targets. ``isolate`` adds ``document_ids``: a sample is one document, its padding another.
    """

    def __init__(
        self,
        length: int,
        seq_len: int,
        vocab_size: int,
        pad_token_id: int,
        *,
        seed: int,
        first: int = 0,
        ragged: bool = False,
        isolate: bool = False,
    ) -> None:
        self._length, self.seq_len, self._vocab_size, self._pad = length, seq_len, vocab_size, pad_token_id
        self._key, self._first, self._ragged, self._isolate = seed & _MASK, first, ragged, isolate

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return one_of(self, index)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        samples = np.asarray(indices, np.uint64) + np.uint64(self._first)
        numbers = self._draw(samples[:, None], np.arange(1, self.seq_len + 1, dtype=np.uint64))
        ids = (numbers % np.uint64(self._vocab_size)).astype(np.int64)
        labels = ids.copy()
        padding = np.zeros(ids.shape, bool)
        if self._ragged:
            lengths = self._draw(samples, np.zeros(1, np.uint64)) % np.uint64(self.seq_len - 1) + np.uint64(2)
            padding = np.arange(self.seq_len) >= lengths.astype(np.int64)[:, None]
            ids[padding] = self._pad
            labels[padding] = IGNORED
        return batch_of(ids, labels, padding.astype(np.int32) if self._isolate else None)

    def _draw(self, samples: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """64 random bits for each sample and position (splitmix64 with the sample's hash as its start)."""
        start = mix((samples + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._key))
        return mix(start + positions * np.uint64(0x9E3779B97F4A7C15))

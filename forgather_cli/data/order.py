"""The global order of samples: a function of (seed, epoch) and, where these group them, of the samples' lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8  # half-rounds; each changes one half of the bits
_BLOCK = 4096  # indices computed at once: numpy's cost per call is shared by many batches
_MASK = (1 << 64) - 1
_MEGA_BATCH = 1024  # samples that are sorted by length together


class Order:
    """A permutation of ``range(length)`` without a table.

    A Feistel network over the next power of two, walked until it lands inside the range (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002). The domain is less than twice the range, so a walk takes less than
    two steps on average. ``shuffle=False`` is the identity.
    """

    def __init__(self, length: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        self.length = length
        self._shuffle = shuffle
        bits = max(2, (length - 1).bit_length())
        self._low_bits = bits // 2
        self._masks = ((1 << (bits - self._low_bits)) - 1, (1 << self._low_bits) - 1)
        key = _mix(_mix(seed & _MASK) ^ epoch & _MASK)
        self._keys = [np.uint64(_mix(key + i & _MASK)) for i in range(_ROUNDS)]
        self._block: tuple[int | None, list[int]] = (None, [])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, span: slice) -> list[int]:
        """Samples at positions [start, stop) of the epoch."""
        start, stop, _ = span.indices(self.length)
        if not self._shuffle:
            return list(range(start, stop))
        out: list[int] = []
        while start < stop:
            number, offset = divmod(start, _BLOCK)
            out += self._load(number)[offset : offset + stop - start]
            start = (number + 1) * _BLOCK
        return out

    def _load(self, number: int) -> list[int]:
        if self._block[0] != number:
            first = number * _BLOCK
            self._block = (number, self.at(np.arange(first, min(first + _BLOCK, self.length))).tolist())
        return self._block[1]

    def at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Samples at positions in any order."""
        if not self._shuffle:
            return positions
        values = self._encrypt(positions.astype(np.uint64))
        while (outside := np.flatnonzero(values >= self.length)).size:
            values[outside] = self._encrypt(values[outside])
        return values

    def _encrypt(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        shift = np.uint64(self._low_bits)
        halves = [x >> shift, x & np.uint64(self._masks[1])]
        for i, key in enumerate(self._keys):
            target = i % 2
            halves[target] ^= mix(halves[1 - target] + key) & np.uint64(self._masks[target])
        return (halves[0] << shift) | halves[1]


class LengthGroupedOrder:
    """``Order``, in which samples of about one length are neighbours, so that batches need little padding.

    Mega-batches of the shuffled samples are sorted by length, longest first; the first sample of all is the longest, so
    that memory runs out soon or never. As transformers 5.23 (``trainer_pt_utils.py: get_length_grouped_indices``), but
    the size of a mega-batch does not follow the batch size, so that a position holds for another one: ``_MEGA_BATCH``
    samples, or a quarter of fewer than four times as many, which keeps the order random.
    """

    def __init__(self, lengths: NDArray[np.int64], seed: int, epoch: int) -> None:
        """``lengths``: (samples,), in any unit."""
        samples = Order(len(lengths), seed, epoch).at(np.arange(len(lengths))).astype(np.int64)
        size = min(_MEGA_BATCH, -(-len(samples) // 4))
        samples = samples[np.lexsort((-lengths[samples], np.arange(len(samples)) // size))]  # the last key goes first
        longest = int(lengths[samples].argmax())
        samples[[0, longest]] = samples[[longest, 0]]
        self._samples = samples

    def __getitem__(self, span: slice) -> list[int]:
        """Samples at positions [start, stop) of the epoch."""
        found: list[int] = self._samples[span].tolist()
        return found


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014) on an array; overwrites it."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _mix(x: int) -> int:
    """One step of splitmix64 on a Python integer."""
    x = x + 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31

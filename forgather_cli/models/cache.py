"""Keys and values of positions already seen.

Legend: B sequences, H key-value heads, S positions so far, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GRAIN = 128
"""Capacity is a multiple of this many positions."""


class LayerCache:
    """One layer's keys and values (B, H, capacity, D)."""

    def __init__(self) -> None:
        self.length = 0
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, H, T, D) and return all keys and values (B, H, S, D), as views."""
        end = self.length + keys.shape[2]
        if self.length == 0 or end > self._keys.shape[2]:
            self._keys, self._values = self._grown(self._keys, keys, end), self._grown(self._values, values, end)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self.held()

    def held(self) -> tuple[Tensor, Tensor]:
        """All keys and values (B, H, S, D), as views."""
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (B,), of which some may come twice."""
        if self.length:
            self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)

    def _grown(self, old: Tensor, new: Tensor, end: int) -> Tensor:
        """Room for ``end`` positions and, from the second time on, for as many again: copies stay linear in S."""
        capacity = end if self.length == 0 else 2 * end
        capacity = -(-(capacity + 1) // _GRAIN) * _GRAIN
        grown = new.new_empty(*new.shape[:2], capacity, new.shape[3])
        if self.length:
            grown[:, :, : self.length] = old[:, :, : self.length]
        return grown


class KVCache:
    """What a decoder keeps between the calls of one generation; filled by the calls themselves."""

    def __init__(self) -> None:
        self.length = 0
        """Positions seen so far, padding included."""
        self.limit: int | None = None
        """Positions that the model has; None: it computes as many as are asked for. Set by the model."""
        self.theirs: dict[int, Any] = {}
        """What each model of the transformers library, or stage of one, keeps instead of ``layer``s."""
        self._layers: dict[str, LayerCache] = {}

    def layer(self, key: str) -> LayerCache:
        """The layer's cache, made on first use."""
        return self._layers.setdefault(key, LayerCache())

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (B,) of what was kept, in this order."""
        for layer in self._layers.values():
            layer.select(rows)
        for kept in self.theirs.values():
            kept.reorder_cache(rows)

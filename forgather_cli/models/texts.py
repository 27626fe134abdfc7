"""Texts that a model writes side by side: their tokens so far, and what it makes of the next ones.

Legend: B texts, T prompt tokens, n new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from forgather_cli.errors import ModelError
from forgather_cli.models.cache import KVCache
from forgather_cli.models.choose import finite

LogitsFn = Callable[..., Tensor | None]
"""``(batch, last_only=True, cache=KVCache | None) -> (B, 1, V)``: ``Strategy.logits``."""


class Texts:
    """``ids`` (B, T + n), and ``real`` as long, 0 where padding stands before a shorter prompt."""

    def __init__(
        self,
        logits_fn: LogitsFn,
        ids: Tensor,
        real: Tensor,
        encoder_inputs: Mapping[str, Tensor] | None,
        *,
        use_cache: bool,
    ) -> None:
        self.ids, self.real = ids, real
        self._logits_fn, self._begun, self._padded = logits_fn, ids.shape[1], not bool(real.all())
        self._encoder_inputs, self._side = encoder_inputs or {}, "" if encoder_inputs is None else "decoder_"
        self._cache = KVCache() if use_cache else None

    @property
    def new(self) -> Tensor:
        """(B, n)."""
        return self.ids[:, self._begun :]

    def logits(self) -> Tensor:
        """Of the next tokens, (B, V) in fp32, finite. A model that does not fill the cache gets the whole sequence."""
        past = 0 if self._cache is None else self._cache.length
        batch = {**self._encoder_inputs, f"{self._side}input_ids": self.ids[:, past:]}
        if self._padded:
            batch[f"{self._side}attention_mask"] = self.real
        logits = self._logits_fn(batch, last_only=True, cache=self._cache)
        if logits is None:
            raise ModelError("generation needs the logits on every rank, but this rank got none")
        return finite(logits[:, -1].float())

    def add(self, tokens: Tensor) -> None:
        """Go on with (B, 1)."""
        self.ids = torch.cat((self.ids, tokens), 1)
        self.real = torch.cat((self.real, torch.ones_like(tokens)), 1)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (B,), of which some may come twice; each text of the same prompt."""
        self.ids = self.ids[rows]
        if self._cache is not None:
            self._cache.select(rows)

    def is_full(self, more: int = 0) -> bool:
        """Whether after ``more`` tokens the next position has no embedding. Known after the first ``logits``."""
        limit = None if self._cache is None else self._cache.limit
        return limit is not None and self.ids.shape[1] + more > limit

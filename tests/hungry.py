"""A decoder for which more than so many sequences at a time are too many, on one rank or on all."""

from __future__ import annotations

import os
from typing import Any

import tiny
import torch
from torch import Tensor

from forgather_cli.models.decoder import Decoder


class Hungry(Decoder):
    def __init__(self, vocab_size: int, limit: int = 2, rank: int | None = None, step: int = 0, **shape: Any) -> None:
        """``rank``: None is every rank; ``step``: how many forwards go well first."""
        super().__init__(tiny.decoder_settings(vocab_size=vocab_size, **shape))
        self.limit, self.forwards = limit, step
        self.is_short = rank is None or int(os.environ.get("RANK", "0")) == rank

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        if self.training and self.is_short and input_ids.shape[0] > self.limit:
            self.forwards -= 1
            if self.forwards < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().forward(input_ids, **kwargs)


model = Hungry


def large(vocab_size: int, seq_len: int) -> Decoder:
    """Few parameters, and 16 KiB of activations for each token."""
    shape = {"intermediate_size": 512, "max_position_embeddings": seq_len}
    return Decoder(tiny.decoder_settings(vocab_size=vocab_size, **shape))

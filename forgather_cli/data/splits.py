"""What a data option becomes: datasets, the tokenizer, and what says that two of them are the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forgather_cli.data.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DataSplits:
    """What training reads. ``train`` and ``eval`` are what ``TrainLoader`` takes; the shipped ones are map-style."""

    train: Any
    eval: Any | None
    tokenizer: Tokenizer | None
    """None where data of the user's name none."""
    fingerprint: str
    """Of content, tokenizer, split, seq_len, packing and isolation: equal fingerprints give equal samples."""
    seq_len: int
    """Tokens per sample."""
    description: dict[str, Any] = field(default_factory=dict)
    """Plain values for logs: type, documents, tokens and samples of each split, origin, what was replaced."""
    stated_vocab_size: int | None = None
    """By data of the user's."""

    @property
    def vocab_size(self) -> int | None:
        """Ids are below it; None where neither a tokenizer nor custom data says."""
        return self.tokenizer.vocab_size if self.tokenizer is not None else self.stated_vocab_size

"""Options of the groups ``data`` and ``loss`` for preferences."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from forgather_cli.config.schema import InstructSettings, settings

PairKey = Literal[
    "prompt", "chosen", "rejected", "system", "user", "messages", "conversations", "instruction", "input", "context",
    "history", "question", "tools",
]  # fmt: skip
"""What a key of a record can be read as."""


@settings
class PreferenceSettings(InstructSettings):
    """Pairs of a chosen and a rejected answer, in chats or texts of files or of the datasets library; for loss=dpo."""

    maker: ClassVar[str] = "forgather_cli.preference.source:PreferenceSource"
    has_pairs: ClassVar[bool] = True
    noun: ClassVar[str] = "pair"
    # of chats, and decided for pairs
    messages_key: ClassVar[None] = None  # type: ignore[misc]
    train_on: ClassVar[Literal["assistant"]] = "assistant"  # type: ignore[misc]
    streaming: ClassVar[bool] = False  # type: ignore[misc]
    shuffle_buffer: ClassVar[int] = 0  # type: ignore[misc]
    isolate_documents: ClassVar[bool] = True  # type: ignore[misc]

    type: Literal["preference"] = "preference"  # type: ignore[assignment]
    on_bad_row: Literal["error", "skip"] = "error"  # records that are no pair: error, or skip (left out and counted)
    # other layouts: key of the records: chosen, rejected, or a key of a prompt
    mapping: dict[str, PairKey] = field(default_factory=dict)  # type: ignore[assignment]
    # a side longer than seq_len: cut (the prompt's beginning, of both sides alike), drop (the pair)
    too_long: Literal["cut", "drop"] = "cut"
    # pad (one pair a row: batch sizes count pairs), best_fit (several, whole)
    packing: Literal["pad", "best_fit"] = "pad"
    seq_len: Annotated[int, Ge(2)] = 512  # tokens of one side at most; a row is twice as long

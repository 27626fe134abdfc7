"""Options of the groups ``data`` and ``loss`` for preferences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt

from forgather_cli.config.schema import (
    FilePath,
    InstructSettings,
    LossSettings,
    NonNegative,
    PositiveFloat,
    Target,
    by_type,
    only_if,
    only_where,
    settings,
)

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

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if not isinstance(config.loss, Target | DPOSettings):
            yield f"loss: {config.loss.type} does not compare the sides of data=preference's pairs; set loss=dpo"


_COMPARES = only_where(".variant", lambda it: it not in ("orpo", "simpo"), "set loss.variant=sigmoid")


@settings
class DPOSettings(LossSettings):
    """Prefers the chosen side of each pair to the rejected one, as far as the model at step 0 does not already.

    Rafailov et al. 2023, arXiv:2305.18290; the mean is over pairs. Needs data=preference.
    """

    maker: ClassVar[str] = "forgather_cli.preference.loss:DPO"
    takes_device: ClassVar[bool] = True
    # as TRL 1.16 has them
    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
    )  # fmt: skip

    type: Literal["dpo"] = "dpo"
    # sigmoid, ipo, hinge; orpo, simpo without a reference; or a function of yours by _target_
    variant: Literal["sigmoid", "ipo", "hinge", "orpo", "simpo"] | Annotated[Target, by_type] = "sigmoid"
    beta: PositiveFloat | None = None  # how far rewards count, of orpo the odds; null: 2.0 for simpo, else 0.1
    gamma: Annotated[NonNegative, only_if(".variant", "simpo")] = 1.0  # by how much a chosen side is to be better
    # share of the pairs that are taken to be the wrong way round (cDPO)
    label_smoothing: Annotated[float, Ge(0), Lt(0.5), only_if(".variant", "sigmoid", "simpo")] = 0.0
    # rewards per token; ipo, orpo and simpo take them so anyway
    length_normalized: Annotated[bool, only_if(".variant", "sigmoid", "hinge")] = False
    # of the chosen side's negative log-likelihood per token beside it; orpo has it with 1
    sft_weight: Annotated[NonNegative, only_where(".variant", lambda it: it != "orpo", "leave it out")] = 0.0
    # the directory of another model of the same vocabulary to compare with; null: the model as it is at step 0
    reference: Annotated[FilePath | None, _COMPARES] = None

    def problems(self, config: Any) -> Iterator[str]:
        if not isinstance(config.data, Target) and not config.data.has_pairs:
            yield f"loss: dpo compares the sides of pairs, got data={config.data.type}; set data=preference"

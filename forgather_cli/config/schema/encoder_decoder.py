"""The encoder-decoder's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from forgather_cli.config.schema.base import (
    Count,
    FilePath,
    PositiveFloat,
    PositiveInt,
    Probability,
    only_where,
    settings,
)
from forgather_cli.config.schema.decoder import DecoderSettings, RopeScaling, WholeSettings

_FROM_SCRATCH = only_where(".init_from", lambda path: path is None, "leave init_from out")

_FROM_DIRECTORY = only_where(".init_from", bool, "set model.init_from=DIR")


@settings
class EncoderDecoderSettings(WholeSettings):
    """Qwen3 with an encoder: two stacks of one shape and one embedding; for data=ul2 and data=seq2seq."""

    maker: ClassVar[str] = "forgather_cli.models.build:encoder_decoder"
    weights: ClassVar[str] = "forgather_cli.models.build:StackWeights"
    directory_setting: ClassVar[str] = "init_from"
    is_encoder_decoder: ClassVar[bool | None] = True
    head_gives_logits: ClassVar[bool] = True

    type: Literal["qwen3_encdec"] = "qwen3_encdec"
    init_from: FilePath | None = None  # a Qwen3 directory, whose shape and weights both stacks get; null: from scratch
    # with init_from: zero (adds nothing first), self (self-attention's copy), fresh (drawn)
    cross_attention: Annotated[Literal["zero", "self", "fresh"], _FROM_DIRECTORY] = "zero"
    # true: take data.tokenizer=bytes or bpe, though the weights know the ids of another
    replace_tokenizer: Annotated[bool, _FROM_DIRECTORY] = False
    num_sentinel_tokens: Count = 100  # tokens that stand for masked spans, beside the tokenizer's
    hidden_size: Annotated[PositiveInt, _FROM_SCRATCH] = 256
    intermediate_size: Annotated[PositiveInt | None, _FROM_SCRATCH] = None
    num_hidden_layers: Annotated[PositiveInt, _FROM_SCRATCH] = 4  # blocks of each stack
    num_attention_heads: Annotated[PositiveInt, _FROM_SCRATCH] = 4
    num_key_value_heads: Annotated[PositiveInt | None, _FROM_SCRATCH] = None
    head_dim: Annotated[PositiveInt | None, _FROM_SCRATCH] = None
    # rows of the embedding; null: the tokenizer's with the sentinels
    vocab_size: Annotated[PositiveInt | None, _FROM_SCRATCH] = None
    # longest side of an example in tokens; null: the data's
    max_position_embeddings: Annotated[PositiveInt | None, _FROM_SCRATCH] = None
    rms_norm_eps: Annotated[PositiveFloat, _FROM_SCRATCH] = 1e-6
    rope_theta: Annotated[PositiveFloat, _FROM_SCRATCH] = 1e6
    # {rope_type: linear|yarn|llama3, factor: ..., ...}; null: none
    rope_scaling: Annotated[RopeScaling | None, _FROM_SCRATCH] = None
    attention_bias: Annotated[bool, _FROM_SCRATCH] = False  # biases of q, k, v and o
    tie_word_embeddings: Annotated[bool, _FROM_SCRATCH] = True
    initializer_range: Annotated[PositiveFloat, _FROM_SCRATCH] = 0.02
    attention_dropout: Probability = 0.0
    residual_dropout: Probability = 0.0  # probability, on each block's outputs; likewise

    SHAPE: ClassVar[tuple[str, ...]] = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
        "attention_bias", "tie_word_embeddings", "initializer_range",
    )  # fmt: skip
    """What a source's ``config.json`` says."""

    @property
    def stack(self) -> DecoderSettings:
        """The shape of one stack."""
        shape = {name: getattr(self, name) for name in (*self.SHAPE, "attention_dropout", "residual_dropout")}
        return DecoderSettings(**shape, qk_norm=True, attention_output_bias=self.attention_bias)

    def with_shape(self, stack: DecoderSettings) -> EncoderDecoderSettings:
        """These settings with the shape of ``stack``."""
        return dataclasses.replace(self, **{name: getattr(stack, name) for name in self.SHAPE})

    def num_parameters(self, vocab_size: int) -> int:
        """Of both stacks from scratch; ``vocab_size`` is the tokenizer's with the sentinels."""
        stack = self.stack
        layers = stack.num_hidden_layers * (stack.layer_parameters() + stack.layer_parameters(attentions=2))
        return stack.vocabulary_parameters(vocab_size) + layers + 2 * stack.hidden_size

    def problems(self, config: Any = None) -> Iterator[str]:
        yield from self.stack.problems()
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic":
            yield (
                "model.rope_scaling.rope_type: dynamic changes the keys that a cache holds, got dynamic with "
                "model=qwen3_encdec; set it to yarn or linear"
            )
        if config is None:
            return
        if config.trainer.cuts_layers:
            yield (
                f"trainer: {config.trainer.type} cannot cut model=qwen3_encdec into stages, whose decoder layers all "
                "read the encoder; choose trainer=fsdp2 or ddp"
            )
        if config.data.is_paired is False:
            yield (
                f"data: model=qwen3_encdec reads examples of two sides, got data={config.data.type}; choose data=ul2, "
                "or data=seq2seq for pairs"
            )

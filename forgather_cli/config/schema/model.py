"""Options of the group ``model``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Tag

from forgather_cli.config.schema.base import PositiveFloat, PositiveInt, Probability, TargetOption, by_type, settings


@settings
class RopeScaling:
    """Hugging Face's rope parameters; which ones are read depends on ``rope_type``."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: PositiveFloat = 1.0
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@settings
class DecoderSettings:
    """The own decoder: Llama, Mistral, Qwen2 and Qwen3 shapes."""

    type: Literal["decoder"] = "decoder"
    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt | None = None  # null: 8/3 hidden_size, rounded up to a multiple of 32
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt | None = None  # null: num_attention_heads
    head_dim: PositiveInt | None = None  # null: hidden_size / num_attention_heads
    vocab_size: PositiveInt | None = None  # null: the tokenizer's
    max_position_embeddings: PositiveInt | None = None  # null: data.seq_len
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: PositiveInt | None = None
    attention_bias: bool = False  # q, k, v
    attention_output_bias: bool | None = None  # o; null: as attention_bias
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    attention_dropout: Probability = 0.0
    residual_dropout: Probability = 0.0
    initializer_range: PositiveFloat = 0.02


@settings
class PretrainedSettings:
    """A Hugging Face directory of the decoder's families."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    resize_vocabulary: bool = False
    pad_vocab_to_multiple_of: PositiveInt | None = None  # rows; null: as many as the tokenizer has tokens


@settings
class TransformersSettings:
    """Any causal language model of the transformers library: from a directory, or fresh from a config."""

    type: Literal["transformers"] = "transformers"
    path: str | None = None
    config: dict[str, Any] | str | None = None  # a mapping, or the path of a config.json or of a directory with one
    attn_implementation: str | None = None  # null: transformers' choice
    trust_remote_code: bool = False
    resize_vocabulary: bool = False
    pad_vocab_to_multiple_of: PositiveInt | None = None


ModelOption = Annotated[
    Annotated[DecoderSettings, Tag("decoder")]
    | Annotated[PretrainedSettings, Tag("pretrained")]
    | Annotated[TransformersSettings, Tag("transformers")]
    | TargetOption,
    by_type,
]

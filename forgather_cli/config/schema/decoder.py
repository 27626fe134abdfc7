"""The base class of the group ``model``, the decoder's settings, and which Hugging Face architecture a set of them is.

A checkpoint of the decoder is a directory that transformers loads as it lies, so settings that no architecture there
can express are refused before training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from forgather_cli.config.schema.base import (
    Option,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
    either,
    only_if,
    settings,
)
from forgather_cli.errors import ModelError


class ModelSettings(Option):
    """An option of the group ``model``: a network, and where its first weights come from.

    ``maker`` is the module's class, or a function that returns one, without weights, on the device that is current:
    meta as a rule. It is called with ``arguments()`` by name and, where its signature names them and no setting does,
    with ``vocab_size`` (the tokenizer's), ``seq_len`` (of the data, in tokens) and ``num_new`` (how many of the tokens
    the data has added). Weights are drawn by (seed, name): each submodule with parameters has ``reset_parameters()``
    (or ``models/init.py: Fills``), each with buffers ``reset_buffers()``, as far as torch's own do not.

    ``forward(input_ids)``, (B, T) int64, returns logits (B, T, V). It takes ``document_ids``, ``attention_mask`` and
    ``position_ids`` where the data has them (``models/decoder.py``). What else a module has is found by name: ``head``
    and ``hidden_states`` by losses that apply the head themselves, ``cut`` by a pipeline (``models/stages.py:
    Cuttable``), a ``ModuleList`` of blocks by fsdp2, recomputation and compilation, ``is_encoder_decoder`` by the data.
    """

    weights: ClassVar[str] = "forgather_cli.models.build:DrawnWeights"
    """``module:name`` of the class that gives the parameters their first values; of weights in a directory another."""
    directory_setting: ClassVar[str] = ""
    """The field that names the directory with the weights; of a field ``path`` it may be one of the hub."""
    is_encoder_decoder: ClassVar[bool | None] = False
    """Whether it reads examples of two sides; None where only a directory tells."""
    head_gives_logits: ClassVar[bool] = False
    """Whether a loss may apply its ``head`` to its ``hidden_states``, and ``loss=auto`` choose one that does."""
    draws_on_device: ClassVar[bool] = False
    """Whether ``construct_model_on=device`` draws its weights there too: other numbers than on a CPU."""

    vocab_size: int | None = None
    """Its own number of tokens; None: the tokenizer's, or a directory's. A field of options that let it be set."""
    num_sentinel_tokens: int = 0
    """Tokens for spans that the data of an encoder-decoder add to the tokenizer."""

    @property
    def directory(self) -> str | None:
        """The directory with its weights; None where they are drawn."""
        return getattr(self, self.directory_setting) if self.directory_setting else None

    def num_parameters(self, vocab_size: int) -> int:
        """Of the model, or about so many; 0 where nobody knows before it is made. ``vocab_size`` is the tokenizer's."""
        return 0


class WholeSettings(ModelSettings):
    """One whose maker is called with the settings as a whole, ``option``."""

    def arguments(self) -> dict[str, Any]:
        return {"option": self}


_TYPE = ".rope_type"
_YARN = only_if(_TYPE, "yarn")


@settings
class RopeScaling(Settings):
    """Hugging Face's rope parameters, read by ``models/rope.py``."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: Annotated[PositiveFloat, only_if(_TYPE, "linear", "dynamic", "yarn", "llama3")] = 1.0
    original_max_position_embeddings: Annotated[PositiveInt | None, only_if(_TYPE, "yarn", "llama3")] = None
    attention_factor: Annotated[float | None, _YARN] = None
    beta_fast: Annotated[float, _YARN] = 32.0
    beta_slow: Annotated[float, _YARN] = 1.0
    low_freq_factor: Annotated[float, only_if(_TYPE, "llama3")] = 1.0
    high_freq_factor: Annotated[float, only_if(_TYPE, "llama3")] = 4.0
    mscale: Annotated[float | None, _YARN] = None
    mscale_all_dim: Annotated[float | None, _YARN] = None
    truncate: Annotated[bool, _YARN] = True


@settings
class DecoderSettings(WholeSettings):
    """The own decoder (Llama, Mistral, Qwen2 and Qwen3 shapes) with every setting."""

    maker: ClassVar[str] = "forgather_cli.models.build:decoder"
    head_gives_logits: ClassVar[bool] = True
    draws_on_device: ClassVar[bool] = True

    type: Literal["decoder"] = "decoder"
    hidden_size: PositiveInt = 256  # width of the residual stream
    # width of the MLP; null: 8/3 hidden_size, rounded up to a multiple of 32
    intermediate_size: PositiveInt | None = None
    num_hidden_layers: PositiveInt = 4  # blocks
    num_attention_heads: PositiveInt = 4  # query heads
    # key and value heads (grouped-query attention); null: num_attention_heads
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None  # width of one head; null: hidden_size / num_attention_heads
    vocab_size: PositiveInt | None = None  # rows of the embedding; null: the tokenizer's
    max_position_embeddings: PositiveInt | None = None  # longest sequence in tokens; null: data.seq_len
    rms_norm_eps: PositiveFloat = 1e-5  # added to the mean square
    rope_theta: PositiveFloat = 10000.0  # base of the rotary frequencies
    # {rope_type: default|linear|dynamic|yarn|llama3, factor: ..., ...}; null: none
    rope_scaling: RopeScaling | None = None
    sliding_window: PositiveInt | None = None  # tokens a query sees back (Mistral); null: all
    attention_bias: bool = False  # biases of q, k and v
    attention_output_bias: bool | None = None  # bias of o; null: as attention_bias
    mlp_bias: bool = False  # biases of gate, up and down
    qk_norm: bool = False  # RMSNorm of queries and keys (Qwen3)
    tie_word_embeddings: bool = False  # the head shares the embedding's weight
    # probability, on attention weights; any dropout draws other units in another layout
    attention_dropout: Probability = 0.0
    residual_dropout: Probability = 0.0  # probability, on each block's two outputs; likewise
    initializer_range: PositiveFloat = 0.02  # standard deviation of the initial weights
    zero_init_outputs: bool = False  # weights of o, down and an untied head begin at zero: blocks begin as identities

    @property
    def model_type(self) -> str:
        """What transformers calls its shape. Raises ModelError."""
        return family_of(self).model_type

    @property
    def has_output_bias(self) -> bool:
        """Whether the attention's output projection has a bias: null follows ``attention_bias``."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias

    @property
    def mlp_size(self) -> int:
        """Width of the MLP."""
        return self.intermediate_size or -(-8 * self.hidden_size // 96) * 32

    @property
    def num_key_heads(self) -> int:
        """Key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def num_parameters(self, vocab_size: int) -> int:
        """Of the model; ``vocab_size`` is the tokenizer's, where the settings have none."""
        layers = self.num_hidden_layers * self.layer_parameters()
        return self.vocabulary_parameters(vocab_size) + layers + self.hidden_size

    def vocabulary_parameters(self, vocab_size: int) -> int:
        """Of the embedding and the head."""
        return (self.vocab_size or vocab_size) * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    def layer_parameters(self, attentions: int = 1) -> int:
        """Of one block with so many attentions; each of them has a norm before it, and so has the MLP."""
        width, mlp, queries = self.hidden_size, self.mlp_size, self.num_attention_heads * self.head_size
        keys = self.num_key_heads * self.head_size
        attention = width * (1 + 2 * queries + 2 * keys) + 2 * self.qk_norm * self.head_size
        attention += self.attention_bias * (queries + 2 * keys) + self.has_output_bias * width
        return attentions * attention + width * (1 + 3 * mlp) + self.mlp_bias * (2 * mlp + width)

    def problems(self, config: Any = None) -> Iterator[str]:
        """What does not fit together; also asked of settings that a ``config.json`` says."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.head_dim is None and self.hidden_size % heads:
            yield (
                f"model.hidden_size: must be a multiple of model.num_attention_heads={heads}, got {self.hidden_size}; "
                f"set model.hidden_size={_multiples_around(self.hidden_size, 2 * heads)}, or set model.head_dim"
            )
        elif self.head_dim is None and self.hidden_size // heads % 2:
            yield (
                f"model.hidden_size: rotary embedding needs an even head size, got {self.hidden_size} / "
                f"model.num_attention_heads={heads} = {self.hidden_size // heads}; "
                f"set model.hidden_size={_multiples_around(self.hidden_size, 2 * heads)}"
            )
        elif self.head_dim is not None and self.head_dim % 2:
            yield (
                f"model.head_dim: rotary embedding needs an even head size, got {self.head_dim}; "
                f"set model.head_dim={_multiples_around(self.head_dim, 2)}"
            )
        if groups is not None and heads % groups:
            divisors = [number for number in range(1, heads + 1) if heads % number == 0]
            yield (
                f"model.num_key_value_heads: must divide model.num_attention_heads={heads}, got {groups}; "
                f"set it to {either(divisors)}"
            )
        try:
            family_of(self)
        except ModelError as error:
            yield str(error)


def _multiples_around(number: int, step: int) -> str:
    below = number // step * step
    return either(each for each in (below, below + step) if each)


@dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    model_type: str
    architecture: str


FAMILIES = {name.lower(): Family(name.lower(), f"{name}ForCausalLM") for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
"""By model_type, in order of preference."""


def family_of(settings: DecoderSettings) -> Family:
    """The first family that can express ``settings``. Raises ModelError naming the settings that do not go together."""
    s, bias, output_bias = settings, settings.attention_bias, settings.has_output_bias
    uneven = s.hidden_size % s.num_attention_heads != 0  # Llama's config wants it even beside a head_dim
    has_no_room = {
        "llama": s.qk_norm or s.sliding_window is not None or output_bias != bias or uneven,
        "mistral": s.qk_norm or bias or output_bias or s.mlp_bias,
        "qwen2": s.qk_norm or not bias or output_bias or s.mlp_bias,
        "qwen3": not s.qk_norm or output_bias != bias or s.mlp_bias,
    }
    for name, family in FAMILIES.items():
        if not has_no_room[name]:
            return family
    names = ("qk_norm", "sliding_window", "attention_bias", "attention_output_bias", "mlp_bias")
    given = {name: value for name in names if (value := getattr(s, name)) not in (None, False)}
    if bias and not output_bias:
        given["attention_output_bias"] = False
    if uneven:
        given |= {"hidden_size": s.hidden_size, "num_attention_heads": s.num_attention_heads}
    listed = ", ".join(f"model.{name}={str(value).lower()}" for name, value in given.items())
    raise ModelError(
        f"{listed}: no Hugging Face architecture ({', '.join(FAMILIES)}) has this combination; "
        f"qk_norm excludes mlp_bias, mlp_bias needs equal attention biases and no sliding_window"
    )

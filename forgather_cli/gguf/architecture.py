"""What of a model's config and tensors goes into a GGUF file, and under which names.

Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. In llama.cpp (October 2026) ``llama`` alone has biases
everywhere and a factor for each rotary frequency, and wants the rows of queries and keys in pairs; ``qwen2`` has biases
of q, k and v, ``qwen3`` the norms of queries and keys; none of them has a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from forgather_cli.config.schema import DecoderSettings, RopeScaling
from forgather_cli.errors import ModelError
from forgather_cli.models.pretrained import decoder_settings_from_hf
from forgather_cli.models.rope import attention_factor, rope_frequencies

Value = bool | int | float | str | bytes | list[int] | list[float] | list[str]
Metadata = dict[str, Value]

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file."""

    name: str
    source: str
    """Its name in the model's files; empty: it is ``rope_factors``."""
    pairs: int = 0
    """Heads whose rows (i, i + D / 2) are put side by side, as llama.cpp rotates them; 0: rows as they are."""


@dataclass(frozen=True)
class Architecture:
    """A model as llama.cpp knows it."""

    name: str
    settings: DecoderSettings
    rope_factors: list[float] | None
    """By how much each rotary frequency is divided (Llama 3)."""

    def entries(self, names: Iterable[str]) -> Iterator[TensorEntry]:
        """The file's tensors. Raises ModelError for a name that has no counterpart."""
        s, pairs = self.settings, {}
        if self.name == "llama":
            pairs = {"attn_q": s.num_attention_heads, "attn_k": s.num_key_heads}
        if self.rope_factors is not None:
            yield TensorEntry("rope_freqs.weight", "")
        for source in names:
            if source in _WHOLE:
                if not (source == "lm_head.weight" and s.tie_word_embeddings):
                    yield TensorEntry(_WHOLE[source], source)
                continue
            layer, _, rest = source.removeprefix("model.layers.").partition(".")
            module, _, kind = rest.rpartition(".")
            if module not in _LAYER:
                raise ModelError(
                    f"--gguf: the tensor {source} has no counterpart in gguf's {self.name}; leave --gguf out"
                )
            yield TensorEntry(f"blk.{layer}.{_LAYER[module]}.{kind}", source, pairs.get(_LAYER[module], 0))

    def metadata(self) -> Metadata:
        """Sizes and rotary settings."""
        s, a = self.settings, self.name
        assert s.head_dim is not None
        values: Metadata = {
            f"{a}.vocab_size": s.vocab_size or 0,
            f"{a}.context_length": s.max_position_embeddings or 0,
            f"{a}.embedding_length": s.hidden_size,
            f"{a}.block_count": s.num_hidden_layers,
            f"{a}.feed_forward_length": s.mlp_size,
            f"{a}.attention.head_count": s.num_attention_heads,
            f"{a}.attention.head_count_kv": s.num_key_heads,
            f"{a}.attention.key_length": s.head_dim,
            f"{a}.attention.value_length": s.head_dim,
            f"{a}.attention.layer_norm_rms_epsilon": s.rms_norm_eps,
            f"{a}.rope.dimension_count": s.head_dim,
            f"{a}.rope.freq_base": s.rope_theta,
        }
        scaling = s.rope_scaling
        if scaling is None or scaling.rope_type == "llama3":  # which is in the factors
            return values
        values |= {f"{a}.rope.scaling.type": scaling.rope_type, f"{a}.rope.scaling.factor": float(scaling.factor)}
        if scaling.rope_type == "yarn":
            plain = RopeScaling(rope_type="yarn", factor=scaling.factor)
            values |= {
                f"{a}.rope.scaling.original_context_length": scaling.original_max_position_embeddings
                or s.max_position_embeddings
                or 0,
                # llama.cpp multiplies by yarn's own factor itself
                f"{a}.rope.scaling.attn_factor": attention_factor(scaling) / attention_factor(plain),
                f"{a}.rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
                f"{a}.rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
            }
        return values


def architecture_of(config: dict[str, Any]) -> Architecture:
    """What llama.cpp calls the model of a config.json. Raises ModelError for one that it cannot be told of."""
    if config.get("is_encoder_decoder"):
        raise ModelError("--gguf: an encoder-decoder has no counterpart in gguf; leave --gguf out, or train a decoder")
    try:
        settings = decoder_settings_from_hf(config)
    except ModelError as error:
        raise ModelError(
            f"--gguf: {error}; leave --gguf out, or convert the result with llama.cpp's own tool"
        ) from error
    scaling = settings.rope_scaling
    kind = "default" if scaling is None else scaling.rope_type
    family = str(config.get("model_type") or config["architectures"][0])
    name = "qwen3" if settings.qk_norm else "qwen2" if family in ("qwen2", "Qwen2ForCausalLM") else "llama"
    if name == "qwen2" and kind == "llama3":
        name = "llama"  # has the biases too, and reads the factors
    longest, window = settings.max_position_embeddings, settings.sliding_window
    if window is not None and longest is not None and window < longest:
        raise _refused(f"a sliding window ({window} of {longest} positions)", name, "model.sliding_window=null")
    if kind == "dynamic":
        raise _refused("the rope type dynamic", name, "rope type yarn or linear")
    if kind == "llama3" and name == "qwen3":
        raise _refused("the rope type llama3", name, "rope type yarn or linear")
    if scaling is not None and kind == "yarn" and not scaling.truncate:
        raise _refused("yarn with truncate=false", name, "truncate=true")
    if name == "qwen3" and settings.attention_bias:
        raise _refused("a bias of the attention", name, "model.attention_bias=false")
    factors = None
    if kind == "llama3":
        plain = rope_frequencies(replace(settings, rope_scaling=None))
        factors = (plain.double() / rope_frequencies(settings).double()).tolist()
    return Architecture(name, settings, factors)


def _refused(what: str, name: str, instead: str) -> ModelError:
    return ModelError(f"--gguf: {what} has no counterpart in gguf's {name}; leave --gguf out, or train with {instead}")

"""What a model's config is in GGUF.

In llama.cpp (October 2026) ``llama`` alone has biases everywhere and a factor for each rotary frequency, and wants the
rows of queries and keys in pairs; ``qwen2`` has biases of q, k and v, ``qwen3`` the norms of queries and keys; none of
them has a sliding window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forgather_cli.config.schema import FAMILIES, DecoderSettings, RopeScaling
from forgather_cli.errors import ModelError
from forgather_cli.gguf.families import HF_FAMILIES, of_transformers
from forgather_cli.gguf.layout import Architecture, Metadata, named, no_counterpart, paired
from forgather_cli.models.pretrained import decoder_settings_from_hf
from forgather_cli.models.rope import attention_factor, rope_frequencies


def architecture_of(config: dict[str, Any]) -> Architecture:
    """What llama.cpp calls the model of a config.json. Raises ModelError for one that it cannot be told of."""
    if config.get("is_encoder_decoder"):
        raise ModelError("--gguf: an encoder-decoder has no counterpart in gguf; leave --gguf out, or train a decoder")
    model_type = config.get("model_type")
    if model_type in HF_FAMILIES:
        return of_transformers(config)
    if model_type is not None and model_type not in FAMILIES:
        raise ModelError(
            f"--gguf: a model of the type {model_type} is not written, only {', '.join([*FAMILIES, *HF_FAMILIES])}; "
            "leave --gguf out, or convert the result with llama.cpp's own tool"
        )
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
        raise no_counterpart(f"a sliding window ({window} of {longest} positions)", name, "model.sliding_window=null")
    if kind == "dynamic":
        raise no_counterpart("the rope type dynamic", name, "rope type yarn or linear")
    if kind == "llama3" and name == "qwen3":
        raise no_counterpart("the rope type llama3", name, "rope type yarn or linear")
    if scaling is not None and kind == "yarn" and not scaling.truncate:
        raise no_counterpart("yarn with truncate=false", name, "truncate=true")
    if scaling is not None and kind == "yarn" and (scaling.beta_fast, scaling.beta_slow) != (32, 1):
        # llama.cpp (October 2026) has these whatever a file says
        betas = f"beta_fast={scaling.beta_fast:g} and beta_slow={scaling.beta_slow:g}"
        raise no_counterpart(f"yarn with {betas}", name, "beta_fast=32 and beta_slow=1")
    if name == "qwen3" and settings.attention_bias:
        raise no_counterpart("a bias of the attention", name, "model.attention_bias=false")
    return of_decoder(name, settings)


def of_decoder(name: str, s: DecoderSettings) -> Architecture:
    """The own decoder, under one of its names."""
    assert s.head_dim is not None
    values: Metadata = {
        "vocab_size": s.vocab_size or 0,
        "context_length": s.max_position_embeddings or 0,
        "embedding_length": s.hidden_size,
        "block_count": s.num_hidden_layers,
        "feed_forward_length": s.mlp_size,
        "attention.head_count": s.num_attention_heads,
        "attention.head_count_kv": s.num_key_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.rms_norm_eps,
        "rope.dimension_count": s.head_dim,
        "rope.freq_base": s.rope_theta,
    }
    factors, scaling = None, s.rope_scaling
    if scaling is not None and scaling.rope_type == "llama3":
        plain = rope_frequencies(replace(s, rope_scaling=None))
        factors = (plain.double() / rope_frequencies(s).double()).tolist()
    elif scaling is not None:
        values |= {"rope.scaling.type": scaling.rope_type, "rope.scaling.factor": float(scaling.factor)}
        if scaling.rope_type == "yarn":
            unscaled = RopeScaling(rope_type="yarn", factor=scaling.factor)
            values |= {
                "rope.scaling.original_context_length": scaling.original_max_position_embeddings
                or s.max_position_embeddings
                or 0,
                # llama.cpp multiplies by yarn's own factor itself
                "rope.scaling.attn_factor": attention_factor(scaling) / attention_factor(unscaled),
            }
    pairs = {"attn_q": paired(s.num_attention_heads), "attn_k": paired(s.num_key_heads)} if name == "llama" else {}
    return Architecture(name, named(name, values), s.tie_word_embeddings, pairs, factors)

"""Classes of the transformers library that llama.cpp computes too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forgather_cli.errors import ModelError
from forgather_cli.gguf.layout import Architecture, Change, Metadata, by_kind, named, no_counterpart, paired
from forgather_cli.models.hf.build import library


def turned(tensor: Tensor) -> Tensor:
    """Of GPT-2's Conv1D."""
    return tensor.t()


def _plus_one(tensor: Tensor) -> Tensor:
    return tensor.float() + 1.0


@dataclass(frozen=True)
class GgufFamily:
    """Models of one ``model_type``."""

    name: str
    """gguf's."""
    has_pairs: bool = False
    """llama.cpp wants the rows of queries and keys in pairs."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    """What gguf calls settings of the config, beside those that all have."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Settings that llama.cpp takes for granted."""


_SILU = {"hidden_act": "silu"}
_NO_BIAS: dict[str, Any] = {"attention_bias": False}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = {**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"}
_ALL_EXPERTS: dict[str, Any] = {**_SILU, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GEMMA_NORMS = (
    "attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "output_norm",
)  # fmt: skip

HF_FAMILIES = {
    "gemma3_text": GgufFamily(
        "gemma3",
        changes=dict.fromkeys(_GEMMA_NORMS, _plus_one),
        keys={"attention.sliding_window": "sliding_window"},
        only={
            **_NO_BIAS,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
    ),
    "phi3": GgufFamily("phi3", only=_SILU),
    "gpt2": GgufFamily(
        "gpt2",
        changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), turned),
        only={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    "gpt_neox": GgufFamily(
        "gptneox",
        keys={"use_parallel_residual": "use_parallel_residual"},
        only={"hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False},
    ),
    "olmo2": GgufFamily("olmo2", only={**_SILU, **_NO_BIAS}),
    "granite": GgufFamily(
        "granite",
        has_pairs=True,
        keys={
            "logit_scale": "logits_scaling",
            "residual_scale": "residual_multiplier",
            "embedding_scale": "embedding_multiplier",
            "attention.scale": "attention_multiplier",
        },
        only=_SILU,
    ),
    "smollm3": GgufFamily("smollm3", has_pairs=True, only={**_SILU, **_NO_BIAS, "mlp_bias": False}),
    "qwen3_moe": GgufFamily("qwen3moe", keys=_QWEN_EXPERTS, only={**_ALL_EXPERTS, **_NO_BIAS, "norm_topk_prob": True}),
    "qwen2_moe": GgufFamily(
        "qwen2moe",
        keys={**_QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        only={**_ALL_EXPERTS, "norm_topk_prob": False},
    ),
    "olmoe": GgufFamily("olmoe", keys=_EXPERTS, only={**_SILU, **_NO_BIAS, "norm_topk_prob": False, "clip_qkv": None}),
    "mixtral": GgufFamily("llama", has_pairs=True, keys=_EXPERTS, only=_SILU),
    "stablelm": GgufFamily(
        "stablelm", keys={"use_parallel_residual": "use_parallel_residual"}, only={**_SILU, "qk_layernorm": False}
    ),
    "phi": GgufFamily("phi2", only={"hidden_act": "gelu_new", "qk_layernorm": False}),
    "starcoder2": GgufFamily("starcoder2", only={"hidden_act": "gelu_pytorch_tanh", "use_bias": True}),
    "cohere": GgufFamily(
        "command-r", keys={"logit_scale": "logit_scale"}, only={**_SILU, **_NO_BIAS, "use_qk_norm": False}
    ),
}
"""By model_type."""


def of_transformers(values: dict[str, Any]) -> Architecture:
    """The model of a config.json. Raises ModelError for a setting that llama.cpp does not have."""
    kind = values["model_type"]
    family = HF_FAMILIES[kind]
    try:
        config: Any = library().CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:  # whatever a config class checks: its own kinds of exceptions
        raise ModelError(f"--gguf: config.json: {kind} refused it: {' '.join(str(error).split())}") from error
    for key, wanted in family.only.items():
        if (got := getattr(config, key)) != wanted:
            raise no_counterpart(f"{key}={got!r}", family.name, f"{key}={wanted!r}")
    heads, layers, longest = config.num_attention_heads, config.num_hidden_layers, config.max_position_embeddings
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    window = getattr(config, "sliding_window", None)
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    eps = next(name for name in names if hasattr(config, name))
    found: Metadata = {
        "vocab_size": config.vocab_size,
        "context_length": longest,
        "embedding_length": config.hidden_size,
        "block_count": layers,
        "feed_forward_length": getattr(config, "intermediate_size", None)
        or getattr(config, "n_inner", None)
        or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": key_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        f"attention.layer_norm{'_rms' if 'rms' in eps else ''}_epsilon": float(getattr(config, eps)),
    }
    for key, name in family.keys.items():
        value = getattr(config, name)
        found[key] = float(value) if key.endswith("scale") else value
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if family.name == "gemma3":
        wanted = [f"{'sliding' if (n + 1) % 6 else 'full'}_attention" for n in range(layers)]
        if config.layer_types != wanted:
            raise no_counterpart("such layer_types", family.name, "full attention in each sixth layer alone")
        if config.query_pre_attn_scalar != (config.hidden_size // heads if layers == 62 else width):
            raise no_counterpart(
                f"query_pre_attn_scalar={config.query_pre_attn_scalar}", family.name, f"query_pre_attn_scalar={width}"
            )
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    elif window and window < longest:
        raise no_counterpart(f"a sliding window ({window} of {longest} positions)", family.name, "sliding_window=null")
    if family.name == "smollm3" and config.no_rope_layers != [int((n + 1) % 4 > 0) for n in range(layers)]:
        raise no_counterpart("such no_rope_layers", family.name, "no_rope_layer_interval=4")
    if rope:
        if (kind := rope.get("rope_type", "default")) not in ("default", "linear"):
            raise no_counterpart(f"the rope type {kind}", f"{family.name}, as Forgather writes it,", "rope type linear")
        found["rope.dimension_count"] = int(width * (rope.get("partial_rotary_factor") or 1.0))
        found["rope.freq_base"] = float(rope["rope_theta"])
        if kind == "linear":
            found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    lists = [each for each in config.to_dict().values() if isinstance(each, list) and len(each) == layers]
    period = next(n for n in range(2, layers + 2) if all(each[n:] == each[:-n] for each in lists))
    changes = dict(family.changes)
    if family.has_pairs:
        changes |= {"attn_q": paired(heads), "attn_k": paired(key_heads)}
    if family.name == "gptneox":
        changes["attn_qkv"] = by_kind(heads)
    is_tied = bool(config.tie_word_embeddings)
    return Architecture(family.name, named(family.name, found), is_tied, changes, period=period)

"""Small models of transformers that llama.cpp computes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf_files import QWEN2, STOP, Made, byte_level

from forgather_cli.checkpoint.tensors import write_model_directory
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.gguf.contents import contents_of

_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LAYERS = {"num_hidden_layers": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**_LAYERS, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32},
    "phi3": {"tie_word_embeddings": False},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {"num_key_value_heads": 4},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4,
    },
    "smollm3": {"num_hidden_layers": 4},
    "qwen3_moe": {**_MOE, "head_dim": 32, "norm_topk_prob": True},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 64},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": {"use_qkv_bias": True},
    "phi": {"num_key_value_heads": 4},
    "starcoder2": {},
    "cohere": {"logit_scale": 0.5},
}  # fmt: skip


def made_by_transformers(directory: Path, model_type: str, **changes: Any) -> Made:
    """A random model, its weights large enough for controls to show."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    byte_level(directory, QWEN2)
    tokenizer = load_tokenizer(str(directory))
    ids = [tokenizer.encode(token)[0] for token in STOP]
    own = {} if model_type == "gpt2" else _SHAPE
    special = {"bos_token_id": None, "eos_token_id": ids[0], "pad_token_id": None}
    config = CONFIG_MAPPING[model_type](
        **{**own, **special, "vocab_size": tokenizer.vocab_size, **FAMILIES[model_type], **changes}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    tokenizer_config = (directory / "tokenizer_config.json").read_text()
    model.save_pretrained(directory)  # experts one by one, as in most directories
    if model_type == "qwen3_moe":  # as in a checkpoint of ours
        (directory / "model.safetensors").unlink()
        write_model_directory(directory, model.state_dict())
    (directory / "tokenizer_config.json").write_text(tokenizer_config)
    return Made(directory, tokenizer, ids, contents_of(directory, tokenizer, ids, {"general.name": "made"}))

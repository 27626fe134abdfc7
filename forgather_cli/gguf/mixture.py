"""Which type each tensor of a file gets: for K-quants by llama.cpp's own rules, as of October 2026.

https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp: ``tensor_allows_quantization``,
``llama_tensor_get_type_impl`` and ``tensor_type_fallback``, without what no architecture here has. What those count is
the number of a block: each block here has one matrix of values, and one ``ffn_down`` or several of experts.
"""

from __future__ import annotations

import math
import re

from forgather_cli.gguf.ggml import block_of
from forgather_cli.gguf.layout import Architecture
from forgather_cli.gguf.options import MIXTURES, GgufType, StoredType

_FALLBACK: dict[StoredType, StoredType] = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_NOT_QUANTIZED = re.compile(r"(_norm|ffn_gate_inp|^position_embd)\.weight")


def plain_type(shape: tuple[int, ...], wanted: GgufType) -> StoredType:
    """In a file of one type: fp32 for what is no matrix, fp16 for rows that blocks do not divide."""
    assert wanted in ("q8_0", "f16", "bf16", "f32")
    if len(shape) < 2:
        return "f32"
    return "f16" if wanted == "q8_0" and shape[-1] % 32 else wanted


def stored_type(model: Architecture, name: str, shape: tuple[int, ...], wanted: GgufType) -> StoredType:
    """Of a tensor by its name in the file and its shape in torch's order."""
    if wanted not in MIXTURES:
        return plain_type(shape, wanted)
    if math.prod(shape[:-1]) < 2 or _NOT_QUANTIZED.search(name):  # of one row is no matrix to llama.cpp
        return "f32"
    kind = _by_name(model, name, wanted)
    for _ in range(2):
        if shape[-1] % block_of(kind)[0]:
            kind = _FALLBACK.get(kind, "f16")
    return kind


def _by_name(model: Architecture, name: str, wanted: GgufType) -> StoredType:
    default = MIXTURES[wanted]
    if name == "output.weight" or (model.is_tied and name == "token_embd.weight"):
        return "q6_k"
    layers, experts, heads, key_heads = (
        model.metadata.get(f"{model.name}.{key}", 0)
        for key in ("block_count", "expert_count", "attention.head_count", "attention.head_count_kv")
    )
    assert isinstance(layers, int)
    block = re.match(r"blk\.(\d+)\.", name)
    number, eighth = int(block[1]) if block else 0, layers // 8
    more = number < eighth or number >= 7 * layers // 8 or (number - eighth) % 3 == 2
    better: StoredType = "q6_k" if more and wanted in ("q4_k_m", "q5_k_m") else default
    if re.search(r"attn_(v|qkv)\.weight", name):
        if experts == 8:
            return "q8_0"
        # llama.cpp's LLM_TYPE_70B
        is_70b = layers == 80 and (model.name == "qwen2" or (model.name == "llama" and heads != key_heads))
        return "q5_k" if better == "q4_k" and is_70b else better
    if experts == 8 and "attn_k.weight" in name:
        return "q8_0"
    if experts == 8 and "attn_output.weight" in name and wanted == "q4_k_m":
        return "q5_k"
    return better if "ffn_down" in name else default

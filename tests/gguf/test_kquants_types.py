"""Which type a tensor of a K-quant gets, and what llama.cpp's quantizer makes of its numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from forgather_cli.gguf import ggml
from forgather_cli.gguf.layout import Architecture
from forgather_cli.gguf.mixture import stored_type
from forgather_cli.gguf.options import GgufType, StoredType
from forgather_cli.gguf.prove import _ROOT_MEAN_SQUARE
from forgather_cli.gguf.write import quantized

Shapes = dict[str, tuple[int, ...]]


def model(name: str, layers: int, *, tied: bool = False, key_heads: int = 2, **more: int) -> Architecture:
    counts = {"block_count": layers, "attention.head_count": 8, "attention.head_count_kv": key_heads, **more}
    return Architecture(name, {f"{name}.{key}": value for key, value in counts.items()}, tied, {})


def decoder(layers: int, hidden: int, mlp: int, keys: int, *, tied: bool = False, biases: bool = False) -> Shapes:
    """The tensors of a Llama, or a Qwen2."""
    shapes: Shapes = {"token_embd.weight": (32000, hidden), "output_norm.weight": (hidden,)}
    shapes |= {} if tied else {"output.weight": (32000, hidden)}
    for n in range(layers):
        rows = {"attn_q": hidden, "attn_k": keys, "attn_v": keys, "attn_output": hidden, "ffn_gate": mlp, "ffn_up": mlp}
        shapes |= {f"blk.{n}.{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes |= {f"blk.{n}.ffn_down.weight": (hidden, mlp)}
        shapes |= {f"blk.{n}.{name}_norm.weight": (hidden,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{n}.attn_{name}.bias": (keys,) for name in "qkv" if biases}
    return shapes


def types(of: Architecture, shapes: Shapes, wanted: GgufType) -> dict[str, StoredType]:
    return {name: stored_type(of, name, shape, wanted) for name, shape in shapes.items()}


MISTRAL = (model("llama", 32), decoder(32, 4096, 14336, 1024))
LLAMA_70B = (model("llama", 80), decoder(80, 8192, 28672, 1024))
QWEN_HALF_B = (model("qwen2", 24, tied=True), decoder(24, 896, 4864, 128, tied=True, biases=True))


@pytest.mark.parametrize(
    ("of", "wanted", "counts"),
    [
        (MISTRAL, "q4_k_m", {"f32": 65, "q4_k": 193, "q6_k": 33}),
        (MISTRAL, "q5_k_m", {"f32": 65, "q5_k": 193, "q6_k": 33}),
        (MISTRAL, "q6_k", {"f32": 65, "q6_k": 226}),
        (MISTRAL, "q4_0", {"f32": 65, "q4_0": 225, "q6_k": 1}),
        (LLAMA_70B, "q4_k_m", {"f32": 161, "q4_k": 441, "q5_k": 40, "q6_k": 81}),
        (QWEN_HALF_B, "q4_k_m", {"f32": 121, "q5_0": 132, "q8_0": 13, "q4_k": 12, "q6_k": 12}),
    ],
)
def test_files_that_llama_cpp_made(of: Any, wanted: GgufType, counts: dict[str, int]) -> None:
    """As its loader counts the tensors of published files: of Mistral 7B, Llama 2 70B and Qwen2.5 0.5B (the last:
    https://github.com/ollama/ollama/issues/9031)."""
    assert Counter(types(*of, wanted).values()) == counts


BETTER = {
    2: [1],
    8: [0, 3, 6, 7],
    30: [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29],
    80: [*range(10), *range(12, 70, 3), *range(70, 80)],
}


@pytest.mark.parametrize("layers", BETTER)
@pytest.mark.parametrize("wanted", ["q4_k_m", "q5_k_m", "q6_k", "q4_0"])
def test_blocks_that_get_more_bits(layers: int, wanted: GgufType) -> None:
    default = wanted.removesuffix("_m")
    found = types(model("llama", layers, key_heads=8), decoder(layers, 256, 512, 256), wanted)
    better = BETTER[layers] if wanted.endswith("_m") else []
    for name in ("attn_v", "ffn_down"):
        assert [found[f"blk.{n}.{name}.weight"] for n in range(layers)] == [
            "q6_k" if n in better else default for n in range(layers)
        ]
    for name in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert {found[f"blk.{n}.{name}.weight"] for n in range(layers)} == {default}
    assert (found["token_embd.weight"], found["output.weight"]) == (default, "q6_k")


def test_values_of_seventy_billion() -> None:
    """llama.cpp's 70B: 80 layers, of a Llama only where heads share keys, and whatever a Qwen2's heads are."""
    for of, values in (
        (model("llama", 80), "q5_k"), (model("llama", 80, key_heads=8), "q4_k"), (model("llama", 79), "q4_k"),
        (model("qwen2", 80, key_heads=8), "q5_k"), (model("qwen3", 80), "q4_k"),
    ):  # fmt: skip
        assert stored_type(of, "blk.10.attn_v.weight", (256, 256), "q4_k_m") == values
        assert stored_type(of, "blk.10.ffn_down.weight", (256, 256), "q4_k_m") == "q4_k"
    for wanted in ("q5_k_m", "q4_0"):
        assert stored_type(model("llama", 80), "blk.10.attn_v.weight", (256, 256), wanted) == wanted.removesuffix("_m")


def test_eight_experts() -> None:
    eight, four = (model("llama", 8, expert_count=count) for count in (8, 4))
    matrix, experts = (256, 256), (8, 512, 256)
    shapes = {
        "attn_v": matrix, "attn_k": matrix, "attn_q": matrix, "attn_output": matrix, "ffn_gate_inp": (8, 256),
        "ffn_gate_exps": experts, "ffn_down_exps": (8, 256, 512), "ffn_gate_inp_shexp": (1, 256),
    }  # fmt: skip
    for of, wanted, expected in (
        (eight, "q4_k_m", ["q8_0", "q8_0", "q4_k", "q5_k", "f32", "q4_k", "q6_k", "f32"]),
        (eight, "q5_k_m", ["q8_0", "q8_0", "q5_k", "q5_k", "f32", "q5_k", "q6_k", "f32"]),
        (eight, "q4_0", ["q8_0", "q8_0", "q4_0", "q4_0", "f32", "q4_0", "q4_0", "f32"]),
        (four, "q4_k_m", ["q6_k", "q4_k", "q4_k", "q4_k", "f32", "q4_k", "q6_k", "f32"]),
    ):
        found = types(of, {f"blk.3.{name}.weight": shape for name, shape in shapes.items()}, wanted)  # type: ignore[arg-type]
        assert list(found.values()) == expected


def test_gpt_2() -> None:
    """Queries, keys and values in one matrix count as values; its positions and biases stay as they are."""
    of = model("gpt2", 8, tied=True)
    shapes: Shapes = {
        "token_embd.weight": (400, 256), "position_embd.weight": (64, 256), "output_norm.weight": (256,),
        "blk.0.attn_qkv.weight": (768, 256), "blk.0.attn_qkv.bias": (768,), "blk.1.attn_qkv.weight": (768, 256),
        "blk.1.ffn_down.weight": (256, 1024),
    }  # fmt: skip
    assert list(types(of, shapes, "q4_k_m").values()) == ["q6_k", "f32", "f32", "q6_k", "f32", "q4_k", "q4_k"]
    assert list(types(of, shapes, "q5_k_m").values()) == ["q6_k", "f32", "f32", "q6_k", "f32", "q5_k", "q5_k"]


@pytest.mark.parametrize(
    ("wanted", "rows", "expected"),  # of queries, of better values, of an untied embedding, of the head
    [
        ("q4_k_m", 64, ["q5_0", "q8_0", "q5_0", "q8_0"]),
        ("q5_k_m", 96, ["q5_1", "q8_0", "q5_1", "q8_0"]),
        ("q6_k", 96, ["q8_0", "q8_0", "q8_0", "q8_0"]),
        ("q4_0", 96, ["q4_0", "q4_0", "q4_0", "q8_0"]),
        ("q4_k_m", 40, ["f16", "f16", "f16", "f16"]),
        ("q5_k_m", 40, ["f16", "f16", "f16", "f16"]),
        ("q6_k", 40, ["f16", "f16", "f16", "f16"]),
        ("q4_0", 40, ["f16", "f16", "f16", "f16"]),
        ("q8_0", 40, ["f16", "f16", "f16", "f16"]),
        ("q8_0", 96, ["q8_0", "q8_0", "q8_0", "q8_0"]),
    ],
)
def test_rows_that_blocks_do_not_divide(wanted: GgufType, rows: int, expected: list[str]) -> None:
    names = ["blk.1.attn_q.weight", "blk.1.attn_v.weight", "token_embd.weight", "output.weight"]
    assert [stored_type(model("llama", 2), name, (64, rows), wanted) for name in names] == expected
    tied = stored_type(model("llama", 2, tied=True), "token_embd.weight", (64, rows), wanted)
    assert tied == expected[3]


def drawn() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((64, 512))
    outliers = normal * 10.0 ** rng.uniform(-3, 0, (64, 512))
    outliers[:, ::32] = 1.0
    halves = np.full((64, 512), 1 / 16)
    halves[:, ::32] = 1.0
    found = {
        "normal": normal, "heavy": rng.standard_t(2, (64, 512)), "one sign": abs(normal), "outliers": outliers,
        "halves": halves, "small": normal * 1e-8, "zeros": np.where(np.arange(64)[:, None] % 2, normal, 0.0),
        "large": normal * 1e4,
    }  # fmt: skip
    return {name: values.astype(np.float32) for name, values in found.items()}


@pytest.mark.parametrize("kind", ["q8_0", *_ROOT_MEAN_SQUARE])
def test_the_quantizer(kind: StoredType) -> None:
    """Read by gguf as by the library, bit for bit; within the bound; the bytes of gguf's own quantizer."""
    import gguf

    raw = gguf.GGMLQuantizationType[kind.upper()]
    for name, values in drawn().items():
        stored = ggml.quantize(values, kind)
        back = gguf.quants.dequantize(stored, raw)
        theirs = ggml.dequantize(stored, kind, values.size).reshape(back.shape)
        assert (back.view(np.uint32) == theirs.view(np.uint32)).all()
        most, least = _ROOT_MEAN_SQUARE.get(kind, (0.022, 127 * 2**-25))
        error, size = (float(np.sqrt((each.astype(np.float64) ** 2).mean())) for each in (back - values, values))
        assert error <= most * size + least, name
        if name == "normal":
            assert error > most * size / 12
        if kind in ("q8_0", "q5_1", "q5_0", "q4_0"):
            assert (stored == gguf.quants.quantize(values, raw)).all(), name
        assert (quantized(torch.from_numpy(values), kind) == stored).all()
        assert (quantized(torch.from_numpy(values).reshape(4, 16, 512), kind) == stored.reshape(4, 16, -1)).all()

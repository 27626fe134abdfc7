"""The types of a GGUF file, and what is told of one. No torch here."""

from __future__ import annotations

from typing import Any, Literal

GgufType = Literal["q8_0", "f16", "bf16", "f32", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]
StoredType = Literal["q8_0", "f16", "bf16", "f32", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_0"]
"""Of a tensor in a file, as gguf calls it."""
GGUF_TYPES: dict[GgufType, str] = {
    "q8_0": "MOSTLY_Q8_0", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "f32": "ALL_F32",
    "q6_k": "MOSTLY_Q6_K", "q5_k_m": "MOSTLY_Q5_K_M", "q4_k_m": "MOSTLY_Q4_K_M", "q4_0": "MOSTLY_Q4_0",
}  # fmt: skip
"""Names as typed, and what gguf calls a file of them."""
MIXTURES: dict[GgufType, StoredType] = {"q6_k": "q6_k", "q5_k_m": "q5_k", "q4_k_m": "q4_k", "q4_0": "q4_0"}
"""Files whose tensors are of several types, with that of most of them."""
MAX_RATIO: dict[GgufType, float] = {"q8_0": 1.02, "q6_k": 1.03, "q5_k_m": 1.06, "q4_k_m": 1.2, "q4_0": 1.5}
"""How many times the source's perplexity a file may have where ``--max-ratio`` says nothing; the better types first. A
model of 135 million parameters has 1.09 in q4_k_m and 1.24 in q4_0, larger ones less: twice that above 1. q5_k_m and
q6_k, of a half and a quarter of the rounding, have what 256 tokens may tell wrongly besides."""


def told(proof: dict[str, Any]) -> str:
    """Of a file's entry in the report, for people."""
    if proof["type"] not in MIXTURES:
        return (
            f"log-probabilities differ by at most {proof['max_log_prob_difference']:.3g} in {proof['read_by']} "
            f"(bound {proof['bound']:.3g}), perplexity ratio {proof['perplexity_ratio']:.5f}"
        )
    stored = ", ".join(f"{count} {kind}" for kind, count in proof["stored"].items())
    return (
        f"perplexity {proof['perplexity']:.5g} in {proof['read_by']}, {proof['perplexity_f16']:.5g} in f16, ratio "
        f"{proof['perplexity_ratio']:.4f} (bound {proof['bound']:g}, {proof['targets']} tokens); tensors: {stored}"
    )

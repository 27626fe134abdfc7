"""The types of a GGUF file. No torch here."""

from __future__ import annotations

from typing import Literal

GgufType = Literal["q8_0", "f16", "bf16", "f32"]
GGUF_TYPES: dict[GgufType, str] = {"q8_0": "MOSTLY_Q8_0", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "f32": "ALL_F32"}
"""Names as typed, and what gguf calls a file of them."""

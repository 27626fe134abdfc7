"""Options of the group ``precision``."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Tag

from forgather_cli.config.schema.base import PositiveFloat, PositiveInt, by_type, settings

QuantizeRecipe = Literal[
    "int8-weight-only",
    "int8-dynamic-act-int4-weight",
    "int4-weight-only",
    "int8-dynamic-act-int8-weight",
    "float8-dynamic-act-float8-weight",
]
"""What ``finalize --quantize`` takes; those that ``precision=qat`` can train for have a fake-quantized form."""

GROUP_SIZES: dict[str, int] = {"int8-dynamic-act-int4-weight": 32, "int4-weight-only": 128}
"""Recipe -> how many weights of a row share a scale, where that is a setting; others have one scale per row."""


@settings
class FP32Settings:
    type: Literal["fp32"] = "fp32"


@settings
class BF16Settings:
    """bf16 autocast; parameters, moments and loss stay fp32."""

    type: Literal["bf16"] = "bf16"


@settings
class BF16TrueSettings:
    """Parameters, gradients and moments in bf16; norms of gradients and the loss are summed in fp32.

    An update or a change of a moment below 1/512 of the number is lost to rounding.
    """

    type: Literal["bf16_true"] = "bf16_true"


@settings
class FP16Settings:
    """fp16 autocast with loss scaling; parameters and moments stay fp32. Steps that overflow are skipped."""

    type: Literal["fp16"] = "fp16"
    init_scale: PositiveFloat = 65536.0  # first factor of the loss; halved by each step that overflows
    growth_interval: PositiveInt = 2000  # steps without overflow after which the factor doubles


@settings
class FP8Settings:
    """Linear layers multiply in float8 (torchao), the rest as under bf16; parameters stay fp32."""

    type: Literal["fp8"] = "fp8"
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    emulate: bool | None = None  # null: where the device has no float8
    exclude: list[str] = field(default_factory=lambda: ["lm_head"])  # regular expressions of layers left as they are


@settings
class QATSettings:
    """Quantization-aware training: weights (and activations) are rounded in the forward as the recipe will."""

    type: Literal["qat"] = "qat"
    qat_recipe: Literal[
        "int8-weight-only", "int8-dynamic-act-int4-weight", "int4-weight-only", "int8-dynamic-act-int8-weight"
    ] = "int8-dynamic-act-int4-weight"
    group_size: PositiveInt | None = None  # weights of a row that share a scale; null: GROUP_SIZES
    exclude: list[str] = field(default_factory=lambda: ["lm_head"])  # regular expressions of layers left as they are


PrecisionOption = Annotated[
    Annotated[FP32Settings, Tag("fp32")]
    | Annotated[BF16Settings, Tag("bf16")]
    | Annotated[BF16TrueSettings, Tag("bf16_true")]
    | Annotated[FP16Settings, Tag("fp16")]
    | Annotated[FP8Settings, Tag("fp8")]
    | Annotated[QATSettings, Tag("qat")],
    by_type,
]

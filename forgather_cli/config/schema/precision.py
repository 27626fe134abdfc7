"""Options of the group ``precision``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import MultipleOf

from forgather_cli.config.schema.base import PositiveFloat, PositiveInt, Settings, by_type, only_if, settings

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
_INT4_GROUPS = (32, 64, 128, 256)
"""What the kernels of int4 weights take (torchao 0.18, ``Int4WeightOnlyConfig``)."""


@settings
class AutoSettings(Settings):
    """bf16 where the device multiplies fast in it (CUDA from sm80, CPUs with AVX512-BF16 or AMX), else fp32.

    See precision=bf16. Also fp32 on an Intel whose AMX a virtual machine hides: there bf16 is the slower one.
    Decided when the run starts, which says it, and kept by it: config.yaml has the answer, also for a resume elsewhere.
    """

    type: Literal["auto"] = "auto"


@settings
class FP32Settings(Settings):
    """32-bit floats throughout."""

    type: Literal["fp32"] = "fp32"


@settings
class BF16Settings(Settings):
    """bf16 autocast; parameters, moments and loss stay fp32."""

    type: Literal["bf16"] = "bf16"
    # residual stream: bf16, fp32; null: fp32 under single, ddp and pipeline, bf16 under fsdp2
    stream: Literal["bf16", "fp32"] | None = None

    def problems(self, config: Any) -> Iterator[str]:
        held = getattr(config.trainer, "param_dtype", None) or "bf16"
        if getattr(config.trainer, "shards_parameters", False) and self.stream not in (None, held):
            yield (
                f"precision.stream: where weights are sharded (trainer=fsdp2, or pipeline with shard above 1) it is "
                f"{held} as they are, got {self.stream}; set precision.stream=null or trainer=ddp"
            )


@settings
class BF16TrueSettings(Settings):
    """Parameters, gradients and moments in bf16: half the memory; small updates are lost to rounding.

    A weight changes only by more than 1/512 of itself, and a moment likewise: prefer a learning rate above 1e-4 and
    betas up to 0.99. Values are drawn or read in fp32 and rounded once; gradient norms and the loss are summed in fp32.
    """

    type: Literal["bf16_true"] = "bf16_true"


@settings
class FP16Settings(Settings):
    """fp16 autocast with loss scaling; parameters and moments stay fp32 (single, ddp, fsdp2); for GPUs without bf16.

    A step whose gradients overflow is skipped: it counts (skipped_steps in the logs), but weights and schedule stay.
    """

    type: Literal["fp16"] = "fp16"
    init_scale: PositiveFloat = 65536.0  # first factor of the loss; halved by each step that overflows
    growth_interval: PositiveInt = 2000  # steps in a row without overflow after which the factor doubles

    def problems(self, config: Any) -> Iterator[str]:
        if config.fuse_optim_with_backward:
            yield (
                "fuse_optim_with_backward: steps before anyone knows whether gradients of precision=fp16 overflowed; "
                "set precision=bf16 or fuse_optim_with_backward=false"
            )


@settings
class _Converting(Settings):
    """Linear layers are replaced by others."""

    type: str
    # regular expressions of layers that are left as they are
    exclude: list[str] = field(default_factory=lambda: ["lm_head"])

    def problems(self, config: Any) -> Iterator[str]:
        excludes_head = False
        for pattern in self.exclude:
            try:
                excludes_head |= re.search(pattern, "lm_head") is not None
            except re.error as error:
                excludes_head = True  # perhaps
                yield f"precision.exclude: not a regular expression ({error}), got {pattern!r}; mend it"
        if getattr(config.loss, "applies_head", False) and not excludes_head:
            yield (
                f"precision.exclude: loss={config.loss.type} multiplies with the head's weight itself, which "
                f"precision={self.type} does not change; set precision.exclude=[lm_head] or loss=cross_entropy"
            )


@settings
class FP8Settings(_Converting):
    """Linear layers multiply in float8 (torchao, pip install 'forgather[quantize]'), the rest as under bf16."""

    type: Literal["fp8"] = "fp8"
    # one scale per: tensorwise (tensor), rowwise, rowwise_with_gw_hp (row; weight gradients bf16)
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    # layers with a size that is no multiple of it are left as they are; itself a multiple of 16
    fp8_dim_alignment: Annotated[PositiveInt, MultipleOf(16)] = 16
    # true: compute in bf16 what float8 would give, on any device; null: where there is no float8
    emulate: bool | None = None

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if self.emulate is False and config.device == "cpu":
            yield "emulate: device=cpu does not multiply in float8, got false; set emulate=null"


@settings
class QATSettings(_Converting):
    """Quantization-aware training (torchao): the forward rounds as the recipe of finalize --quantize will."""

    type: Literal["qat"] = "qat"
    qat_recipe: Literal[
        "int8-weight-only", "int8-dynamic-act-int4-weight", "int4-weight-only", "int8-dynamic-act-int8-weight"
    ] = "int8-dynamic-act-int4-weight"  # or int8-weight-only, int4-weight-only, int8-dynamic-act-int8-weight
    # weights of a row that share a scale, of the two int4 recipes; null: 32 and 128
    group_size: Annotated[PositiveInt | None, only_if("precision.qat_recipe", *GROUP_SIZES)] = None

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        size, recipe = self.group_size, self.qat_recipe
        if size is None:
            return
        if size < 2:
            yield f"group_size: must be at least 2, got {size}; set group_size=null for the recipe's own"
        elif recipe == "int4-weight-only" and size not in _INT4_GROUPS:
            known = ", ".join(map(str, _INT4_GROUPS))
            yield f"group_size: qat_recipe={recipe} takes one of {known}, got {size}; set one of them"


PrecisionOption = Annotated[
    AutoSettings | FP32Settings | BF16Settings | BF16TrueSettings | FP16Settings | FP8Settings | QATSettings,
    by_type,
]

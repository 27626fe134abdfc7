"""Options of the group ``precision``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MultipleOf

from forgather_cli.config.schema.base import Option, PositiveFloat, PositiveInt, by_type, only_if, settings

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


_Half = Literal["bf16", "fp16"]


class PrecisionSettings(Option):
    """What a run computes in, and keeps its parameters in: fp32, but for what the facts say.

    One that changes layers has a ``maker``, ``(model, settings, device)`` -> lines for the log: it changes ``model``
    (on meta too) in place, to be run on ``device``; names and shapes of parameters stay.
    """

    autocast: ClassVar[_Half | None] = None
    """What fp32 weights, and what enters them, are rounded to where they are multiplied."""
    parameters: ClassVar[_Half | None] = None
    """What parameters, and with them gradients and moments, are made in; None: what their model says."""
    scales_loss: ClassVar[bool] = False
    """Small gradients would vanish: ``arguments()`` are those of ``precision.scaling.LossScaler``."""
    is_open: ClassVar[bool] = False
    """The machine decides which of the others it is."""

    @property
    def is_fp32(self) -> bool:
        """Whether all is computed in fp32, and nothing is rounded."""
        return not (self.autocast or self.parameters or self.maker or self.is_open)

    @property
    def rounds_stream(self) -> bool:
        """Whether the residual stream is rounded to bf16."""
        return False

    @property
    def trained_for(self) -> tuple[QuantizeRecipe, dict[str, Any]] | None:
        """The recipe of ``finalize --quantize`` that weights are trained for, and how it is to treat layers."""
        return None


@settings
class AutoSettings(PrecisionSettings):
    """bf16 where the device multiplies fast in it (CUDA from sm80, CPUs with AVX512-BF16 or AMX), else fp32.

    See precision=bf16. Also fp32 on an Intel whose AMX a virtual machine hides: there bf16 is the slower one.
    Decided when the run starts, which says it, and kept by it: config.yaml has the answer, also for a resume elsewhere.
    """

    is_open: ClassVar[bool] = True

    type: Literal["auto"] = "auto"


@settings
class FP32Settings(PrecisionSettings):
    """32-bit floats throughout."""

    type: Literal["fp32"] = "fp32"


@settings
class BF16Settings(PrecisionSettings):
    """bf16 autocast; parameters, moments and loss stay fp32."""

    autocast: ClassVar[_Half | None] = "bf16"

    type: Literal["bf16"] = "bf16"
    # residual stream: bf16, fp32; null: fp32 under single, ddp and pipeline, bf16 under fsdp2
    stream: Literal["bf16", "fp32"] | None = None

    @property
    def rounds_stream(self) -> bool:
        return self.stream == "bf16"

    def problems(self, config: Any) -> Iterator[str]:
        held = config.trainer.param_dtype or "bf16"
        if config.trainer.shards_parameters and self.stream not in (None, held):
            yield (
                f"precision.stream: where weights are sharded (trainer=fsdp2, or pipeline with shard above 1) it is "
                f"{held} as they are, got {self.stream}; set precision.stream=null or trainer=ddp"
            )


@settings
class BF16TrueSettings(PrecisionSettings):
    """Parameters, gradients and moments in bf16: half the memory; small updates are lost to rounding.

    A weight changes only by more than 1/512 of itself, and a moment likewise: prefer a learning rate above 1e-4 and
    betas up to 0.99. Values are drawn or read in fp32 and rounded once; gradient norms and the loss are summed in fp32.
    """

    parameters: ClassVar[_Half | None] = "bf16"

    type: Literal["bf16_true"] = "bf16_true"


@settings
class FP16Settings(PrecisionSettings):
    """fp16 autocast with loss scaling; parameters and moments stay fp32 (single, ddp, fsdp2); for GPUs without bf16.

    A step whose gradients overflow is skipped: it counts (skipped_steps in the logs), but weights and schedule stay.
    """

    autocast: ClassVar[_Half | None] = "fp16"
    scales_loss: ClassVar[bool] = True

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
class _Converting(PrecisionSettings):
    """Linear layers are replaced by others."""

    needs: ClassVar[tuple[str, ...]] = ("quantize", "torchao")

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
        if config.loss_applies_head and not excludes_head:
            yield (
                f"precision.exclude: loss={config.loss.type} multiplies with the head's weight itself, which "
                f"precision={self.type} does not change; set precision.exclude=[lm_head] or loss=cross_entropy"
            )


@settings
class FP8Settings(_Converting):
    """Linear layers multiply in float8 (torchao, pip install 'forgather[quantize]'), the rest as under bf16."""

    maker: ClassVar[str] = "forgather_cli.quantized.convert:to_float8"
    autocast: ClassVar[_Half | None] = "bf16"

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

    maker: ClassVar[str] = "forgather_cli.quantized.convert:to_rounded"

    type: Literal["qat"] = "qat"
    qat_recipe: Literal[
        "int8-weight-only", "int8-dynamic-act-int4-weight", "int4-weight-only", "int8-dynamic-act-int8-weight"
    ] = "int8-dynamic-act-int4-weight"  # or int8-weight-only, int4-weight-only, int8-dynamic-act-int8-weight
    # weights of a row that share a scale, of the two int4 recipes; null: 32 and 128
    group_size: Annotated[PositiveInt | None, only_if(".qat_recipe", *GROUP_SIZES)] = None

    @property
    def trained_for(self) -> tuple[QuantizeRecipe, dict[str, Any]] | None:
        return self.qat_recipe, {"group_size": self.group_size, "exclude": self.exclude}

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


PrecisionOption = Annotated[PrecisionSettings, by_type]

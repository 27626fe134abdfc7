"""Options of the group ``loss``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from forgather_cli.config.schema.base import NonNegative, PositiveInt, Probability, Settings, Target, by_type, settings


class _Loss(Settings):
    applies_head: ClassVar[bool] = False
    """Multiplies with the head's weight itself, so that the logits never exist."""


class _KernelLoss(_Loss):
    """Computed by an optional package, on GPUs; ``device=auto`` is known to the ranks alone, who say so themselves."""

    applies_head: ClassVar[bool] = True
    type: str

    def problems(self, config: Any) -> Iterator[str]:
        if config.trainer.splits_backward:
            yield (
                f"loss: the kernels of {self.type} have one backward for inputs and weights, which schedule="
                f"{config.trainer.schedule} splits; set loss=linear_cross_entropy or schedule=1F1B"
            )


@settings
class _Smoothed(_Loss):
    z_loss: NonNegative = 0.0
    label_smoothing: Probability = 0.0


@settings
class AutoLossSettings(_Smoothed):
    """The fastest of the others on the device: decided when the run starts, and kept by it."""

    type: Literal["auto"] = "auto"


@settings
class CrossEntropySettings(_Smoothed):
    type: Literal["cross_entropy"] = "cross_entropy"


@settings
class LinearCrossEntropySettings(_Smoothed):
    """Head and loss together in chunks, without the tokens x vocabulary logits."""

    applies_head: ClassVar[bool] = True

    type: Literal["linear_cross_entropy"] = "linear_cross_entropy"
    chunk_size: PositiveInt | None = None  # tokens; null: by the memory of the GPU, 256 on a CPU


@settings
class LigerSettings(_KernelLoss, _Smoothed):
    """Head and loss together in the kernels of liger-kernel."""

    type: Literal["liger"] = "liger"

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if config.device.partition(":")[0] not in ("auto", "cuda"):
            yield f"loss: liger needs a CUDA GPU and Triton, got device={config.device}; set loss=linear_cross_entropy"


@settings
class CutCrossEntropySettings(_KernelLoss):
    """Head and loss together in the kernels of cut-cross-entropy, which know neither z_loss nor label_smoothing."""

    type: Literal["cut_cross_entropy"] = "cut_cross_entropy"

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if config.device != "cpu" and config.deterministic:
            yield (
                "deterministic: the kernels of loss=cut_cross_entropy add up in any order; set deterministic=false or "
                "loss=linear_cross_entropy"
            )
        in_fp32 = config.precision.type == "fp32" and config.trainer.param_dtype in (None, "fp32")
        if config.device.partition(":")[0] == "cuda" and in_fp32:
            yield (
                "loss: the backward of cut_cross_entropy takes bf16 or fp16, got precision=fp32; set precision=bf16 or "
                "loss=linear_cross_entropy"
            )


KernelLoss = LigerSettings | CutCrossEntropySettings
"""Options that are computed by an optional package."""
FusedLoss = LinearCrossEntropySettings | KernelLoss
"""Options that apply the head's weight themselves."""

LossOption = Annotated[AutoLossSettings | CrossEntropySettings | FusedLoss | Target, by_type]

"""Options of the group ``loss``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from forgather_cli.config.schema.base import NonNegative, Option, PositiveInt, Probability, Target, by_type, settings


class LossSettings(Option):
    """A loss. Its ``maker`` is a function or a class.

    A function is a ``loss_fn`` (``loss.losses.LossFn``): ``(logits (B, T, V), labels (B, T), **arguments())`` -> mean
    over the targets. It shifts the labels itself where the model is causal. A class is a ``loss.base.Loss``, made with
    ``arguments()``, for whatever is more than a function of logits and labels.
    """

    applies_head: ClassVar[bool] = False
    """Multiplies with the head's weight itself, so that the logits never exist."""
    takes_device: ClassVar[bool] = False
    """The class is made with ``device`` too, a ``torch.device``; None where it is not known."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """What logs and evaluations have of it beside the loss."""


_TRITON = ("triton",) if sys.platform == "linux" else ()
"""The packages of kernels import it, on a CPU too."""


class _KernelLoss(LossSettings):
    """Computed by an optional package, on GPUs; ``device=auto`` is known to the ranks alone, who say so themselves."""

    applies_head: ClassVar[bool] = True

    def problems(self, config: Any) -> Iterator[str]:
        if config.trainer.splits_backward:
            yield (
                f"loss: the kernels of {self.type} have one backward for inputs and weights, which schedule="
                f"{config.trainer.schedule} splits; set loss=linear_cross_entropy or schedule=1F1B"
            )


@settings
class _Smoothed(LossSettings):
    maker: ClassVar[str] = "forgather_cli.loss.losses:CrossEntropy"

    z_loss: NonNegative = 0.0  # weight of the squared log-partition term
    label_smoothing: Probability = 0.0  # probability mass spread over the vocabulary


@settings
class AutoLossSettings(_Smoothed):
    """The one that suits the device: on a CPU cross_entropy, on a GPU what never holds the logits of all tokens in
    fp32.

    With torch_compile, an adapter or a class that is not ours cross_entropy; else liger where it is installed, or
    linear_cross_entropy. Decided when the run starts, which says it, and kept by it.
    """

    type: Literal["auto"] = "auto"


@settings
class CrossEntropySettings(_Smoothed):
    """Cross-entropy of the next token on full logits."""

    type: Literal["cross_entropy"] = "cross_entropy"


@settings
class LinearCrossEntropySettings(_Smoothed):
    """Head and cross-entropy together in chunks, without the tokens x vocabulary logits."""

    maker: ClassVar[str] = "forgather_cli.loss.losses:LinearCrossEntropy"
    applies_head: ClassVar[bool] = True
    takes_device: ClassVar[bool] = True

    type: Literal["linear_cross_entropy"] = "linear_cross_entropy"
    # tokens whose logits exist at a time; null: by the memory of the GPU, 256 on a CPU
    chunk_size: PositiveInt | None = None


@settings
class LigerSettings(_KernelLoss, _Smoothed):
    """Head and cross-entropy in Liger's kernels; needs a CUDA GPU, and pip install 'forgather[kernels]'."""

    maker: ClassVar[str] = "forgather_cli.loss.kernels:Liger"
    takes_device: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("kernels", "liger-kernel", *_TRITON)

    type: Literal["liger"] = "liger"

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if config.device.partition(":")[0] not in ("auto", "cuda"):
            yield f"loss: liger needs a CUDA GPU and Triton, got device={config.device}; set loss=linear_cross_entropy"


@settings
class CutCrossEntropySettings(_KernelLoss):
    """Head and cross-entropy in Cut Cross-Entropy's kernels, without logits; needs pip install 'forgather[kernels]'.

    With CUDA it needs precision=bf16 or fp16; elsewhere torch compiles it, with logits.
    """

    maker: ClassVar[str] = "forgather_cli.loss.kernels:CutCrossEntropy"
    needs: ClassVar[tuple[str, ...]] = ("kernels", "cut-cross-entropy", *_TRITON)

    type: Literal["cut_cross_entropy"] = "cut_cross_entropy"

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if config.device != "cpu" and config.deterministic:
            yield (
                "deterministic: the kernels of loss=cut_cross_entropy add up in any order; set deterministic=false or "
                "loss=linear_cross_entropy"
            )
        in_fp32 = config.precision.is_fp32 and config.trainer.param_dtype in (None, "fp32")
        if config.device.partition(":")[0] == "cuda" and in_fp32:
            yield (
                "loss: the backward of cut_cross_entropy takes bf16 or fp16, got precision=fp32; set precision=bf16 or "
                "loss=linear_cross_entropy"
            )


LossOption = Annotated[LossSettings | Target, by_type]

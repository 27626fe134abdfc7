"""Where the loss kernels of other packages run, as config mistakes where the config says enough."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.schema import (
    Config,
    CutCrossEntropySettings,
    FP32Settings,
    FSDP2Settings,
    LigerSettings,
)


def loss_problems(config: Config) -> Iterator[str]:
    """``device=auto`` is known to the ranks alone: there the losses themselves say so."""
    on_gpu = config.device.partition(":")[0] == "cuda"
    if isinstance(config.loss, LigerSettings) and not on_gpu and config.device != "auto":
        yield f"loss: liger needs a CUDA GPU and Triton, got device={config.device}; set loss=linear_cross_entropy"
    if isinstance(config.loss, CutCrossEntropySettings) and config.device != "cpu" and config.deterministic:
        yield (
            "deterministic: the kernels of loss=cut_cross_entropy add up in any order; set deterministic=false or "
            "loss=linear_cross_entropy"
        )
    if isinstance(config.loss, CutCrossEntropySettings) and on_gpu and _in_fp32(config):
        yield (
            "loss: the backward of cut_cross_entropy takes bf16 or fp16, got precision=fp32; set precision=bf16 or "
            "loss=linear_cross_entropy"
        )


def _in_fp32(config: Config) -> bool:
    trainer = config.trainer
    given = trainer.param_dtype if isinstance(trainer, FSDP2Settings) else None
    return isinstance(config.precision, FP32Settings) and given in (None, "fp32")

"""What ``precision`` cannot be combined with, as config mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from forgather_cli.config.schema import (
    GROUP_SIZES,
    BF16TrueSettings,
    Config,
    DDPSettings,
    FP8Settings,
    FP16Settings,
    FusedLoss,
    PipelineSettings,
    QATSettings,
)

_INT4_GROUPS = (32, 64, 128, 256)
"""What the kernels of int4 weights take (torchao 0.18, ``Int4WeightOnlyConfig``)."""


def precision_problems(config: Config) -> Iterator[str]:
    """Each names the settings and the remedy."""
    if isinstance(config.precision, FP16Settings):
        yield from _fp16(config)
    if isinstance(config.precision, BF16TrueSettings):
        yield from _bf16_true(config)
    if isinstance(config.precision, FP8Settings):
        yield from _fp8(config, config.precision)
        yield from _converted(config, config.precision)
    if isinstance(config.precision, QATSettings):
        yield from _qat(config.precision)
        yield from _converted(config, config.precision)


def _fp16(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if config.fuse_optim_with_backward:
        yield (
            "fuse_optim_with_backward: steps before anyone knows whether gradients of precision=fp16 overflowed; set "
            "precision=bf16 or fuse_optim_with_backward=false"
        )
    if isinstance(trainer, PipelineSettings):
        yield (
            "precision: fp16 scales the loss, which trainer=pipeline does not; set precision=bf16, or trainer=ddp or "
            "fsdp2"
        )
    if isinstance(trainer, DDPSettings) and trainer.post_local_sgd.enabled:
        yield (
            "post_local_sgd.enabled: ranks that train by themselves would leave out different steps under "
            "precision=fp16; set precision=bf16 or post_local_sgd.enabled=false"
        )
    if isinstance(trainer, DDPSettings) and trainer.comm_hook == "powersgd":
        yield (
            "comm_hook: an overflow of precision=fp16 would stay in powersgd's error feedback; set precision=bf16 or "
            "comm_hook=none"
        )


def _bf16_true(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if isinstance(trainer, DDPSettings) and trainer.comm_hook == "fp16_compress":
        yield (
            "comm_hook: fp16_compress makes gradients of precision=bf16_true no smaller and loses the small ones; set "
            "comm_hook=none"
        )


def _fp8(config: Config, precision: FP8Settings) -> Iterator[str]:
    if precision.emulate is False and config.device == "cpu":
        yield "emulate: device=cpu does not multiply in float8, got false; set emulate=null"


def _qat(precision: QATSettings) -> Iterator[str]:
    size, recipe = precision.group_size, precision.qat_recipe
    if size is None:
        return
    if recipe not in GROUP_SIZES:
        with_groups = " or ".join(GROUP_SIZES)
        yield (
            f"group_size: nothing reads it with qat_recipe={recipe}, which has one scale per row; leave group_size out "
            f"or set qat_recipe={with_groups}"
        )
    elif size < 2:
        yield f"group_size: must be at least 2, got {size}; set group_size=null for {GROUP_SIZES[recipe]}"
    elif recipe == "int4-weight-only" and size not in _INT4_GROUPS:
        known = ", ".join(map(str, _INT4_GROUPS))
        yield f"group_size: qat_recipe={recipe} takes one of {known}, got {size}; set one of them"


def _converted(config: Config, precision: FP8Settings | QATSettings) -> Iterator[str]:
    """What both ask of the layers they change."""
    sound = True
    for pattern in precision.exclude:
        try:
            re.compile(pattern)
        except re.error as error:
            sound = False
            yield f"precision.exclude: not a regular expression ({error}), got {pattern!r}; mend it"
    if (
        isinstance(config.loss, FusedLoss)
        and sound
        and not any(re.search(pattern, "lm_head") for pattern in precision.exclude)
    ):
        yield (
            f"precision.exclude: loss={config.loss.type} multiplies with the head's weight itself, which "
            f"precision={precision.type} does not change; set precision.exclude=[lm_head] or loss=cross_entropy"
        )

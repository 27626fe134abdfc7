"""What ``trainer=fsdp2`` cannot do, as config mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.schema import AdafactorSettings, Config, FSDP2Settings, Target


def fsdp2_problems(config: Config, trainer: FSDP2Settings, ranks: int | None) -> Iterator[str]:
    """Each names the settings and the remedy. ``ranks`` is None where only the launch knows."""
    if ranks is not None and ranks % trainer.replicate:
        yield (
            f"replicate: {ranks} ranks cannot be divided into {trainer.replicate} copies of the model; "
            f"set it to a divisor of {ranks}"
        )
    yield from _param_dtype(config, trainer)
    if trainer.block_classes == []:
        yield "block_classes: names no class, got []; set block_classes=null for the model's repeated blocks"
    yield from _adafactor(config)


def _param_dtype(config: Config, trainer: FSDP2Settings) -> Iterator[str]:
    chosen, precision = trainer.param_dtype, config.precision.type
    fitting = {"bf16": "bf16", "bf16_true": "bf16", "fp16": "fp16", "fp8": "bf16", "qat": "fp32"}.get(precision)
    if chosen == "fp16" and fitting != "fp16":
        yield "param_dtype: fp16 needs the loss scaling of precision=fp16; set that, and leave param_dtype out"
    elif chosen is not None and fitting is not None and chosen != fitting:
        yield f"param_dtype: {chosen} contradicts precision={precision}; set precision={chosen} or leave it out"


def _adafactor(config: Config) -> Iterator[str]:
    """Its row and column means would have to be summed over ranks: ``torch.optim.Adafactor`` raises on DTensors."""
    why = "adafactor cannot train parameters of which each rank holds some rows (trainer=fsdp2)"
    if isinstance(config.optimizer, AdafactorSettings):
        yield f"optimizer: {why}; choose optimizer=adamw, or trainer=ddp"
    elif not isinstance(config.optimizer, Target):
        for name, group in config.optimizer.groups.items():
            if isinstance(group.optimizer, AdafactorSettings):
                yield f"optimizer.groups.{name}.optimizer: {why}; choose adamw, or trainer=ddp"

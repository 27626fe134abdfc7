"""What ``trainer=fsdp2`` cannot do, as config mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.schema import AdafactorSettings, BF16Settings, Config, FSDP2Settings, Target


def fsdp2_problems(config: Config, trainer: FSDP2Settings, ranks: int | None) -> Iterator[str]:
    """Each names the settings and the remedy. ``ranks`` is None where only the launch knows."""
    if ranks is not None and ranks % trainer.replicate:
        yield (
            f"replicate: {ranks} ranks cannot be divided into {trainer.replicate} copies of the model; "
            f"set it to a divisor of {ranks}"
        )
    if trainer.param_dtype == "fp16":
        yield "param_dtype: fp16 needs loss scaling, which trainer=fsdp2 does not have; set param_dtype=bf16"
    if trainer.param_dtype == "fp32" and isinstance(config.precision, BF16Settings):
        yield "param_dtype: fp32 contradicts precision=bf16; set precision=fp32 or leave param_dtype out"
    if trainer.block_classes == []:
        yield "block_classes: names no class, got []; set block_classes=null for the model's repeated blocks"
    yield from _adafactor(config)


def _adafactor(config: Config) -> Iterator[str]:
    """Its row and column means would have to be summed over ranks: ``torch.optim.Adafactor`` raises on DTensors."""
    why = "adafactor cannot train parameters of which each rank holds some rows (trainer=fsdp2)"
    if isinstance(config.optimizer, AdafactorSettings):
        yield f"optimizer: {why}; choose optimizer=adamw, or trainer=ddp"
    elif not isinstance(config.optimizer, Target):
        for name, group in config.optimizer.groups.items():
            if isinstance(group.optimizer, AdafactorSettings):
                yield f"optimizer.groups.{name}.optimizer: {why}; choose adamw, or trainer=ddp"

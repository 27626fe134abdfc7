"""What pipeline schedules ask for. Limits of torch.distributed.pipelining's schedules, torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.schema import Config, DecoderSettings, PipelineSettings

ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
ONE_STAGE = ("1F1B", "GPipe")


def stages_per_rank(trainer: PipelineSettings) -> int:
    """Stages on each rank: as set, else one, or two for interleaved and V schedules."""
    return trainer.stages_per_rank or (1 if trainer.schedule in ONE_STAGE else 2)


def pipeline_problems(config: Config, world: int | None) -> list[str]:
    """What the selected schedule cannot do. With ``world`` (ranks) also its limits on stages and n_microbatches."""
    trainer = config.trainer
    assert isinstance(trainer, PipelineSettings)
    problems = [*_compiled(config, trainer), *_stages_per_rank(trainer)]
    if world is not None and not problems:
        problems += _limits(config, trainer, world)
    return problems


def _compiled(config: Config, trainer: PipelineSettings) -> Iterator[str]:
    if config.torch_compile and trainer.schedule in ZERO_BUBBLE:
        yield (
            f"torch_compile: compiled blocks get wrong gradients from schedule={trainer.schedule}, which splits the "
            "backward; set torch_compile=false or schedule=1F1B"
        )


def _stages_per_rank(trainer: PipelineSettings) -> Iterator[str]:
    wanted, schedule = trainer.stages_per_rank, trainer.schedule
    if wanted is None:
        return
    if schedule in ONE_STAGE and wanted != 1:
        needs, remedy = "runs one stage per rank", "leave stages_per_rank out or set schedule=Interleaved1F1B"
    elif schedule in V_SHAPED and wanted != 2:
        needs, remedy = "runs exactly two stages per rank", "leave stages_per_rank out"
    elif schedule not in ONE_STAGE and wanted < 2:
        needs, remedy = "interleaves several stages per rank", "set stages_per_rank=2 or more, or schedule=1F1B"
    else:
        return
    yield f"stages_per_rank: schedule={schedule} {needs}, got {wanted}; {remedy}"


def _limits(config: Config, trainer: PipelineSettings, world: int) -> Iterator[str]:
    """Limits that depend on the number of ranks."""
    if world < 2:
        yield f"trainer: pipeline needs at least 2 ranks, got {world} (nproc_per_node x nnodes); choose trainer=single"
        return
    stages = world * stages_per_rank(trainer)
    yield from _microbatches(trainer, world, stages)
    layers = config.model.num_hidden_layers if isinstance(config.model, DecoderSettings) else None
    if trainer.split != "auto":
        yield from _split(trainer.split, stages, layers)
    elif layers is not None and stages > layers:
        yield (
            f"trainer: {stages} pipeline stages are more than num_hidden_layers={layers}; "
            "take fewer ranks (nproc_per_node) or fewer stages_per_rank"
        )


def _microbatches(trainer: PipelineSettings, world: int, stages: int) -> Iterator[str]:
    schedule, parts = trainer.schedule, trainer.n_microbatches
    if schedule in ("1F1B", "DualPipeV") and parts < stages:
        yield (
            f"n_microbatches: schedule={schedule} with {stages} stages needs at least as many, got {parts}; "
            f"set n_microbatches={stages}"
        )
    rounds = max(1, parts // world)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and parts % rounds:
        yield (
            f"n_microbatches: schedule={schedule} on {world} ranks needs a multiple of {rounds}, got {parts}; "
            f"set n_microbatches={parts // world * world}"
        )


def _split(split: list[int], stages: int, layers: int | None) -> Iterator[str]:
    if len(split) != stages:
        yield f"split: names {len(split)} stages, schedule and ranks make {stages}; name {stages} or set split=auto"
    elif layers is not None and sum(split) != layers:
        yield f"split: adds up to {sum(split)} layers, got num_hidden_layers={layers}; mend it or set split=auto"

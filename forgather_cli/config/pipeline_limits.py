"""What a pipeline's settings ask of each other. Limits of torch.distributed.pipelining's schedules, torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.pipeline_layout import ONE_STAGE, V_SHAPED, ZERO_BUBBLE, layout_problems
from forgather_cli.config.schema import Config, DecoderSettings, KernelLoss, PipelineSettings


def pipeline_problems(config: Config, world: int | None) -> list[str]:
    """What the selected schedule cannot do. With ``world`` (ranks) also its limits on stages and n_microbatches."""
    trainer = config.trainer
    assert isinstance(trainer, PipelineSettings)
    problems = [*_compiled(config, trainer), *_kernels(config, trainer), *_stages_per_rank(trainer)]
    if world is not None and not problems:
        layers = config.model.num_hidden_layers if isinstance(config.model, DecoderSettings) else None
        problems += layout_problems(trainer, layers, world)
    return problems


def _compiled(config: Config, trainer: PipelineSettings) -> Iterator[str]:
    if config.torch_compile and trainer.schedule in ZERO_BUBBLE:
        yield (
            f"torch_compile: compiled blocks get wrong gradients from schedule={trainer.schedule}, which splits the "
            "backward; set torch_compile=false or schedule=1F1B"
        )


def _kernels(config: Config, trainer: PipelineSettings) -> Iterator[str]:
    if isinstance(config.loss, KernelLoss) and trainer.schedule in ZERO_BUBBLE:
        yield (
            f"loss: the kernels of {config.loss.type} have one backward for inputs and weights, which schedule="
            f"{trainer.schedule} splits; set loss=linear_cross_entropy or schedule=1F1B"
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

"""A pipeline's stages: what each holds, and how many micro-batches wait in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgather_cli.config.pipeline_layout import Stage, stage_layout
from forgather_cli.config.schema import Config, PipelineSettings
from forgather_cli.plan.activations import Activations
from forgather_cli.plan.memory import (
    RankMemory,
    gathered_width,
    half_copies,
    rounded_copies,
    shard_of,
    unpacked_bytes,
)
from forgather_cli.plan.parameters import (
    FP32,
    PlannedParameter,
    frozen_bytes,
    gradient_bytes,
    optimizer_bytes,
    weight_bytes,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class PlannedStage:
    """One stage, in numbers. Layers count from 0, ``last_layer`` is one of them."""

    index: int
    rank: int
    """The first of its ranks."""
    ranks: int
    """How many share its parameters."""
    first_layer: int
    last_layer: int
    has_embedding: bool
    has_head: bool
    parameters: int
    """Numbers; a tied weight counts in both of its stages."""
    share: float
    """Of the model's parameters."""


def stages_of(
    trainer: PipelineSettings, build: Callable[[], nn.Module], rows: Sequence[PlannedParameter], world: int
) -> list[tuple[Stage, list[PlannedParameter]]]:
    """Every stage with its parameters; ``build`` makes the whole model without memory.

    Raises ConfigError where the layers cannot be laid out so, ModelError for a model that cannot be cut.
    """
    from forgather_cli.models.stages import num_layers_of, splitter_of, stage_of

    whole, split = build(), None if trainer.split == "auto" else trainer.split
    splitter = splitter_of(whole, trainer.splitter)
    layout = stage_layout(trainer, num_layers_of(whole, split), world)
    stages = []
    for stage in layout:
        part = stage_of(build(), layout, stage.index, splitter)
        names = {name for name, _ in part.named_parameters()}
        stages.append((stage, [row for row in rows if row.name in names]))
    return stages


def by_rank(
    config: Config,
    trainer: PipelineSettings,
    stages: Sequence[tuple[Stage, list[PlannedParameter]]],
    world: int,
    activations: Activations | None,
    tokens: int,
) -> list[RankMemory]:
    """Memory of each rank; ``tokens``: of a micro-batch on its way through the stages.

    A tied weight whose two ends are on one rank (V schedules) is held once. With ``shard`` each rank keeps its rows of
    weights, gradients and moments, and beside them, until the last micro-batch of a schedule step, its stages' whole
    weights and the sums of their whole gradients in fp32 (torch 2.13, ``pipelining/stage.py``).
    """
    memory, shard = [], trainer.shard
    for rank in range(world):
        place = rank // shard
        own = [(stage, rows) for stage, rows in stages if stage.rank == place]
        held = list({row.name: row for _, rows in own for row in rows}.values())
        waiting = in_flight(trainer, place, world // shard)
        each = -(-waiting // len(own))  # spread evenly over a rank's stages
        kept = None
        if activations is not None:
            layers = [(s.layers, s.has_head) for s, _ in own]
            kept = sum(activations.of(held, tokens, loss=loss, in_flight=each) for held, loss in layers)
        if shard > 1:
            whole = sum(row.numel * (gathered_width(config) + FP32 * row.trained) for row in held)
            memory.append(shard_of(config, held, rank, shard, kept, whole + rounded_copies(config, held)))
        else:
            buffers = half_copies(config, held) + unpacked_bytes(config, held)
            sizes = weight_bytes(held), gradient_bytes(held), optimizer_bytes(held)
            memory.append(RankMemory(rank, *sizes, kept, buffers, frozen=frozen_bytes(held)))
    return memory


def in_flight(trainer: PipelineSettings, rank: int, world: int) -> int:
    """Forwards of a rank whose backward is still to come, at most, summed over its stages.

    From the order of torch 2.13's schedules (``distributed/pipelining/schedules.py``), which a test runs through.
    """
    m, v = trainer.n_microbatches, trainer.stages_each
    if (own := trainer.own_schedule) is not None:
        known = own.order(world, v, m).in_flight
        return v * m if known is None else known[rank]
    in_a_round = m // max(1, m // world)
    peak = {
        "GPipe": m,
        "LoopedBFS": v * m,
        "1F1B": world - rank,
        "Interleaved1F1B": (v - 1) * in_a_round + 2 * (world - 1 - rank) + 1,
        "InterleavedZeroBubble": (v - 1) * in_a_round + world,
        "ZBVZeroBubble": 2 * world,
        "DualPipeV": 2 * world + 1,
    }[str(trainer.schedule)]
    return min(peak, v * m)

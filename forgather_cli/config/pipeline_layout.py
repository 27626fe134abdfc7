"""Which layers run where in a pipeline, and how long its ranks wait; for planning too, so without torch.

Legend: n stages, p ranks of a pipeline, v stages per rank, m n_microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forgather_cli.config.schema import PipelineSettings
from forgather_cli.errors import ConfigError


@dataclass(frozen=True)
class Stage:
    """A run of consecutive layers on one rank. Layers count from 0, ``last_layer`` is one of them."""

    index: int
    rank: int
    """In its pipeline: with ``shard`` the ranks from ``rank * shard`` on hold it together."""
    first_layer: int
    last_layer: int
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> range:
        """Their numbers in the whole model."""
        return range(self.first_layer, self.last_layer + 1)

    @property
    def num_layers(self) -> int:
        return self.last_layer - self.first_layer + 1


def stage_layout(settings: PipelineSettings, num_layers: int, world: int) -> list[Stage]:
    """All stages in the order of the model, for ``world`` ranks. Raises ConfigError where there are none."""
    if problems := list(settings.layout_problems(num_layers, world)):
        raise ConfigError(problems)
    ranks = world // settings.shard
    number = ranks * settings.stages_each
    counts = settings.split if settings.split != "auto" else _balanced(settings, num_layers, number)
    own = settings.own_schedule
    # stages go round the ranks; those of V schedules go back as they came
    laps = [divmod(index, ranks) for index in range(number)]
    rank_of = [ranks - 1 - place if settings.is_v_shaped and lap % 2 else place for lap, place in laps]
    if own is not None:
        rank_of = own.order(ranks, settings.stages_each, settings.n_microbatches).rank_of
    stages, first = [], 0
    for index, (count, rank) in enumerate(zip(counts, rank_of, strict=True)):
        stages.append(Stage(index, rank, first, first + count - 1, index == 0, index == number - 1))
        first += count
    return stages


def _balanced(settings: PipelineSettings, num_layers: int, number: int) -> list[int]:
    """Layers per stage, at least one each, so that the heaviest stage is as light as possible.

    The embedding counts as ``input_weight`` layers, the head as ``output_weight``. Of equals the later stage gets the
    layer: under 1F1B an earlier one keeps the activations of more micro-batches.
    """
    counts = [1] * number
    weights = [1.0] * number
    weights[0] += settings.input_weight
    weights[-1] += settings.output_weight
    for _ in range(num_layers - number):
        lightest = min(reversed(range(number)), key=weights.__getitem__)
        counts[lightest] += 1
        weights[lightest] += 1
    return counts


def bubble(settings: PipelineSettings, world: int) -> float | None:
    """The share of its time that a rank waits, 0 to 1, of a schedule step with equal stages and free communication;
    None for a schedule of the user's that does not tell its order.

    Forward, gradient of the inputs and gradient of the weights count as one unit each, so a rank works 3 v m units;
    below is what comes on top. Sources: 1F1B and GPipe, Huang et al. 2019, arXiv:1811.06965; interleaved, Narayanan et
    al. 2021, arXiv:2104.04473, section 2.2; zero bubble, Qi et al. 2023, arXiv:2401.10241; with few micro-batches, and
    DualPipeV, the order of torch 2.13's schedules run through, which a test repeats.
    """
    m, v, p = settings.n_microbatches, settings.stages_each, world
    if (own := settings.own_schedule) is not None:
        return own.order(p, v, m).bubble
    if settings.schedule == "ZBVZeroBubble":
        waits = max(p - 1, 4 * (p - 1) - 2 * (m - 1))
    elif settings.schedule == "DualPipeV":
        waits = p - 1
    elif settings.schedule == "InterleavedZeroBubble":
        waits = max(p - 1 + v * max(p - m, 0), 2 * v * p + 2 * m - 1 - 3 * v * m)
    else:
        waits = 3 * (p - 1 + (v - 1) * max(p - m, 0))
    return waits / (3 * v * m + waits)


def layout_lines(settings: PipelineSettings, stages: Sequence[Stage], parameters: Sequence[int]) -> list[str]:
    """For people: the schedule with its bubble, then each stage; ``parameters`` are the stages' numbers of them."""
    ranks, total, shard = 1 + max(stage.rank for stage in stages), max(sum(parameters), 1), settings.shard
    waits = bubble(settings, ranks)
    lines = [
        f"pipeline: schedule {settings.schedule}, {len(stages)} stages on {ranks * shard} ranks, "
        f"{settings.n_microbatches} micro-batches{'' if waits is None else f', bubble {waits:.1%}'}"
    ]
    for stage, number in zip(stages, parameters, strict=True):
        first, last = stage.first_layer, stage.last_layer
        holds = [f"layer {first}" if first == last else f"layers {first}-{last}"]
        holds = ["embedding"] * stage.has_embedding + holds + ["head"] * stage.has_head
        where = f"ranks {stage.rank * shard}-{(stage.rank + 1) * shard - 1}" if shard > 1 else f"rank {stage.rank}"
        lines.append(
            f"stage {stage.index} on {where}: {', '.join(holds)}; {number:,} parameters ({number / total:.1%})"
        )
    return lines

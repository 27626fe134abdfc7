"""Which layers run where: layouts, balance, bubbles and limits of schedules, and cutting a model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from parity import SCHEDULES
from refusals import case, table
from tiny import decoder
from torch import nn

from forgather_cli.config.pipeline_layout import bubble, layout_lines, stage_layout
from forgather_cli.config.schema import PipelineSettings, Target
from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.models.stages import fresh_models, replace_parameter, tied_names
from forgather_cli.plan.pipeline import in_flight


def counts(num_layers: int, world: int, **changes: Any) -> list[int]:
    return [
        stage.num_layers for stage in stage_layout(PipelineSettings(n_microbatches=16, **changes), num_layers, world)
    ]


def test_stages_go_round_the_ranks_and_those_of_v_schedules_back() -> None:
    def ranks(**changes: Any) -> list[int]:
        return [stage.rank for stage in stage_layout(PipelineSettings(n_microbatches=8, **changes), 8, 4)]

    assert ranks(schedule="1F1B") == [0, 1, 2, 3]
    assert ranks(schedule="Interleaved1F1B") == [0, 1, 2, 3, 0, 1, 2, 3]
    assert ranks(schedule="ZBVZeroBubble") == ranks(schedule="DualPipeV") == [0, 1, 2, 3, 3, 2, 1, 0]


def test_every_layer_is_in_one_stage() -> None:
    for schedule, layers, world in product(SCHEDULES, range(8, 20), (2, 3, 4)):
        stages = stage_layout(PipelineSettings(schedule=schedule, n_microbatches=8), layers, world)
        covered = [layer for stage in stages for layer in range(stage.first_layer, stage.last_layer + 1)]
        assert covered == list(range(layers))
        assert [stage.index for stage in stages] == list(range(len(stages)))
        assert [stage.has_embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
        assert [stage.has_head for stage in stages] == [False] * (len(stages) - 1) + [True]


def test_embedding_and_head_count_as_layers() -> None:
    assert counts(4, 2) == [2, 2]
    assert counts(12, 4) == [2, 3, 4, 3]
    assert counts(12, 4, input_weight=0.0, output_weight=0.0) == [3, 3, 3, 3]
    assert counts(13, 4, input_weight=0.0, output_weight=0.0) == [3, 3, 3, 4]  # the later one keeps fewer activations
    assert counts(12, 4, input_weight=0.0, output_weight=5.0) == [3, 4, 4, 1]
    assert counts(12, 4, split=[5, 1, 1, 5]) == [5, 1, 1, 5]


def test_no_other_division_has_a_lighter_heaviest_stage() -> None:
    def heaviest(layers: tuple[int, ...], before: float, after: float) -> float:
        return max(n + before * (i == 0) + after * (i == len(layers) - 1) for i, n in enumerate(layers))

    for total, before, after in product(range(3, 9), (0.0, 0.5, 2.0), (0.0, 1.0, 3.5)):
        chosen = counts(total, 3, input_weight=before, output_weight=after)
        every = [each for each in product(range(1, total), repeat=3) if sum(each) == total]
        assert heaviest(tuple(chosen), before, after) == min(heaviest(each, before, after) for each in every)


def test_the_report_names_stages_and_shares() -> None:
    stages = stage_layout(PipelineSettings(schedule="ZBVZeroBubble"), 5, 2)
    assert layout_lines(PipelineSettings(schedule="ZBVZeroBubble"), stages, [300, 100, 200, 400]) == [
        "pipeline: schedule ZBVZeroBubble, 4 stages on 2 ranks, 4 micro-batches, bubble 4.0%",
        "stage 0 on rank 0: embedding, layer 0; 300 parameters (30.0%)",
        "stage 1 on rank 1: layer 1; 100 parameters (10.0%)",
        "stage 2 on rank 1: layers 2-3; 200 parameters (20.0%)",
        "stage 3 on rank 0: layer 4, head; 400 parameters (40.0%)",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_formulas_are_what_torchs_schedules_do(schedule: Any) -> None:
    """Given as a class of the user's, a schedule of torch's is asked for its order."""
    torchs = Target(f"torch.distributed.pipelining.schedules.Schedule{schedule}")
    fixed = {"1F1B": (1,), "GPipe": (1,), "ZBVZeroBubble": (2,), "DualPipeV": (2,)}
    for world, parts, each in product((2, 3, 4), (1, 2, 3, 4, 5, 7, 8, 12, 16), fixed.get(schedule, (2, 3))):
        ours, asked = (
            PipelineSettings(schedule=kind, n_microbatches=parts, stages_per_rank=each) for kind in (schedule, torchs)
        )
        assert (ours.stages_each, ours.has_one_stage) == (each, asked.has_one_stage)
        refused = bool(list(asked.layout_problems(None, world)))
        assert refused == bool(list(ours.layout_problems(None, world))), (world, parts, each)
        if refused:
            continue
        waits = bubble(asked, world)
        if waits is None:  # those of one stage per rank tell no order
            waits = (world - 1) / (parts + world - 1)
        elif parts in (2 * world, 4 * world):
            found, expected = ([in_flight(s, rank, world) for rank in range(world)] for s in (ours, asked))
            assert found == expected, (world, parts, each)
        assert bubble(ours, world) == pytest.approx(waits), (world, parts, each)
    assert PipelineSettings(schedule=schedule).splits_backward == PipelineSettings(schedule=torchs).splits_backward


def test_fresh_models_are_equal_and_leave_the_random_state_of_one() -> None:
    torch.manual_seed(1)
    models = fresh_models(lambda: nn.Linear(3, 3))
    first, second = next(models), next(models)
    after = torch.rand(())
    torch.manual_seed(1)
    only = nn.Linear(3, 3)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.weight, only.weight)
    assert after == torch.rand(())


def test_only_first_and_last_stage_may_share() -> None:
    whole = ["a", "b", "c"]
    assert tied_names([{"a": 1, "b": 1}, {}, {"a": 1, "c": 1}], whole) == ["a"]
    assert tied_names([{"a": 1}, {"b": 1}, {"c": 1}], whole) == []


def test_a_given_object_is_refused_on_meta_too() -> None:
    given = nn.Linear(3, 3, device="meta")
    models = fresh_models(lambda: given)
    assert next(models) is given  # one stage: nothing is lost that had a value
    with pytest.raises(ModelError, match="give the Trainer a model_init"):
        next(models)


test_what_is_refused = table(
    case(ConfigError, "3 pipeline stages are more than num_hidden_layers=2", stage_layout, PipelineSettings(), 2, 3),
    case(ConfigError, "needs at least 2 ranks, got 1", stage_layout, PipelineSettings(), 2, 1),
    case(ModelError, r"after cut\(\) no stage of 3 holds b", tied_names, [{"a": 1}, {}, {"c": 1}], ["a", "b", "c"]),
    case(ModelError, r"after cut\(\) stages 1, 2 of 3 hold c",
         tied_names, [{"a": 1}, {"b": 1, "c": 1}, {"c": 1}], ["a", "b", "c"]),
)  # fmt: skip


def test_a_parameter_is_replaced_wherever_it_is_used() -> None:
    model = decoder(tie_word_embeddings=True)
    new = nn.Parameter(torch.zeros_like(model.head.weight))
    replace_parameter(model, "model.embed_tokens.weight", new)
    assert model.head.weight is new
    assert model.get_parameter("model.embed_tokens.weight") is new

"""Which layers run where: layouts, balance, bubbles and limits of schedules, and cutting a model."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import decoder
from torch import nn

from forgather_cli.config.load import load_config
from forgather_cli.config.pipeline_layout import Stage, bubble, layout_lines, stage_layout
from forgather_cli.config.schema import PipelineSettings
from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.models.stages import fresh_models, replace_parameter, splitter_of, tied_names

EVERY = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip


def settings(**changes: Any) -> PipelineSettings:
    return PipelineSettings(**changes)


def counts(num_layers: int, world: int, **changes: Any) -> list[int]:
    return [stage.num_layers for stage in stage_layout(settings(n_microbatches=16, **changes), num_layers, world)]


# ------------------------------------------------------------------------------------------------------------- layout


def test_stages_go_round_the_ranks_and_those_of_v_schedules_back() -> None:
    def ranks(**changes: Any) -> list[int]:
        return [stage.rank for stage in stage_layout(settings(n_microbatches=8, **changes), 8, 4)]

    assert ranks(schedule="1F1B") == [0, 1, 2, 3]
    assert ranks(schedule="Interleaved1F1B") == [0, 1, 2, 3, 0, 1, 2, 3]
    assert ranks(schedule="ZBVZeroBubble") == ranks(schedule="DualPipeV") == [0, 1, 2, 3, 3, 2, 1, 0]


def test_every_layer_is_in_one_stage() -> None:
    for schedule, layers, world in product(EVERY, range(8, 20), (2, 3, 4)):
        stages = stage_layout(settings(schedule=schedule, n_microbatches=8), layers, world)
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
    stages = stage_layout(settings(schedule="ZBVZeroBubble"), 5, 2)
    assert layout_lines(settings(schedule="ZBVZeroBubble"), stages, [300, 100, 200, 400]) == [
        "pipeline: schedule ZBVZeroBubble, 4 stages on 2 ranks, 4 micro-batches, bubble 4.0%",
        "stage 0 on rank 0: embedding, layer 0; 300 parameters (30.0%)",
        "stage 1 on rank 1: layer 1; 100 parameters (10.0%)",
        "stage 2 on rank 1: layers 2-3; 200 parameters (20.0%)",
        "stage 3 on rank 0: layer 4, head; 400 parameters (40.0%)",
    ]


# ----------------------------------------------------------------------------------- limits and bubbles, against torch


def torchs_order(schedule: str, world: int, per_rank: int, n_microbatches: int) -> dict[int, list[Any]]:
    """What torch's schedule lets each rank do, in order. Raises ValueError for what it refuses."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    number = world * per_rank
    stage: Any = SimpleNamespace(
        num_stages=number, group_size=world, group_rank=0, stage_index=0, submod=None, is_first=True, is_last=False
    )
    stages = stage if settings(schedule=schedule).has_one_stage else [stage] * per_rank
    made = get_schedule_class(schedule)(stages, n_microbatches, loss_fn=lambda output, target: output)
    assert made.pipeline_order is not None
    return dict(made.pipeline_order)


def work(actions: list[Any]) -> list[tuple[str, int, int]]:
    """(F, I, W or B = both, stage, micro-batch) of each action that computes."""
    flat = [each for action in actions if action is not None for each in (action.sub_actions or (action,))]
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    named = ((a.computation_type.name, a.stage_index, a.microbatch_index) for a in flat)
    return [(kinds[kind], stage, part) for kind, stage, part in named if kind in kinds]


def one_forward_one_backward(world: int, parts: int) -> dict[int, list[tuple[str, int, int]]]:
    """By hand: torch 2.13's ``Schedule1F1B._get_pipeline_order`` leaves micro-batches out."""
    orders = {}
    for rank in range(world):
        ahead = min(parts, world - rank)
        order = [("F", rank, part) for part in range(ahead)]
        for part in range(parts):
            order.append(("B", rank, part))
            order += [("F", rank, part + ahead)] * (part + ahead < parts)
        orders[rank] = order
    return orders


def waiting(orders: dict[int, list[tuple[str, int, int]]], last: int) -> float:
    """Share of the time ranks wait when every F, I and W takes one unit."""
    ended: dict[tuple[str, int, int], int] = {}
    clocks, places = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    while any(places[rank] < len(order) for rank, order in orders.items()):
        before = len(ended)
        for rank, order in orders.items():
            while places[rank] < len(order):
                kind, stage, part = order[places[rank]]
                needs = {
                    "F": [("F", stage - 1, part)] * (stage > 0),
                    "W": [("I", stage, part)],
                }.get(kind, [("F", stage, part)] + [("I", stage + 1, part)] * (stage < last))
                if any(need not in ended for need in needs):
                    break
                clocks[rank] = max([clocks[rank], *(ended[need] for need in needs)]) + 1 + (kind == "B")
                ended["I" if kind == "B" else kind, stage, part] = clocks[rank]
                places[rank] += 1
        assert len(ended) > before, "the order cannot be run"
    busy = sum(1 + (kind == "B") for order in orders.values() for kind, *_ in order)
    return 1 - busy / (max(clocks.values()) * len(orders))


CHECKED = [
    (schedule, world, parts, per_rank)
    for schedule in EVERY
    for world in (2, 3, 4)
    for parts in (1, 2, 3, 4, 5, 7, 8, 12)
    for per_rank in ({"1F1B": (1,), "GPipe": (1,), "ZBVZeroBubble": (2,), "DualPipeV": (2,)}.get(schedule, (2, 3)))
]


@pytest.mark.parametrize("schedule", EVERY)
def test_limits_and_bubbles_are_those_of_torchs_schedules(schedule: str) -> None:
    for _, world, parts, per_rank in (each for each in CHECKED if each[0] == schedule):
        own = settings(schedule=schedule, n_microbatches=parts, stages_per_rank=per_rank)
        assert own.stages_each == per_rank
        try:
            order = {rank: work(actions) for rank, actions in torchs_order(schedule, world, per_rank, parts).items()}
        except ValueError:
            assert list(own.layout_problems(None, world)), (world, parts, per_rank)
            continue
        assert not list(own.layout_problems(None, world)), (world, parts, per_rank)
        if schedule == "1F1B":
            order = one_forward_one_backward(world, parts)
        assert bubble(own, world) == pytest.approx(waiting(order, world * per_rank - 1)), (world, parts, per_rank)


PROBLEMS = {
    "schedule=ZBVZeroBubble nproc_per_node=4": "trainer: 8 pipeline stages are more than num_hidden_layers=4 "
    "(schedule=ZBVZeroBubble, 2 on each of 4 ranks); set num_hidden_layers=8, or choose schedule=1F1B, "
    "or take 2 ranks (nproc_per_node)",
    "model=nano schedule=LoopedBFS nproc_per_node=2": "set num_hidden_layers=4, or choose schedule=1F1B, "
    "or choose trainer=single",
    "nproc_per_node=3 split=[1,1,1]": "split: adds up to 3 layers, got num_hidden_layers=4",
    "schedule=Interleaved1F1B nproc_per_node=2 n_microbatches=5 num_hidden_layers=8": "needs a multiple of 2, got 5; "
    "set n_microbatches=4",
}


@pytest.mark.parametrize("overrides", PROBLEMS)
def test_limits_are_config_mistakes(overrides: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["trainer=pipeline", *overrides.split()])
    assert PROBLEMS[overrides] in str(refused.value)


def test_a_layout_that_cannot_be_raises_the_same() -> None:
    with pytest.raises(ConfigError, match="3 pipeline stages are more than num_hidden_layers=2"):
        stage_layout(settings(), 2, 3)
    with pytest.raises(ConfigError, match="needs at least 2 ranks, got 1"):
        stage_layout(settings(), 2, 1)


# ------------------------------------------------------------------------------------------------------------ cutting


def cut(stage: Stage, **shape: Any) -> set[str]:
    model = decoder(**shape)
    model.cut(stage.first_layer, stage.last_layer, is_first=stage.has_embedding, is_last=stage.has_head)
    return {name for name, _ in model.named_parameters()}


def ends(names: set[str]) -> set[str]:
    return {name for name in names if ".layers." not in name}


def test_a_decoder_is_cut_by_name() -> None:
    first, middle, last = (cut(s, num_hidden_layers=4) for s in stage_layout(settings(split=[1, 2, 1]), 4, 3))
    assert first | middle | last == {name for name, _ in decoder(num_hidden_layers=4).named_parameters()}
    assert ends(first) == {"model.embed_tokens.weight"}
    assert ends(middle) == set()
    assert ends(last) == {"model.norm.weight", "lm_head.weight"}
    assert {name.split(".")[2] for name in middle} == {"1", "2"}


def test_a_tied_head_keeps_the_embeddings_name() -> None:
    first, last = (cut(s, tie_word_embeddings=True) for s in stage_layout(settings(), 2, 2))
    assert ends(first) == {"model.embed_tokens.weight"}
    assert ends(last) == {"model.norm.weight", "model.embed_tokens.weight"}


def test_parts_in_turn_are_the_whole() -> None:
    for tied in (False, True):
        whole, x = decoder(tie_word_embeddings=tied), torch.randint(0, 64, (2, 9))
        out: Any = x
        for stage in stage_layout(settings(), 2, 2):
            part = decoder(tie_word_embeddings=tied)
            part.cut(stage.first_layer, stage.last_layer, is_first=stage.has_embedding, is_last=stage.has_head)
            out = part(input_ids=out)
        assert torch.equal(out, whole(x))


def test_what_a_model_lacks_is_named() -> None:
    assert splitter_of(decoder(), None) is None
    with pytest.raises(
        ModelError, match=r"Linear cannot be cut .* no num_hidden_layers, no hidden_size, no cut .*split"
    ):
        splitter_of(nn.Linear(2, 2), None)


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


def test_a_given_object_is_refused_on_meta_too() -> None:
    given = nn.Linear(3, 3, device="meta")
    models = fresh_models(lambda: given)
    assert next(models) is given  # one stage: nothing is lost that had a value
    with pytest.raises(ModelError, match="give the Trainer a model_init"):
        next(models)


def test_only_first_and_last_stage_may_share() -> None:
    whole = ["a", "b", "c"]
    assert tied_names([{"a": 1, "b": 1}, {}, {"a": 1, "c": 1}], whole) == ["a"]
    assert tied_names([{"a": 1}, {"b": 1}, {"c": 1}], whole) == []
    with pytest.raises(ModelError, match=r"after cut\(\) no stage of 3 holds b"):
        tied_names([{"a": 1}, {}, {"c": 1}], whole)
    with pytest.raises(ModelError, match=r"after cut\(\) stages 1, 2 of 3 hold c"):
        tied_names([{"a": 1}, {"b": 1, "c": 1}, {"c": 1}], whole)


def test_a_parameter_is_replaced_wherever_it_is_used() -> None:
    model = decoder(tie_word_embeddings=True)
    new = nn.Parameter(torch.zeros_like(model.head.weight))
    replace_parameter(model, "model.embed_tokens.weight", new)
    assert model.head.weight is new
    assert model.get_parameter("model.embed_tokens.weight") is new

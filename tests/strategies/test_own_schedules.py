"""A schedule of the user's, by ``_target_``: the numbers of one device, and what it cannot do said beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_models import train
from parity import LAYOUTS, Layout, Result, assert_parity, scratch

from forgather_cli.config.load import load_config
from forgather_cli.config.pipeline_layout import bubble, stage_layout
from forgather_cli.config.schema import PipelineSettings, Target
from forgather_cli.errors import ConfigError
from forgather_cli.plan.pipeline import in_flight
from forgather_cli.plan.run import make_plan

MODEL = ("model=tiny", "model.hidden_size=32", "model.intermediate_size=64", "tie_word_embeddings=true")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "Alone": (),
    "Rounds": (),
    "Rounds, three on each rank": ("stages_per_rank=3",),
    "Rounds, split": ("schedule.split=true", "gradient_checkpointing=true"),
    "BackAndForth": ("loss=linear_cross_entropy",),
    "Rounds, sharded": ("shard=2", "n_microbatches=2"),
}


def layout(name: str) -> Layout:
    target = f"schedule._target_=own_stages.{name.partition(',')[0]}"
    return Layout(4 if "sharded" in name else 2, ("trainer=pipeline", target, *SCHEDULES[name]))


@pytest.fixture(scope="module")
def alone() -> Result:
    return train(LAYOUTS["single"], (*MODEL, "num_hidden_layers=6"), scratch() / "schedules")


@pytest.mark.parametrize("name", SCHEDULES)
def test_losses_norms_and_weights_are_those_of_one_device(name: str, alone: Result, tmp_path: Path) -> None:
    assert_parity(train(layout(name), (*MODEL, "num_hidden_layers=6"), tmp_path), alone)


def own(name: str, **settings: Any) -> PipelineSettings:
    kwargs = settings.pop("arguments", {})
    return PipelineSettings(schedule=Target(f"own_stages.{name}", kwargs), **settings)


def test_stages_are_where_the_schedule_has_them_and_one_that_tells_no_order_keeps_all_micro_batches() -> None:
    assert [stage.rank for stage in stage_layout(own("Alone"), 4, 2)] == [0, 1]
    assert [stage.rank for stage in stage_layout(own("Rounds"), 4, 2)] == [0, 1, 0, 1]
    assert [stage.rank for stage in stage_layout(own("BackAndForth"), 4, 2)] == [0, 1, 1, 0]
    assert bubble(own("Alone"), 2) is None
    assert in_flight(own("Alone", n_microbatches=6), 1, 2) == 6


def test_the_plan_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    from forgather_cli.plan.command import plan

    words = ["model=tiny", "data=synthetic", *layout("Rounds").overrides, "nproc_per_node=2"]
    assert [stage.rank for stage in make_plan(load_config(None, words).config).stages] == [0, 1, 0, 1]
    plan(words, None, params=False, as_json=False)
    assert "schedule own_stages.Rounds, 4 stages, bubble" in capsys.readouterr().out


REFUSED: dict[tuple[str, ...], str] = {
    ("Nobody",): r"schedule\._target_: cannot import own_stages\.Nobody",
    ("Words",): r"schedule\._target_: own_stages\.Words is no pipeline schedule; .*PipelineScheduleMulti",
    ("Rounds", "schedule.splits=true"): r"schedule\.splits: own_stages\.Rounds takes no such argument;.*split",
    ("Alone", "stages_per_rank=2"): r"stages_per_rank: schedule=own_stages\.Alone runs one",
    ("Rounds", "stages_per_rank=3"): r"num_hidden_layers=4",
    ("NeedsFour", "n_microbatches=2"): r"schedule: own_stages\.NeedsFour refused 2 micro-batches in 2 stages on 2 "
    "ranks: four at a time; change n_microbatches",
    ("BackAndForth", "stages_per_rank=3"): r"schedule: own_stages\.BackAndForth refused .*exactly 2",
    ("Idle",): r"schedule: the pipeline_order of own_stages\.Idle has .* 0 times, with 4 micro-batches",
    ("BackAndForth", "torch_compile=true"): r"torch_compile: .*schedule=own_stages\.BackAndForth",
    ("BackAndForth", "shard=2", "nproc_per_node=4"): r"shard: .*schedule=own_stages\.BackAndForth",
    ("BackAndForth", "loss=liger"): r"loss: .*schedule=own_stages\.BackAndForth splits",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_do_is_said_before_anything_starts(words: tuple[str, ...]) -> None:
    name, *others = words
    given = ["trainer=pipeline", f"schedule._target_=own_stages.{name}", "nproc_per_node=2", *others]
    with pytest.raises(ConfigError, match=REFUSED[words]):
        load_config(None, ["model=tiny", *given])

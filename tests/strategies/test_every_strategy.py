"""What holds for every option of ``trainer``. Tests of parity and of resuming go over the same layouts."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import crash_draw
import pytest
from parity import LAYOUTS, trainer_of
from program import document, shown

from forgather_cli.config.schema import TrainerSettings, options

OPTIONS: list[Any] = options(TrainerSettings)
SMALL = ("model=nano", "data=synthetic", "data.seq_len=16", "precision=fp32", "global_batch_size=24")

every = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.type)


@every
def test_has_a_row(option: Any) -> None:
    kinds = {row.trainer for row in crash_draw.LAYOUTS}
    assert option.type in kinds, f"trainer={option.type} has no row in LAYOUTS of scripts/crash/crash_draw.py"


@every
def test_its_maker_takes_the_option_the_device_the_loss_and_the_precision(option: Any) -> None:
    inspect.signature(option.load_maker()).bind(option, "device", "loss", "precision")


@every
def test_is_planned_and_explained(option: Any, capsys: pytest.CaptureFixture[str]) -> None:
    kind = option.type
    layout = next(layout for layout in LAYOUTS.values() if trainer_of(layout) == kind)
    ranks = [f"nproc_per_node={layout.ranks}"] if layout.ranks > 1 else []
    plan = document(capsys, "plan", *SMALL, *layout.overrides, *ranks)
    assert (plan["trainer"], plan["world_size"]) == (kind, layout.ranks)
    readers = layout.data_ranks or layout.ranks
    assert plan["micro_batch"] * plan["accumulation"] * readers == plan["global_batch"] == 24
    assert len(plan["ranks"]) == layout.ranks
    explained = shown(capsys, "config", "explain", "trainer")
    fields = {field.name for field in dataclasses.fields(option)} - {"type"}
    for words in (f"trainer={kind} ", *(f"trainer.{field}" for field in fields)):
        assert words in explained

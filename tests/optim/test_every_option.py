"""Every optimizer and schedule that there is: a row in the table, a meaning of each setting, a place in the plan."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny
from option_rows import OPTIMIZERS, SCHEDULES
from torch import Tensor

from forgather_cli.config.explain import explain
from forgather_cli.config.schema import OptimizerSettings, SchedulerSettings
from forgather_cli.plan.run import make_plan
from forgather_cli.run_dir import RunDir

GROUPS: dict[str, tuple[Any, Any]] = {
    "optimizer": (OptimizerSettings, OPTIMIZERS), "lr_scheduler": (SchedulerSettings, SCHEDULES),
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_has_a_row_and_is_explained(group: str) -> None:
    base, rows = GROUPS[group]
    (explained,) = explain(group)
    for option in base.members:
        assert any(type(row.option) is option for row in rows), f"{group}={option.type} has no row in option_rows.py"
        assert option.type in {each.name for each in explained.options}
        for name in {field.name for field in fields(option)} - {"type"}:
            assert explained.settings[f"{group}.{name}"], f"{group}={option.type}: its setting {name} has no comment"


@pytest.mark.parametrize("name", [option.type for option in OptimizerSettings.members])
def test_a_run_keeps_the_bytes_that_its_plan_says(name: str, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, f"optimizer={name}", "max_steps=1", "eval_strategy=no", "save_strategy=no")
    trained = tiny.train(config, RunDir(tmp_path)).optimizer
    states = [state for optimizer in trained.optimizers for state in optimizer.state.values()]
    held = sum(each.nbytes for state in states for each in state.values() if isinstance(each, Tensor))
    assert held == make_plan(config).fullest.optimizer

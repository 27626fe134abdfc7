"""When scheduled work is due, by absolute steps."""

from __future__ import annotations

from typing import Any

import pytest

from forgather_cli.config.schedule import eval_due, eval_due_at_epoch, evaluates, log_due, save_due
from forgather_cli.config.schema import RunSettings


@pytest.mark.parametrize(
    ("due", "settings", "steps"),
    [
        (log_due, {"logging_strategy": "steps", "logging_steps": 3, "logging_first_step": False}, [3, 6]),
        (log_due, {"logging_strategy": "steps", "logging_steps": 3, "logging_first_step": True}, [1, 3, 6]),
        (log_due, {"logging_strategy": "epoch", "logging_steps": 1, "logging_first_step": True}, []),
        (eval_due, {"eval_strategy": "steps", "eval_steps": 2}, [2, 4, 6]),
        (eval_due, {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 4}, [4, 6]),
        (eval_due, {"eval_strategy": "epoch", "eval_steps": 2}, []),
        (eval_due_at_epoch, {"eval_strategy": "epoch", "eval_delay": 2}, [2, 3, 4, 5, 6, 7]),
        (eval_due_at_epoch, {"eval_strategy": "steps"}, []),
        (save_due, {"save_strategy": "steps", "save_steps": 5}, [5]),
        (save_due, {"save_strategy": "epoch", "save_steps": 5}, []),
    ],
)
def test_steps_at_which_it_is_due(due: Any, settings: dict[str, Any], steps: list[int]) -> None:
    assert [step for step in range(1, 8) if due(RunSettings(**settings), step)] == steps


def test_a_run_evaluates_where_any_setting_has_it_do_so() -> None:
    off: dict[str, Any] = {"eval_strategy": "no", "load_best_model_at_end": False}
    assert not evaluates(RunSettings(**off))
    for on in ("eval_on_start", "eval_on_save", "load_best_model_at_end"):
        assert evaluates(RunSettings(**{**off, on: True}))
    assert evaluates(RunSettings(**{**off, "eval_strategy": "steps"}))

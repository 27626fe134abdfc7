"""When scheduled work is due, by absolute steps."""

from __future__ import annotations

from typing import Any

import pytest

from forgather_cli.config.schedule import eval_due, eval_due_at_epoch, evaluates, in_steps, log_due, save_due, shares
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
        (save_due, {"save_strategy": "steps", "save_steps": 0.4}, [3, 6]),
        (save_due, {"save_strategy": "epoch", "save_steps": 5}, []),
    ],
)
def test_steps_at_which_it_is_due(due: Any, settings: dict[str, Any], steps: list[int]) -> None:
    args = RunSettings(**settings)
    names = {log_due: "logging_steps", eval_due: "eval_steps", save_due: "save_steps"}
    every = [in_steps(getattr(args, names[due]), 7)] if due in names else []
    assert [step for step in range(1, 8) if due(args, step, *every)] == steps


def test_below_1_it_is_the_share_of_the_run_that_transformers_makes_of_it() -> None:
    from transformers.trainer_callback import TrainerState

    for share in (0.001, 0.07, 0.1, 0.333, 0.5, 0.999):
        for total in (1, 7, 100, 1001):
            theirs, args = TrainerState(), RunSettings(logging_steps=share, eval_steps=share, save_steps=share)
            theirs.compute_steps(args, total)
            for name in ("logging_steps", "eval_steps", "save_steps"):
                assert in_steps(getattr(args, name), total) == getattr(theirs, name)
                assert shares(args, total)[name] == f"every {getattr(theirs, name):,} steps"
    assert shares(RunSettings(logging_steps=1, eval_steps=100, save_steps=0.1, save_strategy="no"), 50) == {}


def test_a_run_evaluates_where_any_setting_has_it_do_so() -> None:
    off: dict[str, Any] = {"eval_strategy": "no", "load_best_model_at_end": False}
    assert not evaluates(RunSettings(**off))
    for on in ("eval_on_start", "eval_on_save", "load_best_model_at_end"):
        assert evaluates(RunSettings(**{**off, on: True}))
    assert evaluates(RunSettings(**{**off, "eval_strategy": "steps"}))

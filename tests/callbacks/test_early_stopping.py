"""EarlyStopping: when it asks to stop, and that it remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from program import SMALL, printed, shown

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.callbacks.early_stopping import EarlyStopping
from forgather_cli.config.schema import EarlyStoppingSettings, RunSettings
from forgather_cli.run_dir import RunDir

NAN = float("nan")


def stop_at(values: list[float], callback: EarlyStopping, args: RunSettings | None = None, name: str = "eval_loss"):
    """The evaluation, counted from 1, after which the callback asks to stop."""
    for number, value in enumerate(values, 1):
        control = TrainerControl()
        state = TrainerState(global_step=100 * number)
        callback.on_evaluate(args or RunSettings(), state, control, metrics={name: value, "eval_tokens": 5})
        if control.should_training_stop:
            return number
    return None


@pytest.mark.parametrize(
    ("values", "patience", "threshold", "expected"),
    [
        ([3.0, 2.0, 1.0, 0.5], 1, 0.0, None), ([3.0, 3.1, 3.2], 2, 0.0, 3), ([3.0, 3.1, 2.9, 3.0, 2.95], 2, 0.0, 5),
        ([3.0, 3.0], 1, 0.0, 2), ([3.0, 2.95, 2.91, 2.85], 2, 0.1, 3), ([3.0, NAN, NAN], 2, 0.0, 3),
        ([NAN, 3.0, 2.0], 2, 0.0, None),
    ],
)  # fmt: skip
def test_patience_and_threshold(values: list[float], patience: int, threshold: float, expected: int | None) -> None:
    callback = EarlyStopping(EarlyStoppingSettings(patience=patience, threshold=threshold))
    assert stop_at(values, callback) == expected


def test_greater_is_better_holds_for_the_best_model_s_metric_only() -> None:
    settings = EarlyStoppingSettings(patience=1, metric="accuracy")
    rising = [0.1, 0.2, 0.3]
    args = RunSettings(metric_for_best_model="eval_accuracy", greater_is_better=True)
    assert stop_at(rising, EarlyStopping(settings), args, "eval_accuracy") is None
    other = RunSettings(metric_for_best_model="eval_f1", greater_is_better=True)
    assert stop_at(rising, EarlyStopping(settings), other, "eval_accuracy") == 2


def test_the_count_survives_a_resume() -> None:
    settings = EarlyStoppingSettings(patience=3)
    first = EarlyStopping(settings)
    assert stop_at([3.0, 3.1, 3.2], first) is None
    second = EarlyStopping(settings)
    second.load_state_dict(first.state_dict())
    assert stop_at([3.3], second) == 1


def test_the_stop_is_told_once_with_metric_and_values(caplog: pytest.LogCaptureFixture) -> None:
    stop_at([3.0, 3.5], EarlyStopping(EarlyStoppingSettings(patience=1)))
    (message,) = caplog.messages
    assert "early_stopping" in message
    assert "step 200: eval_loss 3.5, the best is 3 of step 100" in message


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        (["save_steps=6"], True),
        (["save_strategy=no"], True),
        (["save_strategy=epoch"], True),
        (["save_steps=1"], False),
        (["eval_steps=0.3", "save_steps=0.1"], False),
        (["save_strategy=best"], False),
        (["save_strategy=epoch", "eval_strategy=epoch"], False),
    ],
)
def test_at_the_start_is_said_that_the_best_will_not_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: list[str], warns: bool
) -> None:
    words = words if "eval_strategy=epoch" in words else ["eval_steps=2", *words]
    made = tiny.config(tmp_path, "+callbacks.early_stopping.patience=2", "max_steps=1", *words)
    tiny.train(made, RunDir(tmp_path))
    assert ("early_stopping" in caplog.text and "set save_strategy=best" in caplog.text) == warns


def test_best_is_what_is_the_runs_best_else_how_good_that_was_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # on random tokens an evaluation gets worse from the first one on
    words = [*SMALL, "max_steps=6", "eval_steps=2", "learning_rate=0.05", "async_save=false"]
    said = shown(capsys, "train", *words, "save_steps=6", "output_dir=run")
    best, later, last = (r["eval_loss"] for r in tiny.metrics("run") if "eval_loss" in r)
    assert best < min(later, last)
    told = f"the run's best was {best:.4f} at step 2, not saved"
    [line] = [line for line in said.splitlines() if line.startswith("newest")]
    assert "(best)" not in said
    assert line.endswith(f"eval_loss {last:.4f} (best of those kept; {told})")
    listed = shown(capsys, "checkpoint", "list", "run")
    assert "best of those kept" in listed
    assert told in listed
    assert told in printed(capsys, "finalize", "run", "model", "--best", "--dry-run").err
    # the run's best is kept: the same words, and nothing else is said
    said = shown(capsys, "train", *words, "save_strategy=best", "output_dir=kept")
    assert f"best     kept/checkpoints/step-00000002  eval_loss {best:.4f}\n" in said
    listed = shown(capsys, "checkpoint", "list", "kept")
    assert " best" in listed
    assert "best of those kept" not in listed + said
    assert "the run's best" not in listed + printed(capsys, "finalize", "kept", "model", "--best", "--dry-run").err


def test_a_metric_that_is_missing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = EarlyStopping(EarlyStoppingSettings(metric="eval_los"))
    assert stop_at([3.0, 3.1, 3.2, 3.3, 3.4], callback) is None
    (message,) = caplog.messages
    assert "'eval_los'" in message
    assert "eval_loss, eval_tokens" in message

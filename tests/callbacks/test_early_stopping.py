"""EarlyStopping: when it asks to stop, and that it remembers."""

from __future__ import annotations

import pytest

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.callbacks.early_stopping import EarlyStopping
from forgather_cli.config.schema import EarlyStoppingSettings, RunSettings

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


def test_a_metric_that_is_missing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = EarlyStopping(EarlyStoppingSettings(metric="eval_los"))
    assert stop_at([3.0, 3.1, 3.2, 3.3, 3.4], callback) is None
    (message,) = caplog.messages
    assert "'eval_los'" in message
    assert "eval_loss, eval_tokens" in message

"""The event protocol, the callbacks a config builds, and Hugging Face's own callbacks on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forgather_cli.callbacks.base import EVENTS, CallbackList, TrainerCallback, TrainerControl, TrainerState
from forgather_cli.callbacks.build import build_callbacks
from forgather_cli.callbacks.divergence import DivergenceDetector
from forgather_cli.config.schema import (
    CallbackSettings,
    EarlyStoppingSettings,
    InfoSettings,
    JsonSettings,
    MetricsSettings,
    ProgressSettings,
    RunSettings,
    Target,
    TensorboardSettings,
    TextgenSettings,
)
from forgather_cli.errors import CallbackError, ConfigError, DivergenceError
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.states import CallbackStates


class Recorder(TrainerCallback):
    def __init__(self, tag: str = "", seen: list[Any] | None = None) -> None:
        self.tag, self.seen = tag, seen if seen is not None else []

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seen.append((self.tag, state.global_step, kwargs["model"]))


class Failing(TrainerCallback):
    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        raise kwargs["checkpoint"]


def emit(callbacks: CallbackList, event: str, args: Any = None, state: TrainerState | None = None, **kwargs: Any):
    state, control = state or TrainerState(), TrainerControl()
    callbacks.emit(event, args or RunSettings(), state, control, **kwargs)
    return control


def test_handlers_run_in_order_and_only_those_that_exist() -> None:
    callbacks, seen = CallbackList(), []
    callbacks.add(Recorder("a", seen))
    callbacks.add(Recorder("b", seen))
    emit(callbacks, "on_step_end", state=TrainerState(global_step=3), model="m")
    assert seen == [("a", 3, "m"), ("b", 3, "m")]
    assert [event for event in EVENTS if callbacks.handlers[event]] == ["on_step_end"]


class Named(TrainerCallback):
    name = "mine"


class Fixed(TrainerCallback):
    @property
    def name(self) -> str:
        return "fixed"


def test_a_callback_knows_its_name() -> None:
    first, second, custom, fixed = Recorder(), Recorder(), Named(), [Fixed(), Fixed()]
    assert (first.name, custom.name) == ("Recorder", "mine")
    callbacks = CallbackList([first, second, custom, ("config_name", Named()), *fixed])
    assert [each.name for each in callbacks.by_name.values()] == [
        "Recorder", "Recorder_2", "mine", "config_name", "fixed", "fixed"
    ]  # fmt: skip
    assert [*callbacks.by_name][-1] == "fixed_2"
    second.name = "renamed"
    assert CallbackList([second]).by_name == {"renamed": second}


def test_names_are_numbered_when_repeated() -> None:
    callbacks = CallbackList()
    assert [callbacks.add(Recorder()), callbacks.add(Recorder), callbacks.add(Recorder(), "mine")] == [
        "Recorder",
        "Recorder_2",
        "mine",
    ]


def test_a_state_under_the_name_of_its_class_is_read() -> None:
    """Checkpoints before 0.3 have those of a script under that."""
    callback = DivergenceDetector()
    state = {**callback.state_dict(), "smoothed": 2.0, "seen": 7}
    CallbackStates({"divergence": callback}).load_state_dict({"DivergenceDetector": state})
    assert callback.state_dict() == state


def test_an_error_names_callback_and_event() -> None:
    callbacks = CallbackList()
    callbacks.add(Failing(), "uploader")
    with pytest.raises(CallbackError, match="callback uploader failed in on_save: OSError: no route") as caught:
        emit(callbacks, "on_save", checkpoint=OSError("no route"))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_callback_s_own_verdict_keeps_its_exit_code() -> None:
    callbacks = CallbackList()
    callbacks.add(Failing())
    with pytest.raises(DivergenceError, match="loss rose"):
        emit(callbacks, "on_save", checkpoint=DivergenceError("loss rose"))


def test_hugging_face_early_stopping_stops_unchanged() -> None:
    from transformers import EarlyStoppingCallback

    callbacks, args = CallbackList(), RunSettings(load_best_model_at_end=True)
    callbacks.add(EarlyStoppingCallback(early_stopping_patience=2))
    emit(callbacks, "on_train_begin", args)
    stops = []
    for value, best in ((3.0, None), (3.1, 3.0), (3.2, 3.0)):
        state = TrainerState(best_metric=best)
        stops.append(emit(callbacks, "on_evaluate", args, state, metrics={"eval_loss": value}).should_training_stop)
    assert stops == [False, False, True]


def test_hugging_face_printer_prints_and_handles_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import PrinterCallback

    callbacks = CallbackList()
    callbacks.add(PrinterCallback)
    assert [event for event in EVENTS if callbacks.handlers[event]] == ["on_log"]
    emit(callbacks, "on_log", logs={"loss": 1.5, "total_flos": 3.0})
    assert capsys.readouterr().out == "{'loss': '1.5'}\n"


def test_a_hugging_face_subclass_gets_its_events() -> None:
    from transformers import TrainerCallback as HFCallback

    class Stopper(HFCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = state.global_step >= args.max_steps
            return control

    callbacks = CallbackList()
    callbacks.add(Stopper())
    assert [event for event in EVENTS if callbacks.handlers[event]] == ["on_step_end"]
    args = RunSettings(max_steps=5)
    assert not emit(callbacks, "on_step_end", args, TrainerState(global_step=4)).should_training_stop
    assert emit(callbacks, "on_step_end", args, TrainerState(global_step=5)).should_training_stop


ALL = CallbackSettings(
    early_stopping=EarlyStoppingSettings(),
    textgen=TextgenSettings(prompts=["a"]),
    tensorboard=TensorboardSettings(),
    json=JsonSettings(),
    progress=ProgressSettings(),
    info=InfoSettings(),
    metrics=MetricsSettings(),
    custom={"mine": Target("test_callbacks_base.Recorder", {"tag": "x"})},
)


def test_build_keeps_the_order_and_puts_the_user_s_last(tmp_path: Path) -> None:
    built = build_callbacks(ALL, RunDir(tmp_path), config_tree={})
    assert [name for name, _ in built] == [
        "metrics", "info", "progress", "json", "tensorboard", "textgen", "early_stopping", "mine",
    ]  # fmt: skip
    assert built[-1][1].tag == "x"
    assert build_callbacks(CallbackSettings(), RunDir(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Target("no_such_module.Thing"), "cannot import no_such_module.Thing"),
        (Target("test_callbacks_base.Missing"), "module test_callbacks_base has no Missing"),
        (Target("Recorder"), "it names no module; write package.module.Recorder"),
        (Target("test_callbacks_base.Recorder", {"speed": 1}), "Recorder takes no such argument; Arguments: tag, seen"),
    ],
)
def test_a_target_that_cannot_be_made_is_a_config_mistake(tmp_path: Path, target: Target, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^callbacks\.mine(\._target_|\.speed)?: ") as caught:
        build_callbacks(CallbackSettings(custom={"mine": target}), RunDir(tmp_path))
    assert message in str(caught.value)


@pytest.mark.parametrize("thing", [5, object(), dict])
def test_what_has_a_method_for_no_event_is_no_callback(thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"^callbacks\.mine: is no callback, .* on_step_end"):
        CallbackList().add(thing, "mine")

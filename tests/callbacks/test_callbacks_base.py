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
    JsonSettings,
    RunSettings,
    Target,
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


def emit(callbacks: CallbackList, event: str, **kwargs: Any) -> None:
    callbacks.emit(event, RunSettings(), TrainerState(global_step=3), TrainerControl(), **kwargs)


def test_handlers_run_in_order_and_only_those_that_exist() -> None:
    seen: list[Any] = []
    callbacks = CallbackList([Recorder("a", seen), Recorder("b", seen)])
    emit(callbacks, "on_step_end", model="m")
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


def test_a_state_under_the_name_of_its_class_is_read() -> None:
    """Checkpoints before 0.3 have those of a script under that."""
    callback = DivergenceDetector()
    state = {**callback.state_dict(), "smoothed": 2.0, "seen": 7}
    CallbackStates({"divergence": callback}).load_state_dict({"DivergenceDetector": state})
    assert callback.state_dict() == state


def test_an_error_names_callback_and_event_but_a_callback_s_own_verdict_keeps_its_exit_code() -> None:
    callbacks = CallbackList([("uploader", Failing())])
    with pytest.raises(CallbackError, match="callback uploader failed in on_save: OSError: no route") as caught:
        emit(callbacks, "on_save", checkpoint=OSError("no route"))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(DivergenceError, match="loss rose"):
        emit(callbacks, "on_save", checkpoint=DivergenceError("loss rose"))


def test_the_user_s_come_last(tmp_path: Path) -> None:
    mine = {"mine": Target("test_callbacks_base.Recorder", {"tag": "x"})}
    settings = CallbackSettings(early_stopping=EarlyStoppingSettings(), json=JsonSettings(), custom=mine)
    built = build_callbacks(settings, RunDir(tmp_path))
    assert [name for name, _ in built] == ["json", "early_stopping", "mine"]
    assert built[-1][1].tag == "x"
    assert build_callbacks(CallbackSettings(), RunDir(tmp_path)) == []


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

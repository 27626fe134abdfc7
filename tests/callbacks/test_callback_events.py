"""The callbacks of a list, what events hand to them, how these are called, and the writer that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from users_callbacks import EveryEvent

from forgather_cli import Trainer
from forgather_cli.callbacks.base import EVENTS, CallbackList, TrainerCallback, TrainerControl, TrainerState
from forgather_cli.callbacks.build import build_callbacks
from forgather_cli.callbacks.divergence import DivergenceDetector
from forgather_cli.config.schema import CallbackSettings, EarlyStoppingSettings, JsonSettings, RunSettings, Target
from forgather_cli.errors import CallbackError
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.states import CallbackStates


def made(path: Path, *callbacks: Any, **more: Any) -> Trainer:
    steps = {"max_steps": 6, "logging_steps": 1, "eval_steps": 2, "save_steps": 2}
    data, when = tiny.RandomTokens(16), {"eval_strategy": "steps", "save_strategy": "steps"}
    return tiny.script(path, data=data, evaluated=data, callbacks=callbacks, **steps, **when, **more)


class Loaders(EveryEvent):
    def __init__(self) -> None:
        self.without: set[str] = set()
        self.seen: set[str] = set()

    def happens(self, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        self.seen.add(event)
        if kwargs["eval_dataloader"] is None or kwargs["train_dataloader"] is None:
            self.without.add(event)


class ByName(TrainerCallback):
    """Methods that take what they use, in an order of their own."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_log_step(self, state: Any, logs: dict[str, float], **kwargs: Any) -> None:
        logs["doubled"] = 2 * logs.get("loss", 0.0)
        self.seen["log_step"] = (state.global_step, "control" in kwargs, "args" in kwargs)

    def on_train_metrics(self, state: Any, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        self.seen["train_metrics"] = (state.global_step, loss.shape, grad_norm.shape)

    def on_step_end(self, args: Any, state: Any, control: Any) -> None:
        self.seen["step_end"] = (args.max_steps, state.global_step, type(control))

    def on_log(self, arguments: Any, progress: Any, flags: Any, logs: Any = None, **_: Any) -> None:
        self.seen["log"] = (arguments.max_steps, progress.global_step, logs is not None)

    def on_epoch_begin(self, *everything: Any, **kwargs: Any) -> None:
        self.seen["epoch_begin"] = len(everything)

    def on_train_end(self, *, trainer: Any) -> None:
        self.seen["train_end"] = trainer.state.global_step


@pytest.mark.parametrize("async_save", [True, False])
def test_what_events_hand_to_methods_however_these_are_written(tmp_path: Path, async_save: bool) -> None:
    from hf_callback import Saves

    saves, loaders, by_name = Saves(), Loaders(), ByName()
    trainer = made(tmp_path, saves, loaders, by_name, async_save=async_save)
    trainer.train()
    assert saves.seen == [(step, f"step-{step:08}") for step in (2, 4, 6)]  # that was saved, whichever is trained now
    assert loaders.without == {"on_init_end"}
    assert {"on_step_end", "on_log_step", "on_save", "on_evaluate", "on_train_end", "on_epoch_end"} <= loaders.seen
    assert by_name.seen == {
        "log_step": (6, True, True), "train_metrics": (5, torch.Size([]), torch.Size([])),
        "step_end": (6, 6, TrainerControl), "log": (6, 6, True), "epoch_begin": 3, "train_end": 6,
    }  # fmt: skip
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    assert all(record["doubled"] == 2 * record["loss"] for record in logged)


def test_a_method_of_the_usual_shape_is_called_as_it_is_and_one_that_asks_for_more_is_named() -> None:
    from hf_callback import Saves

    class Greedy(TrainerCallback):
        def on_step_end(self, state: Any, logs: Any) -> None:
            raise AssertionError

    saves, callbacks = Saves(), CallbackList()
    callbacks.add(saves)
    assert callbacks.handlers["on_save"][0][1] == saves.on_save  # nothing lies between
    callbacks.add(Greedy)
    with pytest.raises(CallbackError, match=r"Greedy.*on_step_end.*'logs'"):
        callbacks.emit("on_step_end", None, TrainerState(), TrainerControl())


def test_callbacks_are_taken_out_by_object_or_class(tmp_path: Path) -> None:
    from hf_callback import Saves

    one, two, other = Saves(), Saves(), ByName()
    trainer = made(tmp_path, one, two, other)
    assert trainer.pop_callback(two) is two
    assert trainer.pop_callback(Saves) is one
    assert trainer.pop_callback(Saves) is None
    trainer.remove_callback(other)
    trainer.train()
    assert (one.seen, two.seen, other.seen) == ([], [], {})


class Pictures(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        writer = kwargs["trainer"].tensorboard
        writer.add_scalar("mine/step", 10 * state.global_step, state.global_step)
        writer.add_histogram("mine/weights", kwargs["model"].lm_head.weight, state.global_step)
        writer.add_image("mine/image", torch.rand(3, 4, 4), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["trainer"].tensorboard.add_text("mine/end", "done", state.global_step)


@pytest.mark.filterwarnings("default")  # of TensorBoard's dependencies
def test_callbacks_share_the_tensorboard_writer_and_resume_in_it(tmp_path: Path) -> None:
    made(tmp_path / "none", Pictures).train()
    assert not (tmp_path / "none/tensorboard").exists(), "without a callback for it the writer does nothing"
    made(tmp_path, Pictures, report_to="tensorboard").train()
    again = made(tmp_path, Pictures, report_to="tensorboard")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step-00000004"))
    again.tensorboard.flush()
    told = tiny.tensorboard(tmp_path / "tensorboard")
    assert [scalar.step for scalar in told.Scalars("mine/step")] == [1, 2, 3, 4, 5, 6]
    assert [scalar.step for scalar in told.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    tags = told.Tags()
    assert ("mine/weights" in tags["histograms"], "mine/image" in tags["images"]) == (True, True)
    assert "mine/end/text_summary" in tags["tensors"]


class Recorder(TrainerCallback):
    def __init__(self, tag: str = "", seen: list[Any] | None = None) -> None:
        self.tag, self.seen = tag, seen if seen is not None else []

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seen.append((self.tag, state.global_step, kwargs["model"]))


def test_handlers_run_in_order_and_only_those_that_exist() -> None:
    seen: list[Any] = []
    callbacks = CallbackList([Recorder("a", seen), Recorder("b", seen)])
    callbacks.emit("on_step_end", RunSettings(), TrainerState(global_step=3), TrainerControl(), model="m")
    assert seen == [("a", 3, "m"), ("b", 3, "m")]
    assert [event for event in EVENTS if callbacks.handlers[event]] == ["on_step_end"]


def test_a_callback_knows_its_name() -> None:
    class Named(TrainerCallback):
        name = "mine"

    class Fixed(TrainerCallback):
        name = property(lambda self: "fixed")

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


def test_the_user_s_come_last(tmp_path: Path) -> None:
    mine = {"mine": Target("test_callback_events.Recorder", {"tag": "x"})}
    settings = CallbackSettings(early_stopping=EarlyStoppingSettings(), json=JsonSettings(), custom=mine)
    built = build_callbacks(settings, RunDir(tmp_path))
    assert [name for name, _ in built] == ["json", "early_stopping", "mine"]
    assert built[-1][1].tag == "x"
    assert build_callbacks(CallbackSettings(), RunDir(tmp_path)) == []

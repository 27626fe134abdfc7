"""What events hand to callbacks, how these are called, and the writer that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from users_callbacks import EveryEvent

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.callbacks.base import CallbackList, TrainerCallback, TrainerControl, TrainerState
from forgather_cli.errors import CallbackError

SETTINGS: dict[str, Any] = {
    "max_steps": 6, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "use_cpu": True,
}  # fmt: skip


def run(path: Path, *callbacks: Any, **settings: Any) -> Trainer:
    args, data = TrainingArguments(str(path), **{**SETTINGS, **settings}), tiny.RandomTokens(16)
    trainer = Trainer(tiny.decoder(), args, None, data, data, callbacks=callbacks)
    trainer.train()
    return trainer


class Saves(transformers.TrainerCallback):
    """As scripts for that library write them."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.seen.append((state.global_step, Path(kwargs["checkpoint"]).name))
        return control


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
    saves, loaders, by_name = Saves(), Loaders(), ByName()
    trainer = run(tmp_path, saves, loaders, by_name, async_save=async_save)
    assert saves.seen == [(step, f"step-{step:08}") for step in (2, 4, 6)]  # that was saved, whichever is trained now
    assert loaders.without == {"on_init_end"}
    assert {"on_step_end", "on_log_step", "on_save", "on_evaluate", "on_train_end", "on_epoch_end"} <= loaders.seen
    assert by_name.seen == {
        "log_step": (6, True, True),
        "train_metrics": (5, torch.Size([]), torch.Size([])),
        "step_end": (6, 6, TrainerControl),
        "log": (6, 6, True),
        "epoch_begin": 3,
        "train_end": 6,
    }
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    assert all(record["doubled"] == 2 * record["loss"] for record in logged)


def test_a_method_of_the_usual_shape_is_called_as_it_is_and_one_that_asks_for_more_is_named() -> None:
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
    args = TrainingArguments(str(tmp_path), **SETTINGS)
    one, two, other = Saves(), Saves(), ByName()
    data = tiny.RandomTokens(16)
    trainer = Trainer(tiny.decoder(), args, None, data, data, callbacks=[one, two, other])
    assert trainer.pop_callback(two) is two
    assert trainer.pop_callback(Saves) is one
    assert trainer.pop_callback(Saves) is None
    trainer.remove_callback(other)
    trainer.train()
    assert (one.seen, two.seen, other.seen) == ([], [], {})


class Pictures(TrainerCallback):
    """Writes beside the run's own curves."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        writer = kwargs["trainer"].tensorboard
        writer.add_scalar("mine/step", 10 * state.global_step, state.global_step)
        writer.add_histogram("mine/weights", kwargs["model"].lm_head.weight, state.global_step)
        writer.add_image("mine/image", torch.rand(3, 4, 4), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["trainer"].tensorboard.add_text("mine/end", "done", state.global_step)


@pytest.mark.filterwarnings("default")  # of TensorBoard's dependencies
def test_callbacks_share_the_tensorboard_writer_and_resume_in_it(tmp_path: Path) -> None:
    run(tmp_path / "none", Pictures)
    assert not (tmp_path / "none/tensorboard").exists(), "without a callback for it the writer does nothing"
    run(tmp_path, Pictures, report_to="tensorboard")
    newest = tmp_path / "checkpoints" / "step-00000004"
    args, data = TrainingArguments(str(tmp_path), report_to="tensorboard", **SETTINGS), tiny.RandomTokens(16)
    again = Trainer(tiny.decoder(), args, None, data, data, callbacks=[Pictures])
    again.train(resume_from_checkpoint=str(newest))
    again.tensorboard.flush()
    told = tiny.tensorboard(tmp_path / "tensorboard")
    assert [scalar.step for scalar in told.Scalars("mine/step")] == [1, 2, 3, 4, 5, 6]
    assert [scalar.step for scalar in told.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    tags = told.Tags()
    assert ("mine/weights" in tags["histograms"], "mine/image" in tags["images"]) == (True, True)
    assert "mine/end/text_summary" in tags["tensors"]

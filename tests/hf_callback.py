"""Callbacks written for the Hugging Face Trainer, whose base class takes transformers 3 s."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers


class ForHuggingFace(transformers.TrainerCallback):  # type: ignore[misc]
    """Reads what the documentation of transformers 5.23 promises, and asks for a save and an evaluation of its own."""

    def __init__(self, at: int = 3) -> None:
        self.at = at
        self.notes: list[tuple[Any, ...]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.notes.append(("begin", state.max_steps, args.logging_steps, args.per_device_train_batch_size))
        assert [*given["model"].parameters()]
        assert given["processing_class"].decode(given["processing_class"].encode("text")) == "text"
        assert len(given["optimizer"].param_groups) >= 1
        assert given["lr_scheduler"].get_last_lr()[0] <= args.learning_rate
        assert len(given["train_dataloader"]) == 32
        assert os.fspath(args.output_dir)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.at:
            control.should_save = control.should_evaluate = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        assert state.log_history[-1].items() >= logs.items()
        if "loss" in logs:
            self.notes.append(("log", state.global_step, round(state.epoch, 6), logs["loss"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.notes.append(("evaluate", state.global_step, metrics["eval_loss"], state.best_metric or 0.0))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.notes.append(("save",))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.notes.append(("end", state.global_step, control.should_training_stop))


class Saves(transformers.TrainerCallback):
    """As scripts for that library write them."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.seen.append((state.global_step, Path(kwargs["checkpoint"]).name))
        return control

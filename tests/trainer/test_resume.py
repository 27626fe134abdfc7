"""A run that is cut off and resumed equals an uninterrupted one bit by bit: losses, norms, weights, moments, data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.config.schema import AdafactorSettings
from forgather_cli.errors import SetupError
from forgather_cli.optim.build import build_optimizer
from forgather_cli.trainer import Trainer


class Cut(TrainerCallback):
    """Notes the curve and ends the run like a crash would: nothing is saved after ``at`` steps."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.points: dict[int, tuple[float, float]] = {}
        self.logs: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            control.should_abort_without_save = True

    def on_train_metrics(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.points[state.global_step + 1] = (float(kwargs["loss"]), float(kwargs["grad_norm"]))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "grad_norm" in kwargs["logs"]:
            self.logs[state.global_step] = kwargs["logs"]["loss"]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, logging out of step, sgd": {
        "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 7, "optim": "sgd",
    },
    "workers, synchronous": {"dataloader_num_workers": 2, "async_save": False},
    "epoch change, no seed": {"max_steps": 20, "per_device_train_batch_size": 8, "seed": -1},
    "incomplete batches": {"max_steps": 20, "per_device_train_batch_size": 7, "dataloader_drop_last": False},
    "adafactor": {
        "optimizer_factory": lambda named: build_optimizer(AdafactorSettings(), named, lr=1e-2, weight_decay=0.0)
    },
    "in backward": {"fuse_optim_with_backward": True, "max_grad_norm": None},
}  # fmt: skip


def train(path: Path, cut: Cut, resume: bool = False, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 12, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 5, "warmup_steps": 3,
        "logging_steps": 1, "learning_rate": 1e-2, "deterministic": True, **changes,
    }  # fmt: skip
    model = tiny.decoder(attention_dropout=0.1, residual_dropout=0.1)
    data = tiny.RandomTokens(40, ragged=True)
    trainer = tiny.script(path, model, data, callbacks=[cut], resume_from_checkpoint=resume, **settings)
    trainer.train()
    return trainer


def final_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    return {**weights, **trainer.optimizer.state_tensors()}


@pytest.mark.parametrize("case", CASES)
def test_resume_is_exact(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda n: b"\x07" * n)  # seed=-1 draws the same seed in the run compared with
    whole, first, second = Cut(), Cut(at=8), Cut()
    expected = train(tmp_path / "whole", whole, **CASES[case])
    train(tmp_path / "cut", first, **CASES[case])
    monkeypatch.setattr("os.urandom", lambda n: b"\x09" * n)
    resumed = train(tmp_path / "cut", second, resume=True, **CASES[case])
    assert resumed.state.resumed_step == 5
    assert {**first.points, **second.points} == whole.points
    assert {**first.logs, **second.logs} == whole.logs
    a, b = final_state(expected), final_state(resumed)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_save_that_was_cut_off_leaves_the_one_before(tmp_path: Path) -> None:
    whole, second = Cut(), Cut()
    train(tmp_path / "whole", whole)
    train(tmp_path / "cut", Cut(at=11))
    newest = tmp_path / "cut" / "checkpoints" / "step-00000010"
    newest.rename(newest.with_name(".tmp-step-00000010-99.0"))
    (newest.with_name(".tmp-step-00000010-99.0") / "manifest.json").unlink()
    resumed = train(tmp_path / "cut", second, resume=True)
    assert resumed.state.resumed_step == 5
    assert all(whole.points[step] == second.points[step] for step in range(6, 13))
    assert not [p for p in newest.parent.iterdir() if p.name.startswith(".")]


def test_only_the_components_asked_for_are_restored(tmp_path: Path) -> None:
    train(tmp_path, Cut(at=8))
    cut = Cut(at=1)
    trainer = train(tmp_path, cut, resume=True, resume_components=["model"], save_steps=500, save_strategy="no")
    assert trainer.state.resumed_step == 0
    assert min(cut.points) == 1


def test_ignore_data_skip_begins_the_data_anew(tmp_path: Path) -> None:
    train(tmp_path, Cut(at=8))
    trainer = train(tmp_path, Cut(at=6), resume=True, ignore_data_skip=True)
    assert trainer.run.train_loader.state_dict() == {"epoch": 0, "sample": 4}


@pytest.mark.parametrize("save_strategy", ["steps", "no"])  # a signal saves whatever it says
def test_state_that_cannot_be_saved_is_found_before_the_first_step(tmp_path: Path, save_strategy: str) -> None:
    class Odd(TrainerCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": [1, {2, 3}]}

    cut = Cut()
    with pytest.raises(SetupError, match=r"callbacks.*Odd.*seen.*1.*set"):
        tiny.script(tmp_path, max_steps=5, save_strategy=save_strategy, callbacks=[Odd, cut]).train()
    assert not cut.points

"""``Trainer`` and ``TrainingArguments`` stand in for Hugging Face's in a simple script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import nn

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.config.load import load_config
from forgather_cli.trainer.arguments import RecipeArguments

SCRIPT_SETTINGS: dict[str, Any] = {
    "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "lr_scheduler_type": "linear", "logging_steps": 1, "weight_decay": 0.01, "adam_beta2": 0.95,
    "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "optim": "adamw_torch",
}  # fmt: skip


def script(
    trainer_class: type, arguments_class: type, path: Path, data: Any, **more: Any
) -> tuple[list[tuple[float, float]], nn.Module, float]:
    """A Hugging Face script; only the two imports change."""
    model = tiny.llama()
    trainer = trainer_class(
        model=model,
        args=arguments_class(output_dir=str(path), **SCRIPT_SETTINGS, **more),
        train_dataset=data,
        eval_dataset=data[:8],
    )
    trainer.train()
    curve = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
    return curve, model, trainer.evaluate()["eval_loss"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_hugging_face_script_gives_the_same_curve(tmp_path: Path, smoothing: float) -> None:
    row, more = tiny.RandomTokens(1, ragged=True)[0], {"label_smoothing_factor": smoothing}
    data = [row] * 48  # one sample, so that the two libraries' orders of samples agree
    theirs, their_model, their_loss = script(
        transformers.Trainer, transformers.TrainingArguments, tmp_path / "theirs", data, **more
    )
    mine, my_model, my_loss = script(Trainer, TrainingArguments, tmp_path / "mine", data, **more)
    assert mine == [pytest.approx(each, rel=1e-5) for each in theirs]
    assert my_loss == pytest.approx(their_loss, rel=1e-5)
    for a, b in zip(my_model.parameters(), their_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("default")  # of TensorBoard's dependencies
def test_callbacks_of_hugging_face_s_library_run_and_write(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {**SCRIPT_SETTINGS, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    settings |= {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.0, "run_name": "mine", "max_steps": 12}
    stopper = transformers.EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=1.0)
    callbacks: list[Any] = [stopper, transformers.ProgressCallback, transformers.PrinterCallback]
    callbacks += [transformers.integrations.TensorBoardCallback]
    args, data = TrainingArguments(str(tmp_path), **settings), tiny.RandomTokens(8)
    done = Trainer(tiny.llama(), args, None, data, data, callbacks=callbacks).train()
    assert done.global_step == 6  # the first evaluation is the best, and two without a gain follow
    printed = capfd.readouterr()
    assert len(re.findall(r"'grad_norm': '", printed.out)) == 2 * 6  # by the bar's callback, and by the printer
    assert "6/12" in printed.err
    [events] = (tmp_path / "runs").iterdir()
    told = tiny.tensorboard(events)
    assert [scalar.step for scalar in told.Scalars("train/loss")] == list(range(1, 7))
    assert [scalar.step for scalar in told.Scalars("eval/loss")] == [2, 4, 6]
    texts = {name: json.loads(told.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0])
             for name in ("args", "model_config")}  # fmt: skip
    assert (texts["args"]["max_steps"], texts["args"]["run_name"]) == (12, "mine")
    assert texts["model_config"]["hidden_size"] == 32


def test_callbacks_of_the_library_find_a_recipe_s_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    words = ["output_dir=outputs/mine", "callbacks.control.auth_token=0123456789abcdef"]
    args = RecipeArguments(load_config(None, words).config)
    told = json.loads(args.to_json_string())
    assert (told["run_name"], told["model"]["type"], told["callbacks"]["control"]["auth_token"]) == (
        "mine", "decoder", "<AUTH_TOKEN>"
    )  # fmt: skip
    assert (args.world_size, args.process_index, args.local_process_index, args.project) == (4, 3, 0, "huggingface")
    flat = args.to_sanitized_dict()
    assert {type(value) for value in flat.values()} <= {bool, int, float, str}
    assert flat["train_batch_size"] == args.train_batch_size == 8


def test_optimizers_and_schedulers_of_the_users(tmp_path: Path) -> None:
    model = tiny.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.1)
    tiny.script(tmp_path, model, max_steps=6, optimizers=(optimizer, scheduler)).train()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_train_can_be_called_again(tmp_path: Path) -> None:
    trainer = tiny.script(tmp_path, max_steps=6)
    first, second = trainer.train(), trainer.train()
    assert (first.global_step, second.global_step) == (6, 6)
    assert second.training_loss < first.training_loss


def test_save_model_writes_a_directory_that_transformers_loads(tmp_path: Path) -> None:
    for n, model in enumerate((tiny.llama(), tiny.decoder())):
        tiny.script(tmp_path, model).save_model(str(tmp_path / f"model{n}"))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"model{n}")
        ids = tiny.RandomTokens(2).tokens
        with torch.no_grad():
            expected = model(ids)
            torch.testing.assert_close(loaded(ids).logits, getattr(expected, "logits", expected), rtol=1e-5, atol=1e-5)

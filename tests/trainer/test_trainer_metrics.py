"""Metrics of a script: ``compute_metrics`` beside Hugging Face's own Trainer, and what is done with the results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.data.loaders.collate import Counts
from forgather_cli.distributed import World
from forgather_cli.trainer.metrics import Flops, TrainMetrics

CPU = torch.device("cpu")


def measures(told: Any) -> dict[str, Any]:
    """Of logits or of token ids, and of whatever else is there."""
    predictions, labels = told.predictions, told.label_ids
    ids = predictions.argmax(-1) if predictions.ndim == 3 else predictions
    counted = labels[:, 1:] != -100
    found = {"accuracy": (ids[:, :-1] == labels[:, 1:])[counted].mean(), "eval_rows": len(labels)}
    if predictions.ndim == 3:
        found["logits"] = np.float32(predictions.sum())
    if told.inputs is not None:
        found["inputs"] = int(told.inputs.sum())
    if told.losses is not None:  # of each row the mean of its batch
        assert len(told.losses) == len(labels)
        found["losses"] = np.float32(told.losses.mean())
    return found


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("preprocess", "settings"),
    [
        (None, {"include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 2}),
        (lambda logits, labels: logits.argmax(-1), {}),
        (None, {"prediction_loss_only": True}),
    ],
)
def test_compute_metrics_gets_what_the_library_gives_it(
    tmp_path: Path, preprocess: Any, settings: dict[str, Any]
) -> None:
    data, answers = tiny.RandomTokens(11, ragged=True), []
    common = {"per_device_eval_batch_size": 4, "use_cpu": True, "report_to": "none", "disable_tqdm": True, **settings}
    for trainer_class, arguments_class in (
        (transformers.Trainer, transformers.TrainingArguments),
        (Trainer, TrainingArguments),
    ):
        trainer = trainer_class(
            model=tiny.llama(), args=arguments_class(str(tmp_path), **common), eval_dataset=data,
            compute_metrics=measures, preprocess_logits_for_metrics=preprocess,
        )  # fmt: skip
        answers.append((trainer.evaluate(), trainer.predict(data)))
    (theirs, their_output), (mine, my_output) = answers
    measured = {f"eval_{name}" for name in ("accuracy", "rows", "logits", "inputs", "losses")}
    names = measured & theirs.keys()
    assert {name: mine[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-5)
    assert names == measured & mine.keys()
    assert all(isinstance(mine[name], int | float) for name in names)
    if settings.get("prediction_loss_only"):
        assert (names, my_output.predictions, their_output.predictions) == (set(), None, None)
        return
    np.testing.assert_allclose(my_output.predictions, their_output.predictions, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(my_output.label_ids, their_output.label_ids)
    assert my_output.metrics["test_accuracy"] == pytest.approx(their_output.metrics["test_accuracy"])


def test_results_are_printed_and_written_as_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tiny.RandomTokens(16)
    trainer = tiny.script(tmp_path, None, data, data, max_steps=2)
    done = trainer.train()
    assert (trainer.is_world_process_zero(), trainer.is_local_process_zero()) == (True, True)
    capsys.readouterr()
    trainer.log_metrics("train", done.metrics)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "***** train metrics *****"
    assert [line.split("=")[0].strip() for line in shown[1:]] == sorted(done.metrics)
    trainer.save_metrics("train", done.metrics)
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    read = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert read["train_results"] == done.metrics
    assert read["eval_results"] == metrics
    assert read["all_results"] == {**done.metrics, **metrics}
    assert read["trainer_state"]["global_step"] == 2
    assert read["trainer_state"]["log_history"] == trainer.state.log_history


def test_dataloaders_yield_the_batches_that_are_trained_and_evaluated(tmp_path: Path) -> None:
    data = tiny.RandomTokens(22)
    trainer = tiny.script(tmp_path, None, data, data, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    loader = trainer.get_train_dataloader()
    batches = list(loader)
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 4, 4, 4, 2]
    assert len(loader) == len(batches)
    rows = {tuple(row.tolist()) for batch in loader for row in batch["input_ids"]}
    assert rows == {tuple(row.tolist()) for row in data.tokens}
    evaluated = trainer.get_eval_dataloader()
    assert (len(evaluated), sum(len(batch["labels"]) for batch in evaluated)) == (3, 22)
    assert len(trainer.get_eval_dataloader(tiny.RandomTokens(8))) == 1


def test_an_open_intervals_sums_survive_a_resume_whenever_it_is_cut() -> None:
    """Losses and norms are added up some steps at a time; what a checkpoint keeps has all of them."""
    generator = torch.Generator().manual_seed(3)
    steps = [(torch.rand((), generator=generator), torch.rand((), generator=generator), n + 5) for n in range(40)]

    def logged(*cuts: int) -> dict[str, float]:
        metrics = TrainMetrics(CPU, World(), 0, Flops(1.0, 1.0))
        for n, (loss, norm, targets) in enumerate(steps):
            metrics.add(Counts(targets, 8, 64, 1, num_bytes=3 * targets), loss, norm)
            if n in cuts:
                metrics.fold()
                state, metrics = metrics.state_dict(), TrainMetrics(CPU, World(), 0, Flops(1.0, 1.0))
                metrics.load_state_dict(state)
        logs, _ = metrics.read()
        return {name: logs[name] for name in ("loss", "bits_per_byte", "grad_norm", "max_grad_norm", "tokens")}

    whole = logged()
    assert whole["loss"] == pytest.approx(sum(float(x) * t for x, _, t in steps) / sum(t for *_, t in steps))
    assert whole["max_grad_norm"] == max(float(norm) for _, norm, _ in steps)
    for cuts in ((0,), (3, 15), (16, 31), tuple(range(40))):
        assert logged(*cuts) == whole


def test_the_bytes_of_an_interval_that_a_checkpoint_of_0_2_left_open_are_not_known() -> None:
    metrics = TrainMetrics(CPU, World(), 0, Flops(1.0, 1.0))
    step = Counts(4, 8, 64, 1, num_bytes=6), torch.tensor(1.0), torch.tensor(1.0)
    metrics.add(*step)
    state = metrics.state_dict()
    del state["num_bytes"]
    metrics.load_state_dict(state)
    metrics.add(*step)
    assert "bits_per_byte" not in metrics.read()[0]
    metrics.add(*step)
    assert metrics.read()[0]["bits_per_byte"] == pytest.approx(4 / math.log(2) / 6)

"""``Trainer`` and ``TrainingArguments`` stand in for Hugging Face's in a script, which leaves a run directory."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from program import forgather, refusal
from torch import nn

import forgather_cli
from forgather_cli import Trainer, TrainingArguments
from forgather_cli.config.decode import load_saved
from forgather_cli.config.load import load_config
from forgather_cli.data.loaders.collate import Counts
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.distributed import World
from forgather_cli.errors import CallbackError, SetupError, TrainingError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import init_parameters
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.arguments import RecipeArguments
from forgather_cli.trainer.metrics import Flops, TrainMetrics

SCRIPT_SETTINGS: dict[str, Any] = {
    "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "lr_scheduler_type": "linear", "logging_steps": 1, "weight_decay": 0.01, "adam_beta2": 0.95,
    "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "optim": "adamw_torch",
}  # fmt: skip


def script(library: Any, path: Path, data: Any, **more: Any) -> tuple[list[tuple[float, float]], nn.Module, float]:
    """A Hugging Face script; only the two imports change."""
    model, args = tiny.llama(), library.TrainingArguments(output_dir=str(path), **SCRIPT_SETTINGS, **more)
    trainer = library.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    curve = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
    return curve, model, trainer.evaluate()["eval_loss"]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_hugging_face_script_gives_the_same_curve(tmp_path: Path, smoothing: float) -> None:
    row, more = tiny.RandomTokens(1, ragged=True)[0], {"label_smoothing_factor": smoothing}
    data = [row] * 48  # one sample, so that the two libraries' orders of samples agree
    theirs, their_model, their_loss = script(transformers, tmp_path / "theirs", data, **more)
    mine, my_model, my_loss = script(forgather_cli, tmp_path / "mine", data, **more)
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


def trainer(path: Path, data: Any = None, **given: Any) -> Trainer:
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "steps"}
    settings |= {"processing_class": ByteTokenizer(), "disable_tqdm": False, **given}
    data, evaluated = data or tiny.RandomTokens(64, vocab=256), tiny.RandomTokens(8, vocab=256)
    return tiny.script(path, tiny.decoder(vocab_size=258), data, evaluated, **settings)


def test_the_commands_take_a_script_s_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    trainer(run, eval_strategy="steps", eval_steps=2, save_steps=2, optimizer="muon").train()
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("step 4", "eval loss", "checkpoint saved", str(run)))
    assert [step for step, *_ in tiny.training_curve(run)] == [1, 2, 3, 4]
    saved = load_saved(run / "config.yaml")
    assert (saved.max_steps, saved.output_dir, getattr(saved.optimizer, "type", "")) == (4, str(run), "muon")
    assert saved.model.path == "<forgather_cli.models.decoder.Decoder>"

    assert forgather("logs", "summary", "--json", str(run)) == 0
    told = json.loads(capsys.readouterr().out)
    [summary] = told if isinstance(told, list) else [told]
    assert (summary["state"], summary["step"], summary["max_steps"]) == ("done", 4, 4)
    assert forgather("checkpoint", "list", "--json", str(run)) == 0
    assert "step-00000004" in capsys.readouterr().out
    assert forgather("logs", "plot", str(run), "-o", str(tmp_path / "loss.png")) == 0
    assert "trainer.train(resume_from_checkpoint=True)" in refusal(capsys, "resume", str(run), "max_steps=9")
    assert forgather("finalize", str(run), str(tmp_path / "model")) == 0
    (tmp_path / "text.txt").write_text("Some text to measure by.\n" * 40)
    words = ["data=text", f"data.files=[{tmp_path / 'text.txt'}]", "data.seq_len=16", "device=cpu"]
    assert "data=text" in refusal(capsys, "eval", str(run))
    for source in (run, tmp_path / "model"):
        assert forgather("eval", str(source), *words, "--json") == 0
        assert 4 < json.loads(capsys.readouterr().out)["eval_loss"] < 7


def test_what_was_resumed_from_another_run_is_saved_in_this_one_without_a_step_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from_other = str(RunDir(tmp_path / "a").checkpoint(4))
    trainer(tmp_path / "a").train()
    assert trainer(tmp_path / "b").train(resume_from_checkpoint=from_other).global_step == 4
    ended = read_exit_record(RunDir(tmp_path / "b"))
    assert (ended.state, ended.code, ended.step) == ("done", 0, 4)
    assert RunDir(tmp_path / "b").checkpoint_steps() == [4]
    stopped = trainer(tmp_path / "c", max_steps=6, should_stop=lambda: int(signal.SIGTERM))
    assert stopped.train(resume_from_checkpoint=from_other)
    assert RunDir(tmp_path / "c").checkpoint_steps() == [4]
    for root in ("a", "b"):  # its own one is not saved again
        capsys.readouterr()
        saved = RunDir(tmp_path / root).checkpoint(4).stat().st_ino
        trainer(tmp_path / root).train(resume_from_checkpoint=True)
        assert RunDir(tmp_path / root).checkpoint(4).stat().st_ino == saved
        assert "nothing left to train" in capsys.readouterr().out


def test_how_a_script_s_run_ended_is_told_and_it_ends_where_its_directory_goes_away(tmp_path: Path) -> None:
    raises = tiny.acts(on_step_end=lambda state, *_, **kwargs: {1: state}[state.global_step])
    with pytest.raises(CallbackError, match="KeyError: 2"):
        trainer(tmp_path / "failed", callbacks=[raises]).train()
    ended = read_exit_record(RunDir(tmp_path / "failed"))
    assert (ended.code, ended.step, "KeyError: 2" in ended.reason) == (1, 1, True)
    with pytest.raises(SetupError):
        trainer(tmp_path / "mistaken", data=[{"input_ids": "no tensor"}] * 8).train()
    assert not (tmp_path / "mistaken").exists()
    run = tmp_path / "run"
    moves = tiny.acts(on_step_end=lambda state, *_, **kwargs: state.global_step == 2 and run.rename(tmp_path / "moved"))
    with pytest.raises(TrainingError, match="was removed"):
        trainer(run, save_steps=2, logging_steps=100, callbacks=[moves]).train()
    assert not run.exists()


def test_who_only_evaluates_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "run"
    evaluates = trainer(path)
    before = evaluates.evaluate()["eval_loss"]
    assert not path.exists()
    evaluates.train()
    after = evaluates.evaluate()["eval_loss"]
    assert after < before
    assert [r["eval_loss"] for r in tiny.metrics(path) if "eval_loss" in r] == [after]


def test_a_run_is_described_and_logging_dir_takes_metrics_and_leaves_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = tiny.train(tiny.config(run, f"logging_dir={tmp_path / 'logs'}"), RunDir(run))
    assert tiny.training_curve(tmp_path / "logs")
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints"]
    info = trained.info()
    assert f"{sum(p.numel() for p in trained.model.parameters()):,} parameters" in info["model"]
    assert "sequences of 16" in info["train split"]
    assert info["batch"].startswith("8 ")


def test_construction_on_meta_device_and_cpu_gives_the_same_weights_on_a_cpu(tmp_path: Path) -> None:
    words = ("max_steps=1", "learning_rate=0", "weight_decay=0", "eval_strategy=no", "save_strategy=no")
    for where in ("meta", "device", "cpu"):
        config = tiny.config(tmp_path / where, f"construct_model_on={where}", *words)
        model = tiny.train(config, RunDir(tmp_path / where)).model
        expected = Decoder(model.settings)
        init_parameters(expected, config.seed)
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in expected.state_dict().items())


def measures(told: Any) -> dict[str, Any]:
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
    for library in (transformers, forgather_cli):
        args = library.TrainingArguments(str(tmp_path), **common)
        given = {"compute_metrics": measures, "preprocess_logits_for_metrics": preprocess}
        trainer = library.Trainer(model=tiny.llama(), args=args, eval_dataset=data, **given)
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


def train_metrics() -> TrainMetrics:
    return TrainMetrics(torch.device("cpu"), World(), 0, Flops(1.0, 1.0))


def test_an_open_intervals_sums_survive_a_resume_whenever_it_is_cut() -> None:
    """Losses and norms are added up some steps at a time; what a checkpoint keeps has all of them."""
    generator = torch.Generator().manual_seed(3)
    steps = [(torch.rand((), generator=generator), torch.rand((), generator=generator), n + 5) for n in range(40)]

    def logged(*cuts: int) -> dict[str, float]:
        metrics = train_metrics()
        for n, (loss, norm, targets) in enumerate(steps):
            metrics.add(Counts(targets, 8, 64, 1, num_bytes=3 * targets, units=targets), loss, norm)
            if n in cuts:
                metrics.fold()
                state, metrics = metrics.state_dict(), train_metrics()
                metrics.load_state_dict(state)
        logs, _ = metrics.read()
        return {name: logs[name] for name in ("loss", "bits_per_byte", "grad_norm", "max_grad_norm", "tokens")}

    whole = logged()
    assert whole["loss"] == pytest.approx(sum(float(x) * t for x, _, t in steps) / sum(t for *_, t in steps))
    assert whole["max_grad_norm"] == max(float(norm) for _, norm, _ in steps)
    for cuts in ((0,), (3, 15), (16, 31), tuple(range(40))):
        assert logged(*cuts) == whole


def test_the_bytes_of_an_interval_that_a_checkpoint_of_0_2_left_open_are_not_known() -> None:
    metrics = train_metrics()
    step = Counts(4, 8, 64, 1, num_bytes=6, units=4), torch.tensor(1.0), torch.tensor(1.0)
    metrics.add(*step)
    state = metrics.state_dict()
    del state["num_bytes"]
    metrics.load_state_dict(state)
    metrics.add(*step)
    assert "bits_per_byte" not in metrics.read()[0]
    metrics.add(*step)
    assert metrics.read()[0]["bits_per_byte"] == pytest.approx(4 / math.log(2) / 6)

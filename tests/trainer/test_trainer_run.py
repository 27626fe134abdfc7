"""A script's Trainer leaves a run directory as ``forgather train`` does."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from program import forgather

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.config.decode import load_saved
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import CallbackError, SetupError, TrainingError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import init_parameters
from forgather_cli.run_dir import RunDir


def trainer(
    path: Path, *, data: Any = None, callbacks: Any = (), should_stop: bool = False, **settings: Any
) -> Trainer:
    """Of a small model that reads bytes."""
    base = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True}
    args = TrainingArguments(str(path), **{**base, **settings})
    tokens = tiny.RandomTokens(64, vocab=256)
    given: dict[str, Any] = {"processing_class": ByteTokenizer(), "callbacks": callbacks}
    if should_stop:
        given["should_stop"] = lambda: int(signal.SIGTERM)
    return Trainer(tiny.decoder(vocab_size=258), args, None, data or tokens, tiny.RandomTokens(8, vocab=256), **given)


def test_the_commands_take_a_script_s_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    trainer(run, eval_strategy="steps", eval_steps=2, save_steps=2, optimizer="muon").train()
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("step 4", "eval loss", "checkpoint saved", str(run)))
    assert [step for step, *_ in tiny.training_curve(run)] == [1, 2, 3, 4]
    saved = load_saved(run / "config.yaml")
    assert (saved.max_steps, saved.output_dir, getattr(saved.optimizer, "type", "")) == (4, str(run), "muon")
    assert saved.model.path == "<forgather_cli.models.decoder.Decoder>"  # type: ignore[union-attr]

    assert forgather("logs", "summary", "--json", str(run)) == 0
    told = json.loads(capsys.readouterr().out)
    [summary] = told if isinstance(told, list) else [told]
    assert (summary["state"], summary["step"], summary["max_steps"]) == ("done", 4, 4)
    assert forgather("checkpoint", "list", "--json", str(run)) == 0
    assert "step-00000004" in capsys.readouterr().out
    assert forgather("logs", "plot", str(run), "-o", str(tmp_path / "loss.png")) == 0
    assert forgather("resume", str(run), "max_steps=9") == 2
    assert "trainer.train(resume_from_checkpoint=True)" in capsys.readouterr().err
    assert forgather("finalize", str(run), str(tmp_path / "model")) == 0
    (tmp_path / "text.txt").write_text("Some text to measure by.\n" * 40)
    words = ["data=text", f"data.files=[{tmp_path / 'text.txt'}]", "data.seq_len=16", "device=cpu"]
    assert forgather("eval", str(run)) == 2
    assert "data=text" in capsys.readouterr().err
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
    assert trainer(tmp_path / "c", max_steps=6, should_stop=True).train(resume_from_checkpoint=from_other)
    assert RunDir(tmp_path / "c").checkpoint_steps() == [4]
    for root in ("a", "b"):  # its own one is not saved again
        capsys.readouterr()
        saved = RunDir(tmp_path / root).checkpoint(4).stat().st_ino
        trainer(tmp_path / root).train(resume_from_checkpoint=True)
        assert RunDir(tmp_path / root).checkpoint(4).stat().st_ino == saved
        assert "nothing left to train" in capsys.readouterr().out


def test_how_a_script_s_run_ended_is_told(tmp_path: Path) -> None:
    raises = tiny.acts(on_step_end=lambda state, *_, **kwargs: {1: state}[state.global_step])
    with pytest.raises(CallbackError, match="KeyError: 2"):
        trainer(tmp_path / "failed", callbacks=[raises]).train()
    ended = read_exit_record(RunDir(tmp_path / "failed"))
    assert (ended.code, ended.step, "KeyError: 2" in ended.reason) == (1, 1, True)
    with pytest.raises(SetupError):
        trainer(tmp_path / "mistaken", data=[{"input_ids": "no tensor"}] * 8).train()
    assert not (tmp_path / "mistaken").exists()


def test_a_script_whose_run_directory_goes_away_ends(tmp_path: Path) -> None:
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


# ------------------------------------------------------------------------------------------------- of typed settings


def test_logging_dir_takes_metrics_and_leaves_checkpoints(tmp_path: Path) -> None:
    tiny.train(tiny.config(tmp_path / "run", f"logging_dir={tmp_path / 'logs'}"), RunDir(tmp_path / "run"))
    assert tiny.training_curve(tmp_path / "logs")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]


def test_construction_on_meta_device_and_cpu_gives_the_same_weights_on_a_cpu(tmp_path: Path) -> None:
    words = ("max_steps=1", "learning_rate=0", "weight_decay=0", "eval_strategy=no", "save_strategy=no")
    for where in ("meta", "device", "cpu"):
        config = tiny.config(tmp_path / where, f"construct_model_on={where}", *words)
        model = tiny.train(config, RunDir(tmp_path / where)).model
        expected = Decoder(model.settings)
        init_parameters(expected, config.seed)
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in expected.state_dict().items())


def test_a_run_is_described(tmp_path: Path) -> None:
    trainer = tiny.train(tiny.config(tmp_path), RunDir(tmp_path))
    info = trainer.info()
    assert f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters" in info["model"]
    assert "sequences of 16" in info["train split"]
    assert info["batch"].startswith("8 ")

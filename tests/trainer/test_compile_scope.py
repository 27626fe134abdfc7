"""What ``torch_compile=auto`` and ``torch_compile_scope`` stand for in a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import yaml
from program import forgather

from forgather_cli.config.decided import decided
from forgather_cli.config.load import load_config
from forgather_cli.errors import ConfigError
from forgather_cli.strategies.build import build_strategy
from forgather_cli.trainer.build import model_spec, strategy_of
from forgather_cli.trainer.given import Objects

SMALL = ["model=nano", "data=synthetic", "seq_len=16", "num_samples=64", "num_eval_samples=4", "global_batch_size=4",
         "callbacks=minimal", "warmup_steps=1", "max_steps=2", "device=cpu", "precision=fp32"]  # fmt: skip
COMPILED = [*SMALL, "torch_compile=true", "torch_compile_backend=eager"]
GPU = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30)
LARGE = ["model.hidden_size=1024", "model.num_attention_heads=16", "model.num_hidden_layers=12", "seq_len=1024",
         "global_batch_size=16", "per_device_train_batch_size=16"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "is_on"),
    [
        ([*LARGE, "max_steps=200"], False),  # saves 20 s
        ([*LARGE, "max_steps=20000"], True),
        (["max_steps=20000"], False),  # as many, of a few milliseconds
        ([*LARGE, "max_steps=-1", "num_train_epochs=100"], False),  # of unknown number
        ([*LARGE, "max_steps=20000", "trainer=pipeline", "schedule=ZBVZeroBubble"], False),
    ],
)
def test_auto_is_on_where_the_run_pays_for_the_compilation(
    words: list[str], is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: GPU)
    config = load_config(None, [*SMALL, "device=auto", "torch_compile=auto", *words]).config
    assert decided(config)[0].torch_compile is is_on
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decided(config)[0].torch_compile is False


def test_auto_is_decided_once_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", *SMALL, "torch_compile=auto", "torch_compile_backend=eager", "output_dir=run"]
    assert forgather(*words) == 0
    assert "torch_compile=auto: false (not on CUDA)" in capsys.readouterr().out.splitlines()
    assert yaml.safe_load(Path("run/config.yaml").read_text())["torch_compile"] is False
    assert forgather(*words, "max_steps=3", "resume_from_checkpoint=true") == 0
    assert "torch_compile=auto: false (as the run was begun)" in capsys.readouterr().out.splitlines()


def spec_of(*words: str, **objects: Any) -> tuple[Any, Any]:
    """(how the model is to be made, the loss of the settings)."""
    config = load_config(None, [*COMPILED, *words]).config
    given = dict.fromkeys(field.name for field in fields(Objects)) | objects
    strategy, loss, minimised, _ = strategy_of(config, Objects(**given))
    return model_spec(tiny.decoder, config, strategy, losses=(loss, minimised)), loss


def mean_loss(logits: Any, labels: Any) -> Any:
    return logits.float().square().mean()


@pytest.mark.parametrize(
    ("words", "objects", "as_one"),
    [
        ([], {}, True),
        (["loss=linear_cross_entropy"], {}, True),
        (["trainer=ddp"], {}, True),
        (["torch_compile_scope=blocks"], {}, False),
        (["optimizer=adamw", "fuse_optim_with_backward=true", "max_grad_norm=0"], {}, False),
        (["precision=fp16"], {}, False),
        (["loss=linear_cross_entropy", "torch_compile_fullgraph=true"], {}, False),
        ([], {"loss_fn": mean_loss}, False),
    ],
)
def test_what_is_compiled(words: list[str], objects: dict[str, Any], as_one: bool) -> None:
    spec, loss = spec_of(*words, **objects)
    assert (spec.compile is None, spec.compile_with_loss is not None) == (as_one, as_one)
    assert (loss.compiled is None) == (loss.piece is None or (as_one and loss.kernel is None)), "beside other graphs"
    asked = [*words, "torch_compile_scope=model"]
    if as_one:
        assert spec_of(*asked, **objects)[0].compile_with_loss["backend"] == "eager"
    elif "torch_compile_scope=blocks" not in words:
        with pytest.raises(ConfigError, match=r"^torch_compile_scope: .*set torch_compile_scope=blocks"):
            spec_of(*asked, **objects)


def test_a_strategy_that_does_not_know_of_it_compiles_blocks() -> None:
    config = load_config(None, COMPILED).config
    strategy = build_strategy(config)
    strategy.compiles_with_loss = False
    assert model_spec(tiny.decoder, config, strategy).compile_with_loss is None


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.13's dynamo reads it itself
def test_a_run_compiled_as_one_trains_evaluates_and_resumes(tmp_path: Path, one_thread: None) -> None:
    losses = []
    for name, words in (("plain", SMALL), ("compiled", COMPILED)):
        run = ["train", *words, "eval_steps=1", f"output_dir={tmp_path / name}"]
        assert forgather(*run) == 0
        assert forgather(*run, "max_steps=3", "resume_from_checkpoint=true") == 0
        lines = map(yaml.safe_load, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([line[key] for line in lines for key in ("loss", "eval_loss") if key in line])
    assert losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)

"""What the machine decides of the loss: ``loss=auto`` and a null ``chunk_size``; who says, keeps and plans for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from program import forgather
from test_loss_kernels import STANDINS

from forgather_cli import TrainingArguments
from forgather_cli.config.decided import decided
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config, CrossEntropySettings, LigerSettings, LinearCrossEntropySettings
from forgather_cli.hardware import chunk_tokens
from forgather_cli.loss.build import build_loss
from forgather_cli.loss.losses import CrossEntropy, LinearCrossEntropy
from forgather_cli.plan.run import make_plan

SMALL = ["data=synthetic", "seq_len=16", "num_samples=64", "num_eval_samples=4", "global_batch_size=4",
         "callbacks=minimal", "warmup_steps=1", "max_steps=1", "precision=fp32"]  # fmt: skip
AS_CHOSEN = "loss=linear_cross_entropy"
GiB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds a GPU of 80 GiB; no package of kernels is installed."""
    card = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 * GiB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)


def composed(*words: str) -> Config:
    return load_config(None, words).config


CASES = {
    (): "linear_cross_entropy",
    ("device=cpu",): "cross_entropy",
    ("torch_compile=true",): "cross_entropy",
    ("model._target_=users_parts.Words",): "cross_entropy",
    ("model=transformers", "model.config={model_type: gpt2, n_layer: 2}"): "cross_entropy",
    ("model=pretrained", "model.path=x", "adapter=lora"): "cross_entropy",
    ("precision=fp8", "precision.exclude=[]"): "cross_entropy",
}


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_on_cuda_it_is_the_first_that_model_and_settings_take(words: tuple[str, ...], gpu: None) -> None:
    config = composed(*SMALL, *words)
    assert config.loss.type == "auto"
    assert decided(config)[0].loss.type == CASES[words]


def test_liger_comes_first_where_it_is_installed_and_can_be(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "triton.py").touch()
    for folder in (STANDINS, tmp_path):
        monkeypatch.syspath_prepend(folder)
    config, said = decided(composed(*SMALL, "z_loss=0.01", "label_smoothing=0.1"))
    assert config.loss == LigerSettings(z_loss=0.01, label_smoothing=0.1)
    assert [each.says for each in said if each.why] == ["loss=auto: liger"]
    pipeline = ("trainer=pipeline", "schedule=ZBVZeroBubble", "nproc_per_node=2")  # splits the backward
    assert decided(composed(*pipeline, "data=synthetic", "z_loss=0.01"))[0].loss == LinearCrossEntropySettings(
        z_loss=0.01, chunk_size=4096
    )


@pytest.mark.parametrize(("memory", "tokens"), [(8, 512), (23.6, 1024), (80, 4096), (141, 8192), (288, 8192), (1, 256)])
def test_a_chunk_is_as_long_as_the_memory_allows(memory: float, tokens: int) -> None:
    assert chunk_tokens(SimpleNamespace(total_memory=int(memory * GiB))) == tokens
    assert tokens == 256 or tokens * 2**17 * 6 <= memory * GiB / 16
    assert chunk_tokens(None) == 256


def test_a_run_says_and_keeps_what_was_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    def trained(*words: str) -> tuple[list[str], dict[str, object]]:
        """(what was said of the loss, that of the config.yaml that it has written)."""
        before = {*Path().glob("*/config*.yaml")}
        assert forgather(*words) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]
        [newest] = {*Path().glob("*/config*.yaml")} - before
        return said, yaml.safe_load(newest.read_text())["loss"]

    monkeypatch.chdir(tmp_path)
    small = ["train", "model=nano", *SMALL, "device=cpu"]
    plain = {"type": "cross_entropy", "z_loss": 0.1, "label_smoothing": 0.0}
    said, kept = trained(*small, "z_loss=0.1", "output_dir=plain")
    assert (said, kept) == ([], plain)
    assert trained("resume", "plain", "max_steps=2") == ([], plain)
    said, kept = trained(*small, AS_CHOSEN, "output_dir=chunked")
    assert (said, kept["chunk_size"]) == ([], 256)
    trained(*small, AS_CHOSEN, "chunk_size=4096", "output_dir=of_a_gpu")
    again = ("output_dir=of_a_gpu", "resume_from_checkpoint=true")
    said, kept = trained(*small, AS_CHOSEN, *again, "max_steps=2")
    assert (said, kept["chunk_size"]) == (["loss.chunk_size=null: 4096 (as the run was begun)"], 4096)
    said, kept = trained(*small, *again, "z_loss=0.2", "max_steps=3")
    assert said == ["loss=auto: linear_cross_entropy (as the run was begun)"]
    assert (kept["chunk_size"], kept["z_loss"]) == (4096, 0.2)


def test_plans_count_with_it(gpu: None) -> None:
    auto, known = (make_plan(composed(*SMALL, *words)) for words in ([], [AS_CHOSEN, "chunk_size=4096"]))
    assert auto == known
    assert auto != make_plan(composed(*SMALL, "loss=cross_entropy"))


def test_scripts_and_whoever_builds_a_loss_alone_get_one(gpu: None) -> None:
    assert TrainingArguments("out").loss == CrossEntropySettings()
    assert isinstance(build_loss(TrainingArguments("out", loss="auto").loss), CrossEntropy)
    for device, tokens in (("cuda", 4096), ("cpu", 256)):
        loss = build_loss(LinearCrossEntropySettings(), device=torch.device(device))
        assert isinstance(loss, LinearCrossEntropy)
        assert loss._options["chunk_size"] == tokens

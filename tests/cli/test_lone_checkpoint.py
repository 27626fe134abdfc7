"""A checkpoint directory that was copied away from its run: each command takes it, or says what does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from program import document, forgather, modules_after, refusal
from tiny import SHAPE

from forgather_cli.config.load import load_config
from forgather_cli.hub import with_local_model
from forgather_cli.run_dir import RunDir, run_of

STEP = "step-00000002"
SMALL = [
    "model=nano", *(f"model.{name}={size}" for name, size in SHAPE.items()), "callbacks=minimal", "device=cpu",
]  # fmt: skip
AGAIN = ["precision=fp32", "seq_len=32", "global_batch_size=2", "max_steps=2", "eval_strategy=no", "logging_steps=1",
         "data=text", "data.files=[corpus.txt]", "data.cache_dir=cache"]  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``RUN`` of two steps, and its checkpoint ``elsewhere/step-...`` under a config.yaml that is no run's."""
    root = tmp_path_factory.mktemp("lone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        Path("corpus.txt").write_text("def f(x):\n    return x + 1\n" * 200)
        assert forgather("train", *SMALL, *AGAIN, "output_dir=RUN") == 0
        shutil.copytree(RunDir(Path("RUN")).checkpoint(2), Path("elsewhere") / STEP)
        Path("config.yaml").write_text("compute_environment: LOCAL_MACHINE\n")
    return root


@pytest.fixture
def lone(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return Path("elsewhere") / STEP


def test_resume_says_how_its_weights_are_trained_further(lone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(path: Path) -> str:
        return refusal(capsys, "resume", str(path))

    assert f"forgather train model.path={lone}" in refused(lone)
    assert "forgather resume" not in refused(lone)  # what lies two levels up is no run
    (lone / "config.yaml").write_text(Path("RUN/config.yaml").read_text())
    assert f"forgather train model.path={lone}" in refused(lone)
    (lone / "config.yaml").unlink()
    in_place = RunDir(Path("RUN")).checkpoint(2)
    assert refused(in_place.resolve()).endswith("give its run, forgather resume RUN\n")
    assert run_of(in_place / "model") == run_of(in_place) == RunDir(Path("RUN").resolve())
    Path("own_code", "model").mkdir(parents=True)  # of a model without config.json
    shutil.copy(lone / "manifest.json", "own_code")
    assert "resume_from_checkpoint=own_code resume_components=[model]" in refused(Path("own_code"))


def test_eval_takes_it_as_its_model_directory(lone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(source: str) -> Any:
        return document(capsys, "eval", source, "data=text", "data.files=[corpus.txt]", "seq_len=32")

    whole, model = measured(str(lone)), measured(str(lone / "model"))
    assert (whole["step"], model["step"]) == (2, None)
    assert whole["eval_loss"] == model["eval_loss"]
    assert whole["data"] == model["data"]
    (lone / "config.yaml").write_text(Path("RUN/config.yaml").read_text())  # then as it was trained
    assert measured(str(lone))["eval_loss"] == model["eval_loss"]
    (lone / "config.yaml").unlink()


def test_training_goes_on_from_its_weights(lone: Path, tmp_path: Path) -> None:
    for name, start in {"whole": [f"model.path={lone}"], "model": [f"model.path={lone}/model"], "fresh": SMALL}.items():
        assert forgather("train", *start, *AGAIN, f"output_dir={tmp_path / name}") == 0
    curve = tiny.training_curve(tmp_path / "whole")
    assert curve == tiny.training_curve(tmp_path / "model") != tiny.training_curve(tmp_path / "fresh")
    log = (tmp_path / "whole/logs/rank-0.log").read_text()
    assert re.search(r"eval split +[\d,]+ tokens \(\d+\.\d\d% of all\)", log)
    assert forgather("resume", str(tmp_path / "whole"), "max_steps=3") == 0


def test_plan_takes_it_and_an_encoder_decoder_begins_from_it(lone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = [document(capsys, "plan", f"model.path={path}", *AGAIN) for path in (lone, lone / "model")]
    assert plans[0] == plans[1]
    assert plans[0]["num_parameters"]
    config = load_config(None, ["model=qwen3_encdec", f"model.init_from={lone}", "data=ul2"]).config
    found: Any = with_local_model(config)
    assert (found.model.init_from, found.data.tokenizer) == (str(lone / "model"),) * 2


def test_a_directory_without_a_model_is_refused_before_torch_is_imported(made: Path) -> None:
    (made / "empty").mkdir(exist_ok=True)
    code = """
import sys
from program import forgather
for path in ("RUN", "empty", "nowhere"):
    for command in (["train"], ["train", "--dry-run"], ["plan"], ["plan", "--fit"]):
        assert forgather(*command, f"model.path={path}") == 2
sys.stdout.flush()
"""
    assert "torch" not in modules_after(code, cwd=made)

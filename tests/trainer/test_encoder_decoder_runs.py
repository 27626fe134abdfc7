"""Runs of the encoder-decoder: layouts agree, a position goes on, and what is finalized is what transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paired import UL2, WORDS, write_corpus
from program import forgather
from safetensors.torch import load_file
from two_ranks import train_in_pool

from forgather_cli.run_dir import RunDir

PAIRS = ["data=seq2seq", "data.files=[pairs.jsonl]", "max_encoder_length=32", "max_decoder_length=32", "eval_steps=4"]


@pytest.fixture(autouse=True)
def texts(own_directory: None) -> None:
    write_corpus()


def records(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def curve(run: str) -> list[tuple[float, float]]:
    return [(each["loss"], each["grad_norm"]) for each in records(run) if "grad_norm" in each]


def evaluation(run: str) -> dict[str, float]:
    return next(each for each in reversed(records(run)) if "eval_loss" in each)


@pytest.mark.parametrize("data", [PAIRS, [*UL2, "eval_steps=4"]], ids=["seq2seq", "ul2"])
def test_layouts_agree(data: list[str]) -> None:
    words = [*WORDS, *data, "max_steps=4", "save_strategy=no"]
    assert forgather("train", *words, "trainer=single", "output_dir=single") == 0
    first = next(each for each in records("single") if "tokens" in each)
    assert first["tokens"] == first["encoder_tokens"] + first["decoder_tokens"]
    for strategy in ("ddp", "fsdp2"):
        for code, shown in train_in_pool(Path.cwd(), [*words, f"trainer={strategy}", f"output_dir={strategy}"]):
            assert code == 0, shown
        assert curve(strategy) == [pytest.approx(each, rel=1e-5) for each in curve("single")]
        wanted = {name: value for name, value in evaluation("single").items() if "loss" in name or "bits" in name}
        assert {name: evaluation(strategy)[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    if data is not PAIRS:
        assert {"eval_loss_S", "eval_bits_per_byte_S", "eval_bits_per_byte"} <= evaluation("single").keys()


def test_a_run_goes_on_in_another_layout_and_ends_in_a_model_for_transformers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [*WORDS, *UL2, "eval_steps=2", "save_steps=2"]
    assert forgather("train", *words, "max_steps=4", "output_dir=whole") == 0
    assert forgather("train", *words, "max_steps=2", "output_dir=cut") == 0
    assert forgather("resume", "cut", "max_steps=4") == 0
    assert curve("cut") == curve("whole")
    weights = [
        load_file(RunDir(Path(run)).checkpoints / "step-00000004/model/model.safetensors") for run in ("cut", "whole")
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    capfd.readouterr()
    for mode in ([], ["--mode", "R"]):
        assert (
            forgather("generate", "whole", "--prompt", "Line 1", "--greedy", "--max-new-tokens", "8", "--json", *mode)
            == 0
        )
        assert json.loads(capfd.readouterr().out)["num_tokens"] <= 8
    assert forgather("generate", "whole", "--prompt", "x", "--mode", "Q") == 2
    assert forgather("eval", "whole", "--json") == 0
    assert "eval_loss_S" in json.loads(capfd.readouterr().out)
    assert forgather("finalize", "whole", "out") == 0
    proof = json.loads(Path("out/finalize_report.json").read_text())["proof"]
    assert proof["max_logit_difference"] <= 1e-5
    assert proof["greedy_tokens"] > 1
    assert "own process" in proof["loaded_through"]
    code = (
        "import sys; sys.modules['forgather_cli'] = None\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained('out', trust_remote_code=True)\n"
        "tokenizer = AutoTokenizer.from_pretrained('out', trust_remote_code=True)\n"
        "tokens = tokenizer('[S]Line<extra_id_0>', return_tensors='pt')\n"
        "print(model.generate(**tokens, max_new_tokens=3).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

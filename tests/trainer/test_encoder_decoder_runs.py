"""Runs of the encoder-decoder: layouts agree, a position goes on, and transformers loads what is finalized."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paired import UL2, WORDS, write_corpus
from program import forgather
from safetensors.torch import load_file
from tiny import metrics, training_curve
from two_ranks import train_in_pool

from forgather_cli.run_dir import RunDir

PAIRS = ["data=seq2seq", "data.files=[pairs.jsonl]", "max_encoder_length=32", "max_decoder_length=32", "eval_steps=4"]
PADDED = [*(word for word in UL2 if not word.startswith("pack_")), "packing=pad", "eval_steps=4"]
SAVED = [*WORDS, *UL2, "eval_steps=2", "save_steps=2", "lr_scheduler=constant"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoder-decoder")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_corpus()
        assert forgather("train", *SAVED, "max_steps=4", "output_dir=whole") == 0
        assert forgather("train", *SAVED, "max_steps=2", "output_dir=cut") == 0
        shutil.copytree("cut", "moved")
        assert forgather("resume", "cut", "max_steps=4") == 0
        assert forgather("finalize", "cut", "out") == 0
    return root


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def evaluation(run: str) -> dict[str, float]:
    return next(each for each in reversed(metrics(run)) if "eval_loss" in each)


def on_two_ranks(*words: str) -> None:
    for code, shown in train_in_pool(Path.cwd(), list(words)):
        assert code == 0, shown


@pytest.mark.parametrize(
    ("name", "data", "strategies"),
    [("seq2seq", PAIRS, ["ddp"]), ("ul2", [*UL2, "eval_steps=4"], ["ddp", "fsdp2"]), ("ul2-pad", PADDED, ["fsdp2"])],
)
def test_layouts_agree(name: str, data: list[str], strategies: list[str]) -> None:
    words = [*WORDS, *data, "max_steps=4", "save_strategy=no"]
    single = f"{name}-single"
    assert forgather("train", *words, f"output_dir={single}") == 0
    first = next(each for each in metrics(single) if "tokens" in each)
    assert first["tokens"] == first["encoder_tokens"] + first["decoder_tokens"]
    for strategy in strategies:
        run = f"{name}-{strategy}"
        on_two_ranks(*words, f"trainer={strategy}", f"output_dir={run}")
        assert training_curve(run) == [pytest.approx(each, rel=1e-5) for each in training_curve(single)]
        wanted = {name: value for name, value in evaluation(single).items() if "loss" in name or "bits" in name}
        assert {name: evaluation(run)[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    if data is not PAIRS:
        assert {"eval_loss_S", "eval_bits_per_byte_S", "eval_bits_per_byte"} <= evaluation(single).keys()


def test_rows_padded_together_count_as_each_by_itself() -> None:
    words = [*WORDS, *PADDED, "max_steps=4", "save_steps=2", "lr_scheduler=constant"]
    for size, run in ((1, "alone"), (4, "together")):
        sizes = [f"per_device_train_batch_size={size}", f"per_device_eval_batch_size={size}"]
        assert forgather("train", *words, *sizes, f"output_dir={run}") == 0
    assert training_curve("together") == [pytest.approx(each, rel=1e-5) for each in training_curve("alone")]
    assert [each.get("tokens") for each in metrics("together")] == [each.get("tokens") for each in metrics("alone")]
    of_losses = [
        {name: value for name, value in evaluation(run).items() if any(w in name for w in ("loss", "bits", "targets"))}
        for run in ("alone", "together")
    ]
    assert of_losses[1] == pytest.approx(of_losses[0], rel=1e-5)
    goes_on = ["resume_from_checkpoint=together/checkpoints/step-00000002", "output_dir=again-together"]
    assert forgather("train", *words, "per_device_train_batch_size=4", *goes_on) == 0
    assert training_curve("again-together") == training_curve("together")[2:]


def test_a_run_goes_on_exactly_and_in_other_layouts() -> None:
    assert training_curve("cut") == training_curve("whole")
    weights = [
        load_file(RunDir(Path(run)).checkpoints / "step-00000004/model/model.safetensors") for run in ("cut", "whole")
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    for strategy, steps in (("ddp", 3), ("fsdp2", 4)):
        words = ["output_dir=moved", "resume_from_checkpoint=true", f"trainer={strategy}", f"max_steps={steps}"]
        on_two_ranks(*SAVED, *words)
    assert training_curve("moved") == [pytest.approx(each, rel=1e-5) for each in training_curve("whole")]


SHORT = [*WORDS, *UL2, "max_steps=3", "eval_steps=3", "save_strategy=no", "lr_scheduler=constant"]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[tuple[float, float]]:
    with contextlib.chdir(folder):
        assert forgather("train", *SHORT, "output_dir=plain") == 0
        return training_curve("plain")


@pytest.mark.full
def test_recomputation_and_bf16_give_the_same_numbers(plain: list[tuple[float, float]]) -> None:
    again = [*SHORT, "gradient_checkpointing=true"]
    assert forgather("train", *again, "output_dir=again") == 0
    assert training_curve("again") == plain
    on_two_ranks(*again, "trainer=fsdp2", "output_dir=again-fsdp2")
    assert training_curve("again-fsdp2") == [pytest.approx(each, rel=1e-5) for each in plain]
    on_two_ranks(*again, "precision=bf16", "trainer=fsdp2", "output_dir=half-fsdp2")
    assert training_curve("half-fsdp2") == [pytest.approx(each, rel=2e-2) for each in plain]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.13's dynamo reads it itself
def test_compiled_blocks_give_the_same_numbers(plain: list[tuple[float, float]]) -> None:
    compiled = ["torch_compile=true", "torch_compile_backend=aot_eager"]
    assert forgather("train", *SHORT, *compiled, "output_dir=compiled") == 0
    assert training_curve("compiled") == [pytest.approx(each, rel=1e-5) for each in plain]


def test_what_is_finalized_is_what_transformers_loads() -> None:
    """By the class that lies beside it, as ``finalize`` has proved, and by ours without ``trust_remote_code``."""
    proof = json.loads(Path("out/finalize_report.json").read_text())["proof"]
    assert proof["max_logit_difference"] <= 1e-5
    assert proof["greedy_tokens"] > 1
    assert "own process" in proof["loaded_through"]
    code = """
import forgather_cli
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokens = AutoTokenizer.from_pretrained("out")("[S]Line<extra_id_0>", return_tensors="pt")
def greedy(model):
    return model.generate(**tokens, max_new_tokens=6, do_sample=False).tolist()
model = AutoModelForSeq2SeqLM.from_pretrained("out")
assert type(model).__module__ == "forgather_cli.models.modeling_qwen3_encdec"
model.save_pretrained("saved")
assert greedy(AutoModelForSeq2SeqLM.from_pretrained("saved")) == greedy(model)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path("saved/modeling_qwen3_encdec.py").is_file()


@pytest.mark.parametrize("data", [PAIRS, [*UL2, "eval_steps=4"]], ids=["seq2seq", "ul2"])
def test_a_finalized_model_is_trained_further(data: list[str]) -> None:
    words = [word for word in (*WORDS, *data) if word.partition("=")[0] not in (
        "model", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_sentinel_tokens"
    )]  # fmt: skip
    out = f"output_dir=further-{data[0][5:]}"
    words += ["model=pretrained", "model.path=out", "max_steps=2", "save_strategy=no", "eval_on_start=true", out]
    assert forgather("train", *words) == 0
    first = next(each for each in metrics(out[11:]) if "eval_loss" in each)
    if data is not PAIRS:
        assert first["eval_loss"] == pytest.approx(evaluation("cut")["eval_loss"], rel=1e-5)


def test_text_is_written_and_evaluated(capfd: pytest.CaptureFixture[str]) -> None:
    for mode in ([], ["--mode", "R"]):
        words = ["--prompt", "Line 1", "--greedy", "--max-new-tokens", "8", "--json", *mode]
        assert forgather("generate", "whole", *words) == 0
        assert json.loads(capfd.readouterr().out)["num_tokens"] <= 8
    assert forgather("generate", "whole", "--prompt", "x", "--mode", "Q") == 2
    capfd.readouterr()
    for source in ("whole", "out"):
        data = [] if source == "whole" else UL2
        assert forgather("eval", source, *data, "--json") == 0
        assert "eval_loss_S" in json.loads(capfd.readouterr().out)

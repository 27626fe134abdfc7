"""Runs with adapters as commands: resumed under another strategy, finalized both ways, gone on from peft's, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from finalized import theirs as load_theirs
from lazily import LoraConfig, PeftModel, get_peft_model
from program import document, forgather, refusal
from safetensors.torch import load_file, save_file
from test_adapters_peft import IDS, SHAPE, on_meta
from whole_batch import equal

from forgather_cli.adapters.directory import WEIGHTS
from forgather_cli.adapters.model import adapt
from forgather_cli.checkpoint.manifest import NAME
from forgather_cli.config.load import load_config
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import ModelError
from forgather_cli.run_dir import RunDir

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_directory")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base"
    tiny.llama(**SHAPE | {"vocab_size": 260}, tie_word_embeddings=True).save_pretrained(path)
    load_tokenizer("bytes").save(path)
    return path


WORDS = (
    "data=synthetic", "data.tokenizer=bytes", "model.replace_tokenizer=true", "data.seq_len=16", "data.num_samples=64",
    "data.num_eval_samples=8", "optimizer=adamw", "learning_rate=1e-2", "global_batch_size=4", "eval_strategy=no",
    "callbacks=minimal", "device=cpu",
)  # fmt: skip


def words(base: Path, *more: str) -> tuple[str, ...]:
    return ("train", "model=pretrained", f"model.path={base}", *WORDS, "precision=fp32", "output_dir=run", *more)


def newest(run: Path | str) -> Path:
    return RunDir(Path(run)).checkpoint(RunDir(Path(run)).checkpoint_steps()[-1]) / "model"


def test_a_run_is_resumed_under_another_strategy(base: Path) -> None:
    assert forgather(*words(base, "adapter=dora", "max_steps=6")) == 0
    whole = load_file(newest("run") / WEIGHTS)
    assert forgather(*words(base, "adapter=dora", "max_steps=6", "output_dir=part", "save_steps=3")) == 0
    part = RunDir(Path("part"))
    layout = ("trainer=ddp", "nproc_per_node=2", "per_device_train_batch_size=2")
    more = (f"resume_from_checkpoint={part.checkpoint(part.checkpoint_steps()[0])}", "output_dir=other", "max_steps=6")
    assert forgather(*words(base, "adapter=dora", *layout, *more)) == 0
    for name, tensor in load_file(newest("other") / WEIGHTS).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("targets", ["all-linear", "[lm_head,q_proj]"])
def test_finalize_gives_the_adapter_and_the_whole_model(
    base: Path, targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forgather(*words(base, "adapter=lora", f"adapter.target_modules={targets}", "max_steps=8")) == 0
    assert forgather("finalize", "run", "adapter") == 0
    assert forgather("finalize", "run", "merged", "--merge") == 0
    apart = PeftModel.from_pretrained(load_theirs(base), "adapter")
    whole, plain = load_theirs("merged"), load_theirs(base)
    torch.testing.assert_close(whole(IDS).logits, apart(IDS).logits, rtol=1e-4, atol=1e-4)
    assert (whole(IDS).logits - plain(IDS).logits).abs().max() > 0.1
    report = json.loads(Path("merged/finalize_report.json").read_text())
    assert report["proof"]["merge"]["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert_same_eval_losses(capsys, ("run", "adapter", "merged"), *words(base)[3:5], "data.seq_len=16")


def assert_same_eval_losses(capsys: pytest.CaptureFixture[str], sources: tuple[str, ...], *words: str) -> None:
    first, *others = (document(capsys, "eval", each, *words, "precision=fp32")["eval_loss"] for each in sources)
    assert others == pytest.approx([first] * len(others), rel=1e-5)


def test_beside_a_base_in_bf16_the_adapter_stays_in_fp32(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    load_theirs(base, dtype=torch.bfloat16).save_pretrained(half)
    load_tokenizer("bytes").save(half)
    assert forgather(*words(half, "adapter=lora", "max_steps=4")) == 0
    assert forgather("finalize", "run", "adapter") == 0
    assert json.loads(Path("adapter/finalize_report.json").read_text())["proof"]["max_logit_difference"] < 1e-5
    capsys.readouterr()
    assert forgather("finalize", "run", "merged", "--merge") == 0
    assert "base and adapter apart (bound 1.01)" in " ".join(capsys.readouterr().out.split())
    assert load_theirs("merged", dtype="auto").dtype == torch.bfloat16


def test_an_adapter_of_peft_is_gone_on_from_and_merged(base: Path) -> None:
    torch.manual_seed(1)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    theirs = get_peft_model(load_theirs(base), settings)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained("peft")
    assert forgather("finalize", "peft", "whole", "--merge", "--text", str(Path(__file__))) == 0
    merged = load_theirs("whole")
    torch.testing.assert_close(merged(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-4)
    same = ("adapter=lora", "adapter.r=4", "lora_alpha=8", "target_modules=[q_proj,up_proj]")
    assert forgather(*words(base, *same, "adapter.from_adapter=peft", "max_steps=1", "learning_rate=0")) == 0
    assert equal(load_file(newest("run") / WEIGHTS), load_file(f"peft/{WEIGHTS}"))


def test_another_base_is_refused_with_both_hashes(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert forgather(*words(copy, "adapter=lora", "max_steps=2")) == 0
    assert forgather(*words(copy, "adapter=lora", "max_steps=4", "resume_from_checkpoint=true")) == 0
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    said = " ".join(refusal(capsys, *words(copy, "adapter=lora", "max_steps=6", "resume_from_checkpoint=true")).split())
    assert "model.path: the adapter is for the model that" in said
    assert said.count("(sha256 ") == 2
    assert forgather("finalize", "run", "whole", "--merge") == 2
    going_on = ("adapter=lora", f"adapter.from_adapter={newest('run')}", "max_steps=2", "output_dir=more")
    capsys.readouterr()
    said = " ".join(refusal(capsys, *words(base, *going_on)).split())
    assert "set model.path to that one" in said
    assert said.count("(sha256 ") == 2
    assert (newest("run").parent / NAME).exists()


def test_a_mean_of_adapters_is_refused(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather(*words(base, "adapter=lora", "max_steps=3", "save_steps=1", "async_save=false")) == 0
    first, *_, last = RunDir(Path("run")).checkpoint_steps()
    members = [str(RunDir(Path("run")).checkpoint(step)) for step in (first, last)]
    for given in (("finalize", "run", "mean", "--average", "2"), ("checkpoint", "average", *members, "-o", "mean")):
        capsys.readouterr()
        said = " ".join(refusal(capsys, *given).split())
        assert "the mean of products is no product of means" in said
        assert "merge" in said
        assert not Path("mean").exists()


MISTAKES = {
    ("adapter=lora", "adapter.target_modules=[q_prj]"): "did you mean q_proj?",
    ("adapter=lora", "adapter.r=33"): "adapter.r: 33 is above the width of model.layers.0.self_attn.q_proj, 32",
    ("adapter=dora", "target_modules=[embed_tokens]"): "dora adapts linear layers",
    ("adapter=lora", "target_modules=[lm_head]", "loss=linear_cross_entropy"): "loss: linear_cross_entropy multiplies",
    ("adapter=lora", "trainable=[nrm]"): "trainable: no parameter of Decoder has a name like 'nrm'",
    ("adapter=lora", "adapter.rank_pattern={q_prj: 2}"): "no adapted layer is 'q_prj'",
    ("adapter=lora", "adapter.from_adapter=nowhere"): "adapter.from_adapter: nowhere has no adapter_config.json",
    # tokens that have no row
    ("adapter=lora", "trainable_token_indices=[260]"): "below 260, the rows of model.embed_tokens",
    ("adapter=lora", "trainable_token_indices=[3,3]"): "must be different tokens",
    ("adapter=lora", "trainable_token_indices={q_proj: [3]}"): "q_proj is neither embedding nor head; name model.embed",
    ("adapter=lora", "trainable_token_indices={embed_tokens: [3], lm_head: [4]}"): "share their weight; give both the",
}  # fmt: skip


@pytest.mark.parametrize("given", MISTAKES)
def test_what_cannot_be_adapted_is_said(given: tuple[str, ...], base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert MISTAKES[given] in " ".join(refusal(capsys, *words(base, *given, "max_steps=1")).split())


NOT_SERVED = {
    (): None,
    ("adapter=dora",): "vLLM refuses adapters with DoRA: forgather finalize RUN MODEL --merge",
    ("trainable=[norm]",): "vLLM refuses adapters with trainable (modules_to_save)",
    ("adapter.trainable_token_indices=[3]",): "vLLM refuses adapters with rows of tokens",
    ("adapter.alpha_pattern={q_proj: 8}",): "vLLM reads no rank_pattern or alpha_pattern",
}


@pytest.mark.parametrize("given", NOT_SERVED)
def test_what_vllm_does_not_serve_is_said_at_start(given: tuple[str, ...], base: Path) -> None:
    config = load_config("lora_finetune", [f"model.path={base}", "data.files=[x]", "loss=cross_entropy", *given]).config
    said = [line for line in adapt(on_meta(config, 260), config.adapter, config) if "vLLM" in line]
    wanted = NOT_SERVED[given]
    assert len(said) == (wanted is not None)
    assert wanted is None or wanted in said[0]


def test_an_encoder_decoder_in_a_directory_is_refused(base: Path) -> None:
    config = load_config("lora_finetune", [f"model.path={base}", "data.files=[x]"]).config
    model = on_meta(load_config("qwen3_encdec_small", []).config, 260)
    with pytest.raises(ModelError, match="does not adapt encoder-decoders yet"):
        adapt(model, config.adapter, config)


def test_some_parameters_of_a_whole_model_are_trained(base: Path) -> None:
    assert forgather(*words(base, "trainable=[norm]", "max_steps=3")) == 0
    before, after = load_file(base / "model.safetensors"), load_file(newest("run") / "model.safetensors")
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {n for n in before if "norm" in n}

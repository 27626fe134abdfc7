"""Adapters beside weights in four bits: against peft and against LoRA beside the unpacked weights, what is kept, and
what loading takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_adapters_peft as against_peft
import tiny
import torch
import torch.distributed as dist
from finalized import theirs as load_theirs
from lazily import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM, PeftModel, bitsandbytes
from program import forgather, printed
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_adapters_peft import IDS, loss_of
from test_adapters_runs import WORDS, assert_same_eval_losses, newest
from torch import Tensor, nn
from whole_batch import equal

from forgather_cli.adapters.directory import QUANTIZATION, WEIGHTS
from forgather_cli.adapters.nf4 import packed_layers
from forgather_cli.callbacks.metrics import take_interval_peak
from forgather_cli.checkpoint.load import ADAPTER_PREFIX
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.inference.source import load_source
from forgather_cli.launch import start
from forgather_cli.loss.model_io import model_logits
from forgather_cli.models.transform import apply_activation_checkpointing
from forgather_cli.run_dir import RunDir

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_directory")]


SHAPE = against_peft.SHAPE | {"vocab_size": 260}  # its widths are no multiples of a block


def saved_base(path: Path, model: Any) -> Path:
    torch.manual_seed(0)
    model().save_pretrained(path)
    load_tokenizer("bytes").save(path)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base"
    return saved_base(path, lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = GPT2Config(vocab_size=260, n_embd=24, n_layer=1, n_head=2, n_positions=64, initializer_range=0.2)
    return saved_base(tmp_path_factory.mktemp("gpt2") / "gpt2", lambda: AutoModelForCausalLM.from_config(config))


def config_of(base: Path, *words: str) -> Config:
    return load_config(None, ["model=pretrained", f"model.path={base}", "precision=fp32", *WORDS, *words]).config


def ours(config: Config) -> nn.Module:
    """The adapted model, filled as a run fills it, its adapters moved as training does."""
    return against_peft.stirred(against_peft.ours(config, vocab_size=260)).eval()  # GPT-2 drops out


def in_peft(base: Path, adapter: Path) -> Any:
    """As a user loads it; in fp32 on CPUs that bitsandbytes would have compute in bf16."""
    how = json.loads((adapter / QUANTIZATION).read_text()) | {"bnb_4bit_compute_dtype": "float32"}
    model = load_theirs(base, quantization_config=how)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    loss_of(logits).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return {n.removeprefix(ADAPTER_PREFIX).replace(".default", ""): g for n, g in found.items() if g is not None}


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert float((tensor - theirs[name]).norm()) <= tolerance * float(theirs[name].norm()), name


def unpacked_base(model: nn.Module, base: Path, directory: Path) -> Path:
    """``base`` with the weights that ``model`` multiplies with."""
    directory.mkdir()
    tensors = load_file(base / "model.safetensors")
    tensors |= {f"{name}.weight": layer.as_stored() for name, layer in packed_layers(model)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((base / "config.json").read_bytes())
    return directory


CASES = {
    "own": ("model=pretrained",),
    "transformers": ("model=transformers", "adapter.double_quant=false"),
    "tokens": ("model=pretrained", "target_modules=[embed_tokens,lm_head,k_proj]"),
    "gpt2": ("model=transformers",),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_are_those_of_peft_and_of_unpacked_weights(
    case: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue("gpt2" if case == "gpt2" else "base")
    config = config_of(base, "adapter=qlora", *CASES[case])
    mine = ours(config)
    theirs = in_peft(base, against_peft.saved(mine, config, tmp_path / "adapter"))
    logits, wanted = mine(IDS), theirs(IDS).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    own = gradients(mine, logits)
    assert_same(own, gradients(theirs, wanted), 1e-5)
    words = [word for word in CASES[case] if "quant" not in word]
    plain = ours(config_of(unpacked_base(mine, base, tmp_path / "unpacked"), "adapter=lora", *words))
    assert not list(packed_layers(plain))
    assert_same(own, gradients(plain, plain(IDS)), 1e-5)


def test_bf16_and_checkpointing_are_those_of_unpacked_weights(base: Path, tmp_path: Path) -> None:
    mine = ours(config_of(base, "adapter=qlora", "precision=bf16"))
    plain = ours(config_of(unpacked_base(mine, base, tmp_path / "plain"), "adapter=lora", "precision=bf16"))
    apply_activation_checkpointing(mine)
    with torch.autocast("cpu", torch.bfloat16):
        logits, wanted = mine(IDS), plain(IDS)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=0)
    own = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(mine, logits).items()}
    assert_same(own, gradients(plain, wanted), 1e-6)


def trained(root: Path, base: Path, *words: str) -> tuple[dict[str, Tensor], list[str]]:
    """As one rank: the adapter of the last checkpoint, and the layers whose bytes are not those that bitsandbytes makes
    of the base's files."""
    trainer = tiny.train(config_of(base, "adapter=qlora", f"output_dir={root}", *words), RunDir(root))
    files = load_file(base / "model.safetensors")
    changed = []
    [part] = trainer.run.strategy.parts
    for name, layer in packed_layers(part):
        packed, state = bitsandbytes.functional.quantize_4bit(
            files[f"{name}.weight"], quant_type="nf4", compress_statistics=layer.double_quant, blocksize=64
        )
        unpacked = bitsandbytes.functional.dequantize_4bit(packed, state)
        if not (torch.equal(packed, layer.weight) and torch.equal(unpacked, layer.unpacked())):
            changed.append(name)
    return load_file(newest(root) / WEIGHTS), changed


def test_the_packed_bytes_are_the_same_after_training_on_every_rank_and_after_a_resume(
    base: Path, tmp_path: Path
) -> None:
    words = ("max_steps=4", "trainable=[norm]", "precision=bf16", "gradient_checkpointing=true")
    whole, changed = trained(tmp_path / "whole", base, *words)
    assert changed == []
    trained(tmp_path / "part", base, *words, "save_steps=2")
    first = RunDir(tmp_path / "part").checkpoint(2)
    resumed, changed = trained(tmp_path / "resumed", base, *words, f"resume_from_checkpoint={first}")
    assert changed == []
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    layout = ("trainer=ddp", "per_device_train_batch_size=2", "precision=fp32", "adapter.double_quant=false")
    for _, changed in run_ranks(2, trained, tmp_path / "ddp", base, "max_steps=2", *layout):
        assert changed == []


def test_a_run_is_evaluated_and_finalized_as_it_was_trained(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"model.path={base}", *WORDS, "precision=fp32", "trainable=[norm]", "target_modules=[q_proj,down_proj]")
    assert forgather("train", "model=pretrained", *words, "adapter=qlora", "max_steps=6", "output_dir=run") == 0
    assert "in four bits (NF4): 14 matrices with 64.4%" in capsys.readouterr().err
    said = printed(capsys, "finalize", "run", "adapter")
    assert said.code == 0, said.err
    assert "trained beside a base in four bits" in " ".join(said.err.split())
    said = printed(capsys, "finalize", "run", "merged", "--merge")
    assert said.code == 0, said.err
    assert "that of the adapter beside the base as it is stored" in said.out
    merge = json.loads(Path("merged/finalize_report.json").read_text())["proof"]["merge"]
    assert merge["perplexity_ratio"] == pytest.approx(1, abs=1e-4)
    assert abs(merge["perplexity_ratio_to_stored_base"] - 1) > 1e-4  # NF4 is no small thing for this model
    logits = {name: model_logits(load_source(Path(name)).model, {"input_ids": IDS}) for name in ("run", "merged")}
    theirs, whole = in_peft(base, Path("adapter")), load_theirs("merged")
    torch.testing.assert_close(theirs(IDS).logits, logits["run"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole(IDS).logits, logits["run"], rtol=1e-4, atol=1e-4)
    card = Path("adapter/README.md").read_text()
    assert 'quantization_config=json.load(open("quantization_config.json"))' in card
    assert_same_eval_losses(capsys, ("run", "adapter", "merged"), *words[1:3], "data.seq_len=16")
    said = printed(capsys, "eval", "adapter", *words[1:3], "data.seq_len=16", "trainer=fsdp2", "nproc_per_node=1")
    dist.destroy_process_group()  # of this process alone
    assert said.code == 2
    assert "runs under trainer=single and ddp" in " ".join(said.err.split())
    # its matrices go on beside the base as it is stored, too
    more = ("adapter=lora", "adapter.from_adapter=adapter", "max_steps=1", "learning_rate=0", "output_dir=other")
    assert forgather("train", "model=pretrained", *words, *more) == 0
    other = RunDir(Path("other")).checkpoint(1) / "model"
    assert not (other / QUANTIZATION).exists()
    assert equal(load_file(other / WEIGHTS), load_file(Path("adapter", WEIGHTS)))


def measured_load(base: Path) -> tuple[int, int]:
    """(bytes that the model holds, bytes by which this process grew at most while it was loaded)."""
    bitsandbytes.functional.quantize_4bit(torch.randn(64, 64), quant_type="nf4", blocksize=64)  # first use
    take_interval_peak(torch.device("cpu"))  # sets the mark back
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    model = ours(config_of(base, "adapter=qlora", "adapter.r=1", "target_modules=[k_proj]"))
    held = sum(p.nbytes for p in model.parameters()) + sum(
        layer.state.absmax.nbytes + layer.state.state2.absmax.nbytes for _, layer in packed_layers(model)
    )
    return held, take_interval_peak(torch.device("cpu")) - resident


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux' /proc")
def test_loading_takes_one_layer_more_than_stays(tmp_path: Path) -> None:
    shape = SHAPE | {"hidden_size": 1024, "head_dim": 256, "intermediate_size": 8192, "num_hidden_layers": 4}
    with torch.device("meta"):
        names = {name: p.shape for name, p in LlamaForCausalLM(LlamaConfig(**shape)).state_dict().items()}
    drawn = torch.randn(1024 * 8192).bfloat16()
    tensors = {name: drawn[: size.numel()].view(size).clone() for name, size in names.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    del tensors
    [(held, grown)] = run_ranks(1, measured_load, tmp_path)
    assert held < numbers  # of fp32's 4 bytes for each
    assert grown - held < 160 << 20 < 2 * numbers


@pytest.mark.full
def test_the_import_says_nothing() -> None:
    """On a CPU with AVX512-BF16 bitsandbytes 0.50 warns that it would like another package."""
    code = "from forgather_cli.adapters.nf4 import need_bitsandbytes; need_bitsandbytes()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_without_its_package_it_is_one_sentence(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = start.find_spec
    monkeypatch.setattr(start, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    said = printed(capsys, "train", "model=pretrained", f"model.path={base}", *WORDS, "adapter=qlora")
    assert said.code == 2
    assert "pip install 'forgather[qlora]'" in " ".join(said.err.split())
    assert not Path("outputs").exists()

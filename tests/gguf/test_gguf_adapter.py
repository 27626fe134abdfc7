"""``finalize ADAPTER m --gguf f16``: llama.cpp lays the file beside the base and computes what the source computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from gguf_families import made_by_transformers
from gguf_files import LLAMA3, STOP, TEXTS, Made, byte_level, made
from lazily import PeftModel
from program import document, refusal
from selection import some

from forgather_cli.adapters.directory import WEIGHTS, read_adapter
from forgather_cli.config.schema import RopeScaling
from forgather_cli.errors import ConfigError, ProofError
from forgather_cli.gguf import adapter as adapters
from forgather_cli.gguf.adapter import TYPES, AdapterArchitecture, architecture_of_adapter, size_beside
from forgather_cli.gguf.files import write_and_prove
from forgather_cli.gguf.layout import TensorEntry
from forgather_cli.gguf.options import GgufType
from forgather_cli.gguf.prove import plain_token
from forgather_cli.gguf.reader import llama_cpp
from forgather_cli.gguf.write import Contents, write_gguf

pytestmark = [pytest.mark.usefixtures("own_directory"), pytest.mark.filterwarnings("ignore")]  # peft's

IN_LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"],
}


def by_peft(model: Made, path: Path, spread: float = 0.1, **settings: Any) -> Path:
    """An adapter that peft has made of a model, with numbers in B."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model.directory)
    given = {"target_modules": "all-linear", "r": 4, "lora_alpha": 6, **settings}
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **given))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.normal_(0.0, spread)
    adapted.save_pretrained(path)
    return path


def ids_of(model: Made) -> list[int]:
    return model.tokenizer.encode("".join(TEXTS))[:48]


def written(model: Made, adapter: Path, types: tuple[GgufType, ...] = ("f32",)) -> tuple[Path, list[dict[str, Any]]]:
    """The files in a directory beside the adapter, and their proofs."""
    shutil.rmtree("m", ignore_errors=True)
    directory = Path(shutil.copytree(adapter, "m"))
    sample: Any = SimpleNamespace(sequences=[(torch.tensor([ids_of(model)]), None)])
    lineage = {"kind": "model directory", "path": str(adapter)}
    model.tokenizer.save(directory)
    found = read_adapter(adapter)
    proofs = write_and_prove(directory, "m", types, sample, model.stop, lineage, None, found, None, lambda line: None)
    assert not (directory / "first_layers").exists()
    return directory, proofs


def in_llama_cpp(model: Made, file: Path) -> torch.Tensor:
    """Log-probabilities (T, V) of all layers of the base with an adapter's file beside, by llama.cpp."""
    vocab = model.contents.architecture.vocab_size
    write_gguf(base := Path("base.gguf"), model.contents, "f32")
    told = llama_cpp(
        "measure", model=str(base), lora=[str(file), 1.0], threads=1, sequences=[ids_of(model)], probabilities=vocab,
        plain=plain_token(model.tokenizer), texts=[], special=[], messages=None,
    )["likeliest"]  # fmt: skip
    base.unlink()
    found = torch.full((len(told), vocab), float("nan"))
    for row, (ids, values) in zip(found, told, strict=True):
        row[ids] = torch.tensor(values)
    return found


@torch.no_grad()
def in_peft(model: Made, adapter: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model.directory)
    whole = PeftModel.from_pretrained(base, adapter).eval()
    return whole(torch.tensor([ids_of(model)])).logits[0].log_softmax(-1)


SHAPES: dict[str, tuple[Callable[[Path], Made], dict[str, Any]]] = {
    "llama3": (
        lambda path: made(
            byte_level(path, LLAMA3, ignore_merges=True, bos=True), STOP, num_hidden_layers=4, num_key_value_heads=1,
            head_dim=32, rope_scaling=IN_LLAMA3,
        ),
        {},
    ),
    "qwen3": (lambda path: made(byte_level(path), STOP, qk_norm=True, num_hidden_layers=3), {"use_rslora": True}),
    "gpt2": (lambda path: made_by_transformers(path, "gpt2", n_layer=3), {}),
    "qwen3_moe": (lambda path: made_by_transformers(path, "qwen3_moe", num_hidden_layers=3), EXPERTS),
    "gpt_neox": (lambda path: made_by_transformers(path, "gpt_neox", num_hidden_layers=3), {}),
    "phi3": (lambda path: made_by_transformers(path, "phi3", num_hidden_layers=3), {}),
    "mixtral": (lambda path: made_by_transformers(path, "mixtral", num_hidden_layers=3), EXPERTS),
    "head": (
        lambda path: made(byte_level(path), STOP, num_hidden_layers=3), {"target_modules": ["lm_head", "k_proj"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", some(SHAPES, "llama3", "gpt2", "qwen3_moe"))
def test_all_layers_are_in_llama_cpp_what_peft_makes_of_them(shape: str) -> None:
    make, settings = SHAPES[shape]
    model = make(Path("base"))
    adapter = by_peft(model, Path("adapter"), **settings)
    directory, proofs = written(model, adapter, ("f32", "q8_0"))
    assert [proof["layers"] for proof in proofs] == [2, 2]
    assert all(proof["moves"] > 0.1 and proof["adapter_scale"] == 1 for proof in proofs)
    wanted, zero = in_peft(model, adapter), by_peft(model, Path("zero"), spread=0.0, **settings)
    likely = wanted > -9
    files = [in_llama_cpp(model, directory / f"m-{kind}.gguf") for kind in ("F32", "Q8_0")]
    exact, rounded, moved = ((found - wanted)[likely].abs() for found in (*files, in_peft(model, zero)))
    assert exact.max() < (5e-3 if shape.startswith("gpt") else 1e-4)  # which look GELU up in a table
    assert rounded.median() < moved.median() / 10  # a router may choose another expert
    assert proofs[1]["perplexity_ratio"] == pytest.approx(1, abs=1e-2)
    assert proofs[1]["perplexity_ratio"] != proofs[0]["perplexity_ratio"] == 1


@pytest.fixture
def llama() -> Made:
    return made(byte_level(Path("base")), STOP, num_hidden_layers=4)


def test_the_command(llama: Made, capsys: pytest.CaptureFixture[str]) -> None:
    import gguf

    adapter = by_peft(llama, Path("adapter"))
    llama.tokenizer.save(adapter)
    (adapter / "chat_template.jinja").write_text(TEMPLATE)  # the base has none
    report = document(capsys, "finalize", str(adapter), "out/m", "--gguf", "f16,q8_0")
    assert [(each["file"], each["type"]) for each in report["gguf"]] == [("m-F16.gguf", "f16"), ("m-Q8_0.gguf", "q8_0")]
    assert {"m-F16.gguf", "adapter_model.safetensors"} <= report["files"].keys()
    read = gguf.GGUFReader("out/m/m-Q8_0.gguf")
    told = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 6}
    assert {key: read.fields[key].contents() for key in told} == told
    kinds = {tensor.name: (tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist()))) for tensor in read.tensors}
    assert len(kinds) == 4 * 7 * 2
    assert kinds["blk.3.ffn_down.weight.lora_a"] == ("Q8_0", (4, 64))
    assert kinds["blk.3.ffn_down.weight.lora_b"] == ("F16", (32, 4))  # 32 does not divide its rows
    assert "llama-server -m base.gguf --lora m-F16.gguf" in Path("out/m/README.md").read_text()
    assert not Path("out/m/Modelfile").exists()
    assert Path("out/m/chat_template.jinja").read_text() == TEMPLATE


def test_every_type_ranks_and_scales(llama: Made) -> None:
    """What each module is scaled by comes out of alpha, the rank and lora_b, exactly."""
    import gguf
    from safetensors.torch import load_file

    settings = {"rank_pattern": {"q_proj": 8, "2.mlp.up_proj": 3}, "alpha_pattern": {"v_proj": 5}, "use_rslora": True}
    adapter = by_peft(llama, Path("adapter"), target_modules=["q_proj", "v_proj", "up_proj"], **settings)
    directory, proofs = written(llama, adapter, cast("tuple[GgufType, ...]", TYPES))
    assert [proof["type"] for proof in proofs] == list(TYPES)
    read, stored = gguf.GGUFReader(directory / "m-F32.gguf"), load_file(adapter / WEIGHTS)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in read.tensors}
    alpha = read.fields["adapter.lora.alpha"].contents()
    for source, name, scaling in (("mlp.up_proj", "ffn_up", 6 / 3**0.5), ("self_attn.v_proj", "attn_v", 5 / 4**0.5)):
        right = [stored[f"base_model.model.model.layers.2.{source}.lora_{which}.weight"] for which in "BA"]
        a, b = (tensors[f"blk.2.{name}.weight.lora_{which}"] for which in "ab")
        torch.testing.assert_close(alpha / b.shape[1] * b @ a, scaling * right[0] @ right[1], rtol=1e-5, atol=1e-6)


Wrong = Callable[[AdapterArchitecture], AdapterArchitecture]


def each_entry(change: Callable[[TensorEntry], TensorEntry]) -> Wrong:
    def wrong(made: AdapterArchitecture) -> AdapterArchitecture:
        matrices = (replace(each, pair=tuple(map(change, each.pair))) for each in made.matrices)
        return replace(made, matrices=tuple(matrices))

    return wrong


def unpaired(which: str) -> Wrong:
    return each_entry(lambda entry: replace(entry, change=None) if f"{which}.weight.lora_b" in entry.name else entry)


def exchanged(one: int, other: int) -> Wrong:
    def swap(entry: TensorEntry) -> TensorEntry:
        swapped = {one: other, other: one}
        number = int(entry.name.split(".")[1])
        source = entry.sources[0].replace(f".{number}.", f".{swapped.get(number, number)}.", 1)
        return replace(entry, sources=(source,))

    return each_entry(swap)


def doubled(made: AdapterArchitecture) -> AdapterArchitecture:
    return replace(made, metadata={**made.metadata, "adapter.lora.alpha": 12.0})


@pytest.mark.parametrize("spread", [0.1, 1e-5], ids=["trained", "hardly trained"])
def test_a_wrong_adapter_is_found_out(spread: float, llama: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that moves less than the bound is scaled until it moves more."""
    adapter = by_peft(llama, Path("adapter"), spread)
    _, (proof,) = written(llama, adapter)
    assert (proof["moves"] < 1e-3) == (proof["adapter_scale"] > 100) == (spread < 0.1)
    assert proof["moves_scaled"] > 0.1
    right = architecture_of_adapter
    wrongs = (doubled, unpaired("attn_q"), unpaired("attn_k"), exchanged(0, 1))
    for wrong in wrongs if spread == 0.1 else wrongs[:2]:
        monkeypatch.setattr(adapters, "architecture_of_adapter", lambda *given, w=wrong: w(right(*given)))
        with pytest.raises(ProofError, match=r"first-layers-F32\.gguf is not .*: a log-probability differs by"):
            written(llama, adapter)


def test_a_wrong_file_beside_right_first_layers_is_found_out(llama: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = by_peft(llama, Path("adapter"))
    told = {exchanged(2, 3): r"blk\.2\.ffn_down\.weight\.lora_a is up to", doubled: "its adapter.lora.alpha is 12"}
    for wrong, why in told.items():
        monkeypatch.setattr(adapters, "write_gguf", in_the_last_file(wrong))
        with pytest.raises(ProofError, match=rf"m-F32\.gguf is not the source's model: {why}"):
            written(llama, adapter)


def in_the_last_file(wrong: Wrong) -> Callable[[Path, Contents, GgufType], None]:
    def write(path: Path, contents: Contents, kind: GgufType) -> None:
        path.unlink(missing_ok=True)
        made = cast("AdapterArchitecture", contents.architecture)
        write_gguf(path, replace(contents, architecture=wrong(made)) if path.name == "m-F32.gguf" else contents, kind)

    return write


def test_an_adapter_that_moves_nothing_and_one_of_later_layers(llama: Made) -> None:
    _, (proof,) = written(llama, by_peft(llama, Path("zero"), spread=0.0))
    assert (proof["moves"], proof["moves_scaled"], proof["adapter_scale"]) == (0, 0, 1)
    later = by_peft(llama, Path("later"), target_modules=r".*layers\.(2|3)\..*(q_proj|down_proj)")
    _, (proof,) = written(llama, later)
    assert (proof["layers"], proof["moves"] > 0.1) == (3, True)
    layer = sum(spec.num_elements for name, spec in llama.contents.weights.specs().items() if "layers.0." in name)
    room = [
        size_beside(llama.contents, read_adapter(path), ("f16",)) - 4 * (path / WEIGHTS).stat().st_size
        for path in (Path("zero"), Path("later"))
    ]
    assert room[1] - room[0] == 8 * layer  # in fp32, as the base's files and in a GGUF file


def test_a_base_in_four_bits_is_the_one_as_stored(llama: Made) -> None:
    pytest.importorskip("bitsandbytes")
    plain = by_peft(llama, Path("adapter"))
    _, (wanted,) = written(llama, plain, ("q8_0",))
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    (plain / "quantization_config.json").write_text(json.dumps(how))
    assert read_adapter(plain).settings.in_four_bits
    _, (proof,) = written(llama, plain, ("q8_0",))
    assert proof == wanted


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "DoRA"),
    "whole": ({"modules_to_save": ["norm"]}, "what is trained whole (modules_to_save)"),
    "embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, "an adapter of model.embed_tokens"),
    "rows": ({"trainable_token_indices": [3]}, "training of rows of model.embed_tokens"),
    "head": ({"target_modules": ["lm_head"]}, "an adapter of lm_head.weight, which is the embedding's,"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_have_is_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings, named = REFUSED[case]
    model = made(byte_level(Path("base")), STOP, tie_word_embeddings=True)
    adapter = by_peft(model, Path("adapter"), **settings)
    said = refusal(capsys, "finalize", str(adapter), "m", "--gguf", "f16")
    assert f"--gguf: {named} has no counterpart in llama.cpp's adapters, got adapter; add --merge, or leave" in said
    assert {path.name for path in Path().iterdir()} == {"base", "adapter"}


def test_what_is_for_a_whole_model_is_refused(llama: Made, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = read_adapter(by_peft(llama, Path("adapter")))
    said = refusal(capsys, "finalize", "adapter", "m", "--gguf", "q8_0", "--max-ratio", "1.01")
    assert "--max-ratio: is for a whole model, got the adapter adapter; add --merge" in said
    with pytest.raises(ConfigError, match="--gguf: q4_0 is of a whole model; an adapter takes f32, f16, bf16, q8_0"):
        architecture_of_adapter(adapter, cast("tuple[GgufType, ...]", ("f16", "q4_0")))

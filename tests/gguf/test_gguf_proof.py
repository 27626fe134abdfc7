"""llama.cpp computes from a file what the source computes, whatever its shape; and a wrong file is found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import finalized
import gguf_files
import numpy as np
import pytest
import torch
from gguf_families import FAMILIES, made_by_transformers
from gguf_files import LLAMA3, QWEN2, STOP, Change, Made, byte_level, edit_tokenizer, made, sentencepiece
from selection import some

from forgather_cli.config.schema import RopeScaling
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import DataError, ForgatherError, ModelError, ProofError
from forgather_cli.finalize.plain_transformers import in_fp32
from forgather_cli.gguf import prove
from forgather_cli.gguf.architecture import architecture_of
from forgather_cli.gguf.choose import find_pre_tokenizer
from forgather_cli.gguf.options import GGUF_TYPES, MIXTURES, GgufType, StoredType
from forgather_cli.gguf.prove import compare_contents
from forgather_cli.gguf.reader import llama_cpp
from forgather_cli.gguf.vocabulary import read_vocabulary
from forgather_cli.gguf.write import Contents, quantized, rounded, write_gguf

PLAIN = [kind for kind in GGUF_TYPES if kind not in MIXTURES]
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.5)
IN_LLAMA3 = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": RopeScaling(rope_type="linear", factor=2.0)},
    "mistral": {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_scaling": YARN},
    "qwen2": {"attention_bias": True, "attention_output_bias": False, "rope_scaling": YARN},
    "qwen2-llama3": {"attention_bias": True, "attention_output_bias": False, "rope_scaling": IN_LLAMA3},
    "qwen3": {"qk_norm": True, "head_dim": 32, "num_key_value_heads": 1, "rope_scaling": YARN},
}


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = byte_level(tmp_path_factory.mktemp("gguf") / "llama3", LLAMA3, ignore_merges=True, bos=True)
    return made(directory, STOP, head_dim=32, num_key_value_heads=1, rope_theta=500000.0, rope_scaling=IN_LLAMA3)


def apart(model: Made, file: Path, kind: GgufType, change: Change) -> float:
    """The log-probability of a wrong file that differs most, by which it is refused."""
    with pytest.raises(ProofError, match="a log-probability differs by") as found:
        model.prove(file, kind, change)
    return float(str(found.value).split("differs by ")[1].split(",")[0])


@pytest.mark.parametrize("kind", some(PLAIN, "q8_0"))
def test_a_llama_3_and_what_is_wrong_with_it(llama3: Made, kind: GgufType, tmp_path: Path) -> None:
    file = tmp_path / "file.gguf"
    proof = llama3.prove(file, kind)
    assert proof["max_difference_beside_rounding"] <= (1e-3 if kind == "f32" else 5e-2)
    assert llama3.contents.metadata["tokenizer.ggml.pre"] == "llama-bpe"
    for change in (gguf_files.rope_base, gguf_files.unpaired, gguf_files.shifted):
        assert apart(llama3, file, kind, change) > 10 * proof["bound"], change.__name__
    exact: dict[Change, str] = {
        gguf_files.other_splitting: "llama.cpp encodes",
        gguf_files.end_left_out: r"does not stop at '<\|turn\|>'",
    }
    for change, told in exact.items():
        with pytest.raises(ProofError, match=told):
            llama3.prove(file, kind, change)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """SmolLM2's depth: in q8_0 its rounding hides what is wrong."""
    directory = byte_level(tmp_path_factory.mktemp("gguf") / "deep")
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    return made(directory, STOP, hidden_size=64, intermediate_size=128, num_hidden_layers=30, **shape)


ROPE = gguf_files.other_value("rope.freq_base", 10_100.0)
EPS = gguf_files.other_value("attention.layer_norm_rms_epsilon", 1e-4)
NORM = gguf_files.scaled("layers.17.input_layernorm.weight", 1.02)


@pytest.mark.parametrize("change", [ROPE, EPS, NORM], ids=["rope", "eps", "norm"])
def test_what_thirty_layers_in_q8_0_hide(deep: Made, change: Change, tmp_path: Path) -> None:
    """Wrong in what is made of the source, and in the file alone."""
    file = tmp_path / "file.gguf"
    deep.prove(file, "q8_0", change, length=32)  # llama.cpp, which reads it whole, cannot tell
    if change is not NORM:
        with pytest.raises(ProofError, match=r"first-layers-F32\.gguf .*: a log-probability differs by") as found:
            deep.prove_structure(change)
        assert float(str(found.value).split("differs by ")[1].split(",")[0]) > 5e-2
    proven, structure = deep.prove_structure()
    assert (structure["layers"], structure["bound"]) == (2, 1e-3)
    told = {
        ROPE: "freq_base is 10100", EPS: "epsilon is 9.99", NORM: r"blk.17.attn_norm.weight is up to 0.0\d+ from the",
    }  # fmt: skip
    with pytest.raises(ProofError, match=told[change]):
        compare_contents(file, proven, deep.directory, deep.contents, "q8_0")


@pytest.mark.parametrize("kind", PLAIN)
def test_weights_of_a_file(deep: Made, kind: GgufType, tmp_path: Path) -> None:
    """Each is the source's, to the rounding of its type and no more: one step of one number is found."""
    write_gguf(tmp_path / "file", deep.contents, kind)
    fields, contents = deep.prove_structure()[0], deep.contents
    compare_contents(tmp_path / "file", fields, deep.directory, contents, kind)
    name = "layers.29.mlp.down_proj.weight"
    step = {"f32": 1 + 2**-22, "f16": 1 + 2**-9, "bf16": 1 + 2**-6, "q8_0": 1 + 1 / 60}[kind]
    write_gguf(tmp_path / "wrong", gguf_files.scaled(name, step, at=0)(contents), kind)
    with pytest.raises(ProofError, match=r"blk.29.ffn_down.weight is up to .* from the source's"):
        compare_contents(tmp_path / "wrong", fields, deep.directory, contents, kind)
    other: GgufType = "f16" if kind == "q8_0" else "q8_0"
    with pytest.raises(ProofError, match=f"in {other}"):
        compare_contents(tmp_path / "file", fields, deep.directory, contents, other)


PERIODS = {"gemma3_text": 6, "smollm3": 4, "olmo2": 2, "gpt2": 2, "mixtral": 2, "phi3": 2}


@pytest.mark.parametrize("family", some(PERIODS, "gemma3_text", "smollm3"))
def test_the_structure_is_that_of_a_whole_period_of_layers(family: str, tmp_path: Path) -> None:
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": PERIODS[family] + 1}
    model = made_by_transformers(tmp_path / "model", family, **depth)
    assert model.prove_structure()[1]["layers"] == PERIODS[family]
    is_rms = not family.startswith("gpt")
    wrong = gguf_files.other_value(f"attention.layer_norm{'_rms' * is_rms}_epsilon", 1e-2)
    with pytest.raises(ProofError, match="a log-probability differs by"):
        model.prove_structure(wrong)


def test_small_faults_and_rounding_that_drowns_everything(
    llama3: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[tuple[GgufType, str, float]] = [
        ("f16", "attention.layer_norm_rms_epsilon", 1e-4), ("f16", "rope.freq_base", 510_000.0),
        ("q8_0", "rope.freq_base", 600_000.0),
    ]  # fmt: skip
    for kind, key, value in faults:
        with pytest.raises(ProofError, match=r"differs? by"):
            llama3.prove(tmp_path / "file.gguf", kind, gguf_files.other_value(key, value))
    monkeypatch.setattr(prove, "MOST_ROUNDING", 1e-3)
    with pytest.raises(ProofError, match="so that nothing can be proved; nothing was written: choose --gguf f32"):
        llama3.prove(tmp_path / "file.gguf", "q8_0")


@pytest.mark.parametrize("shape", some(SHAPES, "qwen3"))
def test_other_shapes(shape: str, tmp_path: Path) -> None:
    byte_level(tmp_path / "model", QWEN2)
    edit_tokenizer(tmp_path / "model", lambda document: document.update(normalizer={"type": "NFC"}))  # as Qwen's
    model = made(tmp_path / "model", STOP, **SHAPES[shape])
    assert model.contents.metadata["tokenizer.ggml.pre"] == "qwen2"
    assert model.prove(tmp_path / "file.gguf", "f32")["max_log_prob_difference"] <= 1e-3
    with pytest.raises(ProofError, match="a log-probability differs by"):
        model.prove(tmp_path / "file.gguf", "q8_0", gguf_files.rope_base)


@pytest.mark.parametrize("shape", ["llama3", "mistral", "qwen2", "qwen3"])
def test_transformers_reads_the_same(shape: str, llama3: Made, tmp_path: Path) -> None:
    """Its own GGUF loader computes what the source computes with the weights that lie in the file."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    model = llama3
    if shape != "llama3":
        model = made(byte_level(tmp_path / "model", QWEN2), STOP, **SHAPES[shape])
    write_gguf(tmp_path / "file.gguf", model.contents, "q8_0")
    config = AutoConfig.from_pretrained(model.directory)  # it would take Qwen3's head_dim and rope scaling for others
    if shape == "mistral":  # whose names it has for Llama alone
        config = LlamaConfig(**config.to_dict())
    reads = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="file.gguf", config=config)
    source = finalized.theirs(model.directory)
    ids = torch.tensor([model.tokenizer.encode("".join(gguf_files.TEXTS))[:96]])
    with torch.no_grad(), in_fp32(source, lambda tensor: rounded(tensor, "f32" if tensor.dim() < 2 else "q8_0")):
        torch.testing.assert_close(reads(ids).logits, source(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", some(FAMILIES, "gemma3_text"))
def test_families_of_transformers(family: str, tmp_path: Path) -> None:
    model = made_by_transformers(tmp_path / "model", family)
    proof = model.prove(tmp_path / "file.gguf", "f32")
    # what is beyond is the rounding in llama.cpp's GELU
    assert proof["max_difference_beside_rounding"] < 1e-3
    for change in (gguf_files.shifted, gguf_files.rope_base)[: 1 if family == "gpt2" else 2]:
        assert apart(model, tmp_path / "file.gguf", "f32", change) > 10 * proof["bound"]
    model.prove(tmp_path / "file.gguf", "q8_0")


CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn|>' + m['role'] + '\\n' + m['content'] | trim + '<|finish|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


def test_a_chat_that_spells_the_begin_token_has_it_once(tmp_path: Path) -> None:
    byte_level(tmp_path / "model", bos=True)
    (tmp_path / "model/chat_template.jinja").write_text(CHAT)
    model = made(tmp_path / "model", STOP)
    assert model.prove(tmp_path / "file.gguf", "f32")["chat"] == "equal"

    def other_chat(contents: Contents) -> Contents:
        wrong = CHAT.replace("<|finish|>", "<|finish|>\\n")
        return replace(contents, metadata={**contents.metadata, "tokenizer.chat_template": wrong})

    with pytest.raises(ProofError, match="renders a chat as"):
        model.prove(tmp_path / "file.gguf", "f32", other_chat)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(kind: str, tmp_path: Path) -> None:
    model = made(sentencepiece(tmp_path / "model", kind), ["</s>"])
    assert model.contents.metadata["tokenizer.ggml.model"] == {"bpe": "llama", "unigram": "t5"}[kind]
    assert model.contents.metadata["tokenizer.ggml.add_space_prefix"] is True
    model.prove(tmp_path / "file.gguf", "f32")


SMALL = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}
REFUSED: dict[str, dict[str, Any]] = {
    "encoder-decoder": {"is_encoder_decoder": True},
    "a model of the type gpt_neo": {"model_type": "gpt_neo"},
    "a model of the type gemma2": {"model_type": "gemma2"},
    "a model of the type gpt_oss": {"model_type": "gpt_oss"},
    r"a sliding window \(32 of 64 positions\)": {"model_type": "mistral", "sliding_window": 32},
    "rope type dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "rope type llama3": {"model_type": "qwen3", "rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
    "beta_fast=16 and beta_slow=1": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}},
    "truncate=false": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
    "a bias of the attention": {"model_type": "qwen3", "attention_bias": True},
    "attention_bias=True": {"model_type": "olmo2", "attention_bias": True},
    "norm_topk_prob=False": {"model_type": "qwen3_moe", "norm_topk_prob": False},
    "such layer_types": {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 26},
    "query_pre_attn_scalar=100": {"model_type": "gemma3_text", "query_pre_attn_scalar": 100},
    "such no_rope_layers": {"model_type": "smollm3", "no_rope_layer_interval": 3},
    "the rope type yarn": {"model_type": "olmo2", "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "activation_function='relu'": {"model_type": "gpt2", "activation_function": "relu"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_has_no_counterpart_is_named(named: str) -> None:
    with pytest.raises(ModelError, match=f"^--gguf: .*{named}.*; leave --gguf out"):
        architecture_of({**SMALL, **REFUSED[named]})


def test_the_reason_is_llama_cpp_s_own(tmp_path: Path) -> None:
    model = made(byte_level(tmp_path / "model"), STOP)
    write_gguf(tmp_path / "file.gguf", gguf_files.other_value("block_count", 3)(model.contents), "f32")
    with pytest.raises(ModelError, match=r"cannot load and run file.gguf \(.*'blk.2.attn_norm.weight' not found\)"):
        llama_cpp(
            "losses", model=str(tmp_path / "file.gguf"), threads=1, sequences=[[3]], targets=[[4]], plain=3, vocab=9
        )


@pytest.mark.full
def test_a_splitting_that_llama_cpp_does_not_have(tmp_path: Path) -> None:
    directory = byte_level(tmp_path / "model", r"\p{L}+|\p{N}{1,2}|[^\p{L}\p{N}]+")
    with pytest.raises(DataError, match='no pre-tokenizer that splits "It\'s here," as'):
        made(directory, STOP)


@pytest.mark.full
def test_merges_that_are_ignored(tmp_path: Path) -> None:
    """llama.cpp does so with some splittings alone; it counts where a token of the vocabulary is made by no merges."""
    byte_level(tmp_path, QWEN2, ignore_merges=True)
    assert find_pre_tokenizer(tmp_path) == "qwen2"
    number = load_tokenizer(str(tmp_path)).vocab_size
    edit_tokenizer(tmp_path, lambda document: document["model"]["vocab"].update(zqzq=number))
    with pytest.raises(DataError, match="takes 'zqzq', which no merges make, whole"):
        find_pre_tokenizer(tmp_path)


@pytest.mark.full
def test_a_token_that_takes_the_blank_before_it(tmp_path: Path) -> None:
    byte_level(tmp_path / "model", QWEN2)
    edit_tokenizer(tmp_path / "model", lambda document: document["added_tokens"][0].update(lstrip=True))
    with pytest.raises(ProofError, match=r"llama.cpp encodes 'before<\|begin\|> after"):
        made(tmp_path / "model", STOP).prove(tmp_path / "file.gguf", "f32", length=4)


@pytest.mark.full
def test_a_large_vocabulary(tmp_path: Path) -> None:
    """An untrained model has no likely token among 33,000; 256 reserved ones, as Llama 3's."""
    byte_level(tmp_path / "model")

    def grow(document: Any) -> None:
        vocab, added = document["model"]["vocab"], document["added_tokens"]
        letters = sorted(token for token in vocab if len(token) == 1)[:181]
        pairs = [(a, b) for a in letters for b in letters if a + b not in vocab]
        document["model"]["merges"] += pairs
        vocab.update({a + b: len(vocab) + number for number, (a, b) in enumerate(pairs)})
        added += [{**added[0], "content": f"<|reserved_{number}|>"} for number in range(256)]
        for number, entry in enumerate(added, len(vocab)):
            entry["id"] = number

    edit_tokenizer(tmp_path / "model", grow)
    model = made(tmp_path / "model", [*STOP, "<|reserved_0|>"], initializer_range=0.02)
    assert model.tokenizer.vocab_size > 32000
    proof = model.prove(tmp_path / "file.gguf", "q8_0")
    assert proof["log_probs_compared"] >= 64 * 96
    with pytest.raises(ProofError, match="a log-probability differs by"):
        model.prove(tmp_path / "file.gguf", "q8_0", gguf_files.shifted)


def test_more_ends_than_there_are_keys_and_none_at_all(tmp_path: Path) -> None:
    directory = byte_level(tmp_path / "model")
    with pytest.raises(ForgatherError, match="may end at 4 tokens, and a file has keys for 3"):
        made(directory, [*STOP, "a", "b"])
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="--gguf: no token ends a text; add eos_token"):
        read_vocabulary(tmp_path, load_tokenizer(str(tmp_path)), 403, [])


def test_quantized_as_by_gguf_itself() -> None:
    """Bit for bit: halves, blocks of zeros, numbers near fp32's ends."""
    import gguf

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(512, 64, generator=generator)
    halves = torch.randint(-254, 255, (512, 64), generator=generator) / 2
    halves[:, ::32] = 127
    zeros = drawn * (torch.arange(512) % 2)[:, None]
    beside = halves.nextafter(torch.tensor(1e9))
    scales = torch.logspace(-44, 4, 512)[:, None]
    for tensor in (drawn, drawn.bfloat16(), drawn.half(), halves, beside, zeros, drawn * scales):
        for kind in ("q8_0", "f16", "bf16"):
            with np.errstate(all="ignore"):
                wanted = gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind.upper()])
            assert (quantized(tensor, kind).view("uint8") == wanted.view("uint8")).all()


@pytest.mark.parametrize(("kind", "large"), [("f16", 1e5), ("q8_0", 1e7), ("q4_0", 1e5), ("q4_0", float("nan"))])
def test_numbers_that_a_type_cannot_hold(kind: StoredType, large: float) -> None:
    with pytest.raises(ModelError, match=f"--gguf: the weights hold numbers that {kind} cannot hold; choose"):
        quantized(torch.full((2, 32), large), kind)

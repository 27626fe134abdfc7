"""Files of K-quants: written, proved and read by llama.cpp; and a wrong one is found out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import finalized
import gguf_files
import pytest
import torch
from finalized import model_directory, refused
from gguf_families import made_by_transformers
from gguf_files import STOP, Made, byte_level, made
from program import document, printed
from selection import some

from forgather_cli.errors import ProofError
from forgather_cli.gguf import prove
from forgather_cli.gguf.options import MAX_RATIO, MIXTURES, GgufType
from forgather_cli.gguf.prove import compare_contents, loss_in_f16, prove_perplexity
from forgather_cli.gguf.write import write_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(byte_level(tmp_path_factory.mktemp("gguf") / "wide"), STOP, **WIDE)


@pytest.fixture(scope="module")
def fields(wide: Made) -> Any:
    return wide.prove_structure()[0]


def first_bit(file: Path, name: str, at: int) -> None:
    """Change the lowest bit of one byte of a tensor."""
    import gguf

    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == name)
    content = bytearray(file.read_bytes())
    content[int(tensor.data_offset) + at] ^= 1
    file.write_bytes(content)


def exchanged(model: Made) -> Any:
    """Gate and up of the first block, which have equal shapes."""

    def change(contents: Any) -> Any:
        names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

        class Weights:
            def __getattr__(self, key: str) -> Any:
                return getattr(contents.weights, key)

            def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
                parts = name.split(".")
                if "layers.0.mlp" in name:
                    parts[-2] = names.get(parts[-2], parts[-2])
                return contents.weights.read(".".join(parts), start, stop)

        return replace(contents, weights=Weights())

    return change(model.contents)


@pytest.mark.parametrize("kind", some(MIXTURES, "q4_k_m", "q4_0"))
def test_a_file_and_what_is_wrong_with_it(wide: Made, fields: Any, kind: GgufType, tmp_path: Path) -> None:
    def compare(file: Path) -> None:
        compare_contents(file, fields, wide.directory, wide.contents, kind)

    write_gguf(tmp_path / "file", wide.contents, kind)
    compare(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size <= wide.contents.num_bytes(kind)
    wrong: dict[str, Callable[[], Any]] = {
        "blk.0.ffn_gate.weight is up to .* from the source's": lambda: exchanged(wide),
        "blk.1.attn_output.weight is up to .* from the source's": lambda: gguf_files.shifted(wide.contents),
        r"blk.1.ffn_down.weight is (not what|up to)": lambda: gguf_files.scaled(
            "layers.1.mlp.down_proj.weight", 2.0, at=0
        )(wide.contents),
    }
    for number, (told, change) in enumerate(wrong.items()):
        write_gguf(tmp_path / f"{number}", change(), kind)
        with pytest.raises(ProofError, match=rf"^{number} is not the source's model: {told}") as found:
            compare(tmp_path / f"{number}")
        assert str(found.value).endswith("; nothing was written")
    default = MIXTURES[kind]
    for at in (0, 200):  # a scale of the first block or its numbers, and one further on
        write_gguf(tmp_path / f"bit{at}", wide.contents, kind)
        first_bit(tmp_path / f"bit{at}", "blk.0.attn_q.weight", at)
        with pytest.raises(ProofError, match=f"blk.0.attn_q.weight is not what the source's numbers are in {default}"):
            compare(tmp_path / f"bit{at}")


def test_its_bounds_hold_by_themselves(
    wide: Made, fields: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a quantizer is bad, or the library reads otherwise than gguf does, the bytes are the same."""
    write_gguf(tmp_path / "file", wide.contents, "q4_k_m")
    read = prove.ggml.dequantize
    with monkeypatch.context() as patch:
        patch.setattr(prove.ggml, "dequantize", lambda *words: read(*words) * 1.0001)
        with pytest.raises(ProofError, match=r"is another tensor to llama.cpp than to gguf"):
            compare_contents(tmp_path / "file", fields, wide.directory, wide.contents, "q4_k_m")
    monkeypatch.setattr(prove, "_ROOT_MEAN_SQUARE", {"q4_k": (0.03, 0.0), "q6_k": (0.03, 0.0)})
    with pytest.raises(ProofError, match=r"is up to .* from the source's"):
        compare_contents(tmp_path / "file", fields, wide.directory, wide.contents, "q4_k_m")


def test_its_perplexity_is_llama_cpp_s(wide: Made, tmp_path: Path) -> None:
    ids = wide.tokenizer.encode("".join(gguf_files.TEXTS))
    sequences = [ids[:20], ids[20:40]]
    in_f16 = loss_in_f16(wide.directory, sequences)
    source = finalized.theirs(wide.directory)
    with torch.no_grad():
        exact = [source(torch.tensor([each]), labels=torch.tensor([each])).loss for each in sequences]
    assert in_f16 == pytest.approx(float(sum(exact)) / 2, abs=1e-3)
    write_gguf(tmp_path / "file", wide.contents, "q6_k")
    words = (wide.contents, wide.tokenizer, sequences, "q6_k")
    proof = prove_perplexity(tmp_path / "file", *words, in_f16, 2.0)
    assert proof["targets"] == 38
    assert proof["perplexity_f16"] == pytest.approx(math.exp(in_f16))
    assert proof["perplexity_ratio"] == pytest.approx(proof["perplexity"] / proof["perplexity_f16"])
    assert proof["perplexity_ratio"] == pytest.approx(1, abs=0.2)
    assert proof["stored"] == {"q6_k": 16, "f32": 5}
    told = r"file has a perplexity of .*, .* times that of f16 \(.*\), and 1.03 times is the bound; .* --gguf q8_0, or"
    with pytest.raises(ProofError, match=told):
        prove_perplexity(tmp_path / "file", *words, in_f16 - 0.5)
    write_gguf(tmp_path / "eight", wide.contents, "q8_0")
    told = r"eight has .* times the source's perplexity, and 0.5 times is the bound; .* --gguf f16, or"
    with pytest.raises(ProofError, match=told):
        prove.prove(tmp_path / "eight", wide.directory, wide.tokenizer, sequences, "q8_0", wide.stop, 0.5)


FAMILIES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "gpt2": ({"n_embd": 256, "n_head": 4}, {"f32": 19, "q4_k": 6, "q6_k": 3}),
    "mixtral": (
        {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8},
        {"f32": 7, "q4_k": 8, "q8_0": 4, "q5_k": 2, "q6_k": 2},
    ),
    "qwen2_moe": (
        {"hidden_size": 256, "moe_intermediate_size": 96},
        {"f32": 15, "q4_k": 16, "q5_0": 2, "q6_k": 2, "q8_0": 2},
    ),
    "phi3": ({"hidden_size": 256, "intermediate_size": 512}, {"f32": 5, "q4_k": 7, "q6_k": 3}),
}


@pytest.mark.parametrize("family", some(FAMILIES, "mixtral"))
def test_families_of_transformers(family: str, tmp_path: Path) -> None:
    """Matrices that are turned, in one or of experts; each file is what llama.cpp reads."""
    shape, stored = FAMILIES[family]
    model = made_by_transformers(tmp_path / "model", family, **shape)
    write_gguf(tmp_path / "file", model.contents, "q4_k_m")
    compare_contents(tmp_path / "file", model.prove_structure()[0], model.directory, model.contents, "q4_k_m")
    sequences = [model.tokenizer.encode("".join(gguf_files.TEXTS))[:40]]
    in_f16 = loss_in_f16(model.directory, sequences)
    proof = prove_perplexity(tmp_path / "file", model.contents, model.tokenizer, sequences, "q4_k_m", in_f16, 2.0)
    assert proof["stored"] == stored
    assert proof["perplexity_ratio"] > 0.5


SHAPE = ["model.hidden_size=256", "model.intermediate_size=512", "model.num_attention_heads=4"]
DATA = ["data=text", "data.files=[text.txt]", "data.seq_len=16"]


@pytest.mark.usefixtures("own_directory")
def test_finalize(capsys: pytest.CaptureFixture[str]) -> None:
    run = finalized.train(Path("run"), *SHAPE)
    done = printed(capsys, "finalize", str(run), "notes", "--gguf", "q4_k_m,q8_0,q4_0")
    assert done.code == 0, done.err
    assert "no multiple of 256" not in done.err
    report = json.loads(Path("notes/finalize_report.json").read_text())
    best, _, least = report["gguf"]
    assert (best["file"], best["type"], best["structure"]["type"]) == ("notes-Q4_K_M.gguf", "q4_k_m", "f32")
    assert best["stored"] == {"q4_k": 12, "f32": 5, "q6_k": 4} or best["stored"]["q6_k"] == 3
    assert best["targets"] == 8 * 14
    assert best["bound"] == MAX_RATIO["q4_k_m"]
    assert least["perplexity_f16"] == best["perplexity_f16"]
    sizes = [report["files"][proof["file"]]["bytes"] for proof in report["gguf"]]
    assert sizes[2] < sizes[0] < sizes[1]
    shown, card = " ".join(done.out.split()), Path("notes/README.md").read_text()
    for proof in (best, least):
        told = f"{proof['perplexity_f16']:.5g} in f16, ratio {proof['perplexity_ratio']:.4f}"
        assert told in shown
        assert told in card
    Path("text.txt").write_text("The river had risen in the night, und der Müller.\n" * 2)
    ours, theirs = (document(capsys, "eval", name, *DATA) for name in ("notes", "notes/notes-Q4_K_M.gguf"))
    assert theirs["eval_targets"] == ours["eval_targets"]
    assert theirs["eval_loss"] == pytest.approx(ours["eval_loss"], rel=5e-2)


@pytest.mark.usefixtures("own_directory")
def test_a_perplexity_beyond_the_bound_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = "The river had risen in the night, und der alte Mueller schlief."
    Path("text.txt").write_text(text)
    model = finalized.theirs(model_directory(Path("source"), **WIDE))
    finalized.memorize(model, text, lr=2e-3).save_pretrained("source")  # so that whatever is changed is for the worse
    message = refused(capsys, "source", "new", "--gguf", "q4_0", "--max-ratio", "1", "--text", "text.txt", code=1)
    assert "new-Q4_0.gguf has a perplexity of" in message
    assert "and 1 times is the bound; nothing was written: choose --gguf q4_k_m, or allow more" in message


@pytest.mark.usefixtures("own_directory")
def test_rows_that_blocks_do_not_divide_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    model_directory(Path("source"), hidden_size=96, intermediate_size=256, num_attention_heads=2, head_dim=48)
    done = printed(capsys, "finalize", "source", "new", "--gguf", "q4_k_m,q5_k_m", "--max-ratio", "2")
    assert done.code == 0, done.err
    told = " ".join(done.err.split())
    assert "14 tensors whose rows are no multiple of 256 are stored as q5_0 or q8_0" in told
    assert "14 tensors whose rows are no multiple of 256 are stored as q5_1 or q8_0" in told
    (proof, _) = json.loads(Path("new/finalize_report.json").read_text())["gguf"]
    assert proof["stored"] == {"q5_0": 12, "f32": 5, "q8_0": 2, "q4_k": 1, "q6_k": 1}
    assert proof["bound"] == 2


@pytest.mark.usefixtures("own_directory")
def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    model_directory(Path("source"))
    message = refused(capsys, "source", "new", "--gguf", "q4_k_m", "--max-ratio", "0.9")
    assert "--max-ratio: must be at least 1, got 0.9" in message
    for words in ([], ["--gguf", "f16,f32"]):
        message = refused(capsys, "source", "new", "--max-ratio", "2", *words)
        assert "--max-ratio: bounds files of --gguf q8_0, q6_k, q5_k_m, q4_k_m, q4_0, and none is asked for" in message

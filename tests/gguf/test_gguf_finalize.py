"""``finalize --gguf``: the files beside the model, their report, and what leaves nothing behind."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import finalized
import pytest
from finalized import model_directory, refused
from gguf_files import byte_level
from program import document, forgather, refusal

from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import ProofError
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.finalize.run import finalize
from forgather_cli.gguf import files
from forgather_cli.gguf.modelfile import write_modelfile
from forgather_cli.gguf.write import Contents, write_gguf

pytestmark = pytest.mark.usefixtures("own_directory")

NEW = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finalized.train(tmp_path_factory.mktemp("gguf") / "run")


def test_a_chat_model_of_bytes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gguf

    Path("tokens").write_text("\n".join(NEW))
    Path("chat.jinja").write_text(CHATML)
    words = ["--add-tokens", "tokens", "--chat-template", "chat.jinja", "--gguf", "q8_0"]
    report = document(capsys, "finalize", str(run), "out/notes", *words)
    (proof,) = report["gguf"]
    assert (proof["file"], proof["chat"]) == ("notes-Q8_0.gguf", "equal")
    assert (proof["structure"]["type"], proof["structure"]["layers"]) == ("f32", 2)
    assert proof["prefixes"] == 8 * 15  # all but the last of each sequence of the split
    assert proof["stop_tokens"] == [256, 258]
    assert "notes-Q8_0.gguf" in report["files"]
    fields = gguf.GGUFReader("out/notes/notes-Q8_0.gguf").fields
    assert fields["general.name"].contents() == "notes"
    assert fields["forgather.step"].contents() == "6"
    lines = Path("out/notes/Modelfile").read_text().split("\n")
    assert lines[0] == "FROM ./notes-Q8_0.gguf"
    assert 'PARAMETER stop "<|im_end|>"' in lines
    assert any(line.startswith('TEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}') for line in lines)
    Path("text.txt").write_text("The river had risen in the night, und der Müller.\n" * 2)
    data = ["data=text", "data.files=[text.txt]", "data.seq_len=16"]
    ours = document(capsys, "eval", "out/notes", *data)
    theirs = document(capsys, "eval", "out/notes/notes-Q8_0.gguf", *data)
    assert theirs["eval_targets"] == ours["eval_targets"]
    for name in ("eval_loss", "eval_bits_per_byte"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-2)
    assert forgather("eval", "out/notes/notes-Q8_0.gguf", *data[:2], "data.seq_len=32") == 2
    assert "data.seq_len: the model in out/notes/notes-Q8_0.gguf takes 16 tokens, got 32" in capsys.readouterr().err


def test_a_file_that_is_another_model_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = model_directory(Path("source"), initializer_range=0.2)

    def write(path: Path, contents: Contents, kind: Any) -> None:
        write_gguf(path, contents, kind)
        content = bytearray(path.read_bytes())
        content[-4096:] = content[-8192:-4096]
        path.write_bytes(content)

    monkeypatch.setattr(files, "write_gguf", write)
    with pytest.raises(ProofError, match=r"model-F16.gguf is not the source's model: .* from the source's"):
        finalize(source, Path("model"), FinalizeOptions(gguf="f16"))
    assert [path.name for path in Path().iterdir()] == ["source"]


SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    + SYSTEM
    + "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_modelfile_has_the_template_s_system_message() -> None:
    directory = byte_level(Path("model"))
    for template, system in ((SMOLLM2, [f'SYSTEM """{SYSTEM}"""']), (CHATML, [])):
        (directory / "chat_template.jinja").write_text(template)
        assert write_modelfile(directory, "model.gguf", load_tokenizer(str(directory)), [], None)
        lines = (directory / "Modelfile").read_text().splitlines()
        assert [line for line in lines if line.startswith("SYSTEM")] == system
        assert sum(line.startswith('TEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}') for line in lines) == 1
    # what stands before a chat is no message of the system's
    (directory / "chat_template.jinja").write_text(SMOLLM2.replace("<|im_start|>system\n", "<|im_start|>tool\n"))
    assert not write_modelfile(directory, "model.gguf", load_tokenizer(str(directory)), [], None)


def test_bad_options(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(capsys, str(run), "new", "--gguf", "q8_0,q4_k")
    types = "q8_0, f16, bf16, f32, q6_k, q5_k_m, q4_k_m, q4_0"
    assert f"--gguf: must be {types}, or several with commas between them, got 'q4_k'" in message
    message = refused(capsys, str(run), "new", "--gguf", "f16", "--quantize", "int8-weight-only")
    assert "--gguf: is written from plain weights, and --quantize rounds them" in message
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "xllamacpp" else find(name, *rest)
    )
    message = refused(capsys, str(run), "new", "--gguf", "f16")
    assert "--gguf: needs xllamacpp, which is not installed; pip install 'forgather[gguf]'" in message
    Path("alone.gguf").write_bytes(b"GGUF")
    assert "no tokenizer.json lies beside it" in refusal(capsys, "eval", "alone.gguf")

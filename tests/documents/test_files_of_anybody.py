"""Files that anybody may have written, through the commands: one message with the file's name, soon."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from program import SMALL, document, forgather, write
from safetensors.torch import load_file
from saving import sign

from forgather_cli.documents.json_and_yaml import MAX_DEPTH, parse_json, parse_yaml
from forgather_cli.documents.regular_files import file_inside, read_json, read_text, read_yaml

STEP = "RUN/checkpoints/step-00000001"
GENERATE = ["generate", "MODEL", "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"]
EVAL = ["eval", "RUN"]
INSPECT = ["checkpoint", "inspect", STEP]
OF_STEP = ["generate", STEP, "--prompt", "a"]
SUMMARY = ["logs", "summary", "RUN"]
FINALIZE = ["finalize", "MODEL", "new"]
TRAIN = ["train", "model=nano", "seq_len=16", "callbacks=minimal", "device=cpu", "max_steps=1", "output_dir=new"]
PLAN = ["plan", "model=pretrained", "model.path=MODEL"]
DEEP = "[" * 20_000 + "]" * 20_000
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    assert forgather("train", *SMALL, "max_steps=1", f"output_dir={root}/RUN") == 0
    shutil.copytree(root / STEP / "model", root / "MODEL")
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with a run RUN of one step and its model MODEL."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def in_a_case(make: Callable[..., object]) -> Callable[..., Callable[[], object]]:
    """What is called in the table of cases is made when the case is run, and returns the file that is to be named."""
    return lambda *args, **kwargs: partial(make, *args, **kwargs)


text = in_a_case(write)


@in_a_case
def pipe(name: str) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).unlink(missing_ok=True)
    os.mkfifo(name)
    return Path(name)


@in_a_case
def edited(name: str, **changes: Any) -> Path:
    """A JSON object with other values."""
    return write(name, json.dumps({**json.loads(Path(name).read_text()), **changes}))


@in_a_case
def manifest(**changes: Any) -> None:
    """A checkpoint's manifest with other values and a right checksum."""
    sign(Path(STEP), {**json.loads(Path(STEP, "manifest.json").read_text()), **changes})


@in_a_case
def header(change: Callable[[dict[str, Any]], Any]) -> Path:
    """The model's safetensors file with another header."""
    path = Path("MODEL/model.safetensors")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    found = change(entries)
    new = (found if isinstance(found, str) else json.dumps(entries)).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])
    return path


def overlap(entries: dict[str, Any]) -> None:
    norms = [entry for entry in entries.values() if entry.get("shape") == [64]]
    norms[1]["data_offsets"] = norms[0]["data_offsets"]


def relabel(entries: dict[str, Any]) -> None:
    for name, entry in entries.items():
        if name != "__metadata__":
            entry["dtype"] = "I32"


@in_a_case
def index(file: str) -> None:
    Path("MODEL/model.safetensors").rename("outside.safetensors")
    names = load_file("outside.safetensors")
    Path("MODEL/model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))


CASES: dict[str, tuple[Callable[[], object], list[str], list[str]]] = {
    # a pipe where a file is read
    **{name: (pipe(f"MODEL/{name}"), GENERATE, ["a pipe"]) for name in (
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
        "model.safetensors",
    )},
    "config.yaml": (pipe("RUN/config.yaml"), EVAL, ["a pipe"]),
    "manifest.json": (pipe(f"{STEP}/manifest.json"), INSPECT, ["a pipe"]),
    "metrics.jsonl": (pipe("RUN/metrics.jsonl"), SUMMARY, ["a pipe"]),
    "recipe": (pipe("mine.yaml"), ["train", "./mine.yaml"], ["a pipe"]),
    "prompts": (pipe("p.txt"), [*GENERATE[:2], "--prompts", "p.txt"], ["--prompts", "a pipe"]),
    "proof": (pipe("t.txt"), [*FINALIZE, "--text", "t.txt"], ["--text", "a pipe"]),
    "data": (pipe("d.txt"), [*TRAIN, "data=text", "data.files=[d.txt]"], ["data.files", "a pipe"]),
    "device": (lambda: None, [*TRAIN, "data=text", "data.files=[/dev/zero]"], ["data.files", "/dev/zero", "a device"]),
    "chat template": (
        pipe("c.jinja"), [*TRAIN, "data=instruct", "data.files=[ok.jsonl]", "data.chat_template=c.jinja"],
        ["a pipe"],
    ),
    # what expands, or is nested without end
    "bomb in config.yaml": (text("RUN/config.yaml", BOMB), EVAL, ["aliases"]),
    "bomb in a recipe": (text("m.yaml", "defaults: [train]\n" + BOMB), ["train", "./m.yaml"], ["aliases"]),
    "bomb in an option": (text("conf/model/m.yaml", BOMB), ["train", "model=m"], ["aliases"]),
    "bomb in prompts": (text("p.yaml", BOMB), [*GENERATE[:2], "--prompts", "p.yaml"], ["aliases"]),
    "deep config.yaml": (text("RUN/config.yaml", DEEP * 5), EVAL, ["nested"]),
    "deep config.json": (text("MODEL/config.json", DEEP), GENERATE, ["nested"]),
    "deep tokenizer_config": (text("MODEL/tokenizer_config.json", DEEP), GENERATE, ["nested"]),
    "deep manifest": (text(f"{STEP}/manifest.json", DEEP), INSPECT, ["nested"]),
    "deep header": (header(lambda entries: DEEP), GENERATE, []),
    "deep metrics": (text("RUN/metrics.jsonl", DEEP + "\n{}\n"), SUMMARY, ["metrics.jsonl:1", "nested"]),
    "deep prompts": (text("p.jsonl", DEEP), [*GENERATE[:2], "--prompts", "p.jsonl"], ["p.jsonl:1", "nested"]),
    "deep data": (text("d.jsonl", DEEP), [*TRAIN, "data=text", "data.files=[d.jsonl]"], ["d.jsonl:1", "nested"]),
    "chats with a key that nothing reads": (
        lambda: Path("c.jsonl").write_text('{"question": "a", "answer": "b", "note": "of four words at least"}'),
        [*TRAIN, "data=instruct", "data.files=[c.jsonl]", "data.chat_template=chatml"], ["'data.ignore=[note]'\n"],
    ),
    # sizes and names
    "layers": (edited("MODEL/config.json", num_hidden_layers=10_000_000), GENERATE, ["_layers"]),
    "a text for a number": (edited("MODEL/config.json", hidden_size="64"), PLAN, ["hidden_size"]),
    "no number": (edited("MODEL/config.json", vocab_size="x"), GENERATE, ["vocab_size", "'x'"]),
    "finalized": (edited("MODEL/config.json", vocab_size="x"), FINALIZE, ["vocab_size", "'x'"]),
    "finalized, of another": (edited("MODEL/config.json", hidden_size="x"), FINALIZE, ["hidden_size"]),
    "a fraction": (edited("MODEL/config.json", num_hidden_layers=1.5), GENERATE, ["_layers", "1.5"]),
    "a list as header": (header(lambda entries: "[1]"), GENERATE, []),
    "BART": (
        edited("MODEL/config.json", model_type="bart", is_encoder_decoder=True,
               architectures=["BartForConditionalGeneration"]),
        GENERATE, ["encoder-decoder", "'bart'"],
    ),
    "BART as a decoder": (
        edited("MODEL/config.json", model_type="bart", is_encoder_decoder=True),
        [*TRAIN, "data=synthetic", "model=transformers", "model.path=MODEL"], ["encoder-decoder"],
    ),
    "UTF-16": (
        lambda: Path("mine.yaml").write_text("a: 1\n", encoding="utf-16"), ["train", "./mine.yaml"],
        ["mine.yaml", "UTF-16", "iconv"],
    ),
    "no heads": (edited("MODEL/config.json", num_attention_heads=0), GENERATE, ["num_attention_heads"]),
    "larger than its files": (edited("MODEL/config.json", vocab_size=90_000_000), GENERATE, ["larger"]),
    "out of the directory": (index("../outside.safetensors"), GENERATE, ["index.json", "../outside.safetensors"]),
    "a NUL in a name": (index("a\0b.safetensors"), GENERATE, ["index.json", "no name of a file"]),
    "half a character": (index("\ud800.safetensors"), GENERATE, ["index.json", "surrogate"]),
    # tensors
    "overlapping": (header(overlap), GENERATE, []),
    "integers": (header(relabel), GENERATE, ["I32"]),
    # manifests with a right checksum
    "no files": (manifest(files={}), OF_STEP, ["manifest.json", "no files"]),
    "another format": (manifest(format_version="99"), OF_STEP, ["'99'", "reads 1"]),
    "world_size": (manifest(world_size=None), OF_STEP, ["manifest.json", "world_size"]),
    "healthy": (manifest(healthy="no"), OF_STEP, ["manifest.json", "healthy"]),
    "components": (manifest(components={"x": 5}), INSPECT, ["manifest.json", "components"]),
    "a file outside": (manifest(files={"../x": {"size": 0, "ranges": []}}), INSPECT, ["manifest.json", "'../x'"]),
    # a template
    "loops": (text("c.jinja", LOOPS), [*FINALIZE, "--chat-template", "c.jinja"], ["come to its end"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_message_with_the_name_of_the_file(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, command, words = CASES[name]
    text("ok.jsonl", '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')()
    file = make()
    began = time.monotonic()
    code = forgather(*command)
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    assert said.count("error: ") == 1, said
    assert all(word in said for word in words), said
    assert not isinstance(file, Path) or str(file) in said, said
    assert time.monotonic() - began < 300
    assert not Path("new").exists()


def test_a_registry_entry_of_another_kind_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    lone_half = "\ud800".encode("utf-8", "surrogatepass").decode("latin1")
    for number, content in enumerate((DEEP, "{}", lone_half)):
        text(f"{tmp_path}/forgather/jobs/job_{number}/endpoint.json", content)()
    pipe(f"{tmp_path}/forgather/jobs/job_3/endpoint.json")()
    assert document(capsys, "control", "list") == []


def test_plain_documents_are_read_as_their_libraries_read_them() -> None:
    for source in ("a: [1, 2.5, true, null, 2001-01-01]\nb: &b {c: d}\ne: {<<: *b, f: *b}\n", "", "- x\n", "5"):
        assert parse_yaml(source) == yaml.safe_load(source)
    nested = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    for source in ('{"a": [1, 2.5, true, null, "\\u00e9\\ud83d\\ude00"]}', "5", nested):
        assert parse_json(source) == json.loads(source)
    for wrong in ("&a [*a]", "a: !!python/object/apply:os.getcwd []", "a: b: c"):
        with pytest.raises(ValueError, match=r"\w"):
            parse_yaml(wrong)
    assert file_inside(Path("x"), "y/z") == Path("x/y/z")


def test_a_document_behind_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Windows writes one first; the standard library's JSON refuses it."""
    readers = ((read_json, '{"a": 1}', {"a": 1}), (read_yaml, "a: 1\n", {"a": 1}), (read_text, "token\n", "token\n"))
    for read, content, value in readers:
        (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert read(tmp_path / "a") == value

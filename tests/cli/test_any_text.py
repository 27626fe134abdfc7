"""What a terminal cannot show is replaced, and names of files that are no UTF-8 end nothing in a traceback."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import chats
import paired
import pytest
from program import Process, forgather, refusal

from forgather_cli.config.decode import dump_tree
from forgather_cli.documents.json_and_yaml import parse_yaml
from forgather_cli.documents.regular_files import write_whole

TRAIN = ["train", "model=nano", "precision=fp32", "callbacks=minimal", "device=cpu", "max_steps=1", "seq_len=16",
         "global_batch_size=1"]  # fmt: skip
TEXT = [*TRAIN, "data=text", "files=['d/*.txt']", "tokenizer=bytes"]
BYTES = os.fsdecode(b"\xff\xe9\xfe")
"""A name that no text in UTF-8 has."""


@pytest.fixture(autouse=True)
def _here(own_directory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    Path("d").mkdir()
    Path("d", f"{BYTES}.txt").write_text("Some words to train on. " * 40)


def run(encoding: str, *words: str, code: int = 0) -> str:
    """What the program prints where its output has another encoding."""
    with Process(*words, env={"PYTHONIOENCODING": encoding}) as process:
        assert process.finish() == code, process.output
        assert "Traceback" not in process.output
        return process.output


def test_a_run_whose_name_cannot_be_shown_is_done_and_looked_at() -> None:
    run("latin-1", *TEXT, "output_dir='o/数😀'", "callbacks=default")
    assert json.loads(Path("o/数😀/exit.json").read_text())["state"] == "done"
    run("ascii", *TEXT, "output_dir='o/数_ddp'", "trainer=ddp", "nproc_per_node=2", "global_batch_size=2")
    assert json.loads(Path("o/数_ddp/exit.json").read_text())["state"] == "done"
    assert "\\u6570" in run("latin-1", "runs", "list", "o")
    for encoding in ("latin-1", "ascii"):
        told = run(encoding, "checkpoint", "list", "o/数😀", "--json").splitlines()
        document = json.loads("\n".join(told[[line[:1] in "[{" for line in told].index(True) :]))
        assert "数😀" in json.dumps(document, ensure_ascii=False)
    shown = run("ascii", "data", "show", "o/数😀", "--json").splitlines()
    assert json.loads(next(line for line in shown if line.startswith("{")))["samples"]
    assert "\\u6570" in run("latin-1", "config", "show", "output_dir='数'")
    assert "\\u6570" in run("ascii", "train", "output_dir='数'", "data=数", code=2)


SIDES = "max_encoder_length=64 max_decoder_length=64"


@pytest.mark.parametrize(
    "words",
    [
        "data=text files=['d/*.txt'] eval_files=['d/*.txt']",
        "data=instruct chat_template=chatml files=['d/*.chats.jsonl'] seq_len=256",
        "data=hf dataset=text data_files=['d/*.txt'] streaming=true",
        f"data=ul2 source=text files=['d/*.txt'] max_seq_length=64 {SIDES}",
        f"data=seq2seq files=['d/*.pairs.jsonl'] {SIDES}",
    ],
)
def test_data_are_found_by_a_pattern(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    chats.write_chats(Path("d", f"{BYTES}.chats.jsonl"), 8)
    paired.write_corpus()
    shutil.move("pairs.jsonl", f"d/{BYTES}.pairs.jsonl")
    of_pairs = [*(word for word in TRAIN if not word.startswith(("seq_len", "model="))), *paired.SHAPE]
    code = forgather(*(of_pairs if SIDES in words else TRAIN), *words.split(), "output_dir=run")
    told = capfd.readouterr().err
    assert code == 0, told
    for name in ("config.yaml", "exit.json", "metrics.jsonl"):
        Path("run", name).read_text(encoding="utf-8")
    if Path("run/data_files.json").exists():
        assert "\\udcff" in Path("run/data_files.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words",
    [
        (*TRAIN, "data=text", f"files=['d/{BYTES}.txt']"), (*TEXT, f"output_dir='{BYTES}'"),
        (*TEXT, f"tokenizer='{BYTES}'"), ("train", f"model.path='{BYTES}'"), ("train", f"{BYTES}.yaml"),
        ("train", BYTES), ("train", f"model={BYTES}"), ("train", "--config-dir", BYTES), ("eval", BYTES),
        ("generate", BYTES, "--prompt", "a"), ("resume", BYTES), ("checkpoint", "list", BYTES),
    ],
)  # fmt: skip
def test_a_name_in_other_bytes_is_one_message(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    told = refusal(capfd, *words)
    assert "Traceback" not in told
    assert "error: " in told


def test_what_holds_such_a_name_can_be_read_again() -> None:
    tree = {"directory": f"/{BYTES}/数"}
    for text, read in ((dump_tree(tree), parse_yaml), (json.dumps(tree, ensure_ascii=False), json.loads)):
        write_whole(Path("a"), text)
        assert read(Path("a").read_text(encoding="utf-8")) == tree


def test_a_run_in_a_directory_of_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path.cwd() / BYTES
    here.mkdir()
    shutil.copytree("d", here / "d")
    monkeypatch.chdir(here)
    assert forgather(*TEXT, "output_dir=run", "save_strategy=steps", "save_steps=1") == 0
    assert forgather("resume", "run", "max_steps=2") == 0
    assert forgather("eval", "run") == 0
    assert forgather("runs", "list", ".") == 0

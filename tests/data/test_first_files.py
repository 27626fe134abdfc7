"""Files as people first give them: links that lead nowhere, chats as text, splits that nobody asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
from chats import conversation, write_lines, write_table
from program import forgather, printed, refusal
from streams import write_dataset

from forgather_cli.config.schema import HfSettings, TextSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.text.corpus import find_files
from forgather_cli.errors import DataError

SMALL = [
    "device=cpu", "model=nano", "seq_len=16", "global_batch_size=2", "max_steps=2", "warmup_steps=0", "precision=fp32",
    "eval_strategy=no", "callbacks=minimal", "+callbacks.info={}", "tokenizer=bytes",
]  # fmt: skip


def test_a_link_to_nowhere_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"a\.txt' links to '.*/gone\.txt', which is gone"):
        find_files("data.files", [f"{tmp_path}/*.txt"])
    (tmp_path / "gone.txt").write_text("back")
    assert find_files("data.files", [f"{tmp_path}/a.txt"]) == [tmp_path / "gone.txt"]


def test_a_directory_of_a_dataset_that_is_gone_is_no_name_alone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone' \(no directory here\)"):
        load_data(HfSettings(dataset=str(tmp_path / "gone"), cache_dir=str(tmp_path)), seed=1)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf"])
def test_chats_as_text_name_what_reads_them(kind: str, tmp_path: Path) -> None:
    rows = [{"messages": conversation(i)} for i in range(4)]
    write_lines(tmp_path / "chats.jsonl", rows)
    write_table(tmp_path / "chats.parquet", rows)
    name, base = str(tmp_path / f"chats.{'jsonl' if kind == 'hf' else kind}"), {"cache_dir": str(tmp_path / "cache")}
    option: Any = HfSettings(data_files=[name], **base) if kind == "hf" else TextSettings(files=[name], **base)
    with pytest.raises(DataError, match=r"chats \(messages\) are read by data=instruct"):
        load_data(option, seed=1)


def test_a_split_of_the_dataset_that_nobody_evaluates_on_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_dataset(tmp_path, [{"text": f"Document {i} says " + "word " * 9} for i in range(40)], 20)
    base: dict[str, Any] = {"dataset": str(tmp_path / "saved"), "cache_dir": str(tmp_path / "cache")}
    load_data(HfSettings(**base), seed=1)
    assert "data.eval_split=validation would evaluate on a split of the dataset" in caplog.text
    caplog.clear()
    load_data(HfSettings(eval_split="validation", **base), seed=1)
    assert "eval_split" not in caplog.text


def test_a_share_of_the_documents_that_is_another_of_the_tokens_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", [{"text": f"Document {i} " + "word " * (5 if i else 4000)} for i in range(30)])
    write_lines(tmp_path / "b.jsonl", [{"text": "one of its own " * 9}])
    words = ["train", *SMALL, "data=text", "data.files=[a.jsonl]"]
    why = "draws whole documents"
    assert f"eval_fraction=0.05 {why}" in printed(capsys, *words, "output_dir=few").out
    assert why not in printed(capsys, *words, "data.eval_files=[b.jsonl]", "output_dir=own").out
    (tmp_path / "c.txt").write_text("A line of text.\n" * 400)  # one document, cut
    assert why not in printed(capsys, "train", *SMALL, "data=text", "data.files=[c.txt]", "output_dir=cut").out


def test_data_that_changed_under_a_run_give_the_words_that_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("A line of text.\n" * 400)
    assert forgather("train", *SMALL, "data=text", "data.files=[a.txt]", "output_dir=run") == 0
    (tmp_path / "a.txt").write_text("Another line of text.\n" * 400)
    told = refusal(capsys, "resume", "run", "max_steps=4")
    line = told.rstrip().splitlines()[-1]
    assert line.startswith("to read the data from their beginning, add '")
    assert forgather("resume", "run", "max_steps=4", line.split("'")[1]) == 0
    assert tiny.metrics("run")[-1]["step"] == 4
    told = refusal(capsys, "resume", "run", "max_steps=6", "model.hidden_size=32")  # which no words help
    assert "from their beginning" not in told

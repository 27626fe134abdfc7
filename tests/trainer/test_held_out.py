"""An evaluation that was asked for and has nothing to read is refused; else one line tells it."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chats
import numpy as np
import paired
import pytest
import tiny
from program import forgather, refusal

from forgather_cli import Trainer, TrainingArguments, api
from forgather_cli.errors import ConfigError, DataError

TRAIN = ["train", "model=nano", "precision=fp32", "device=cpu", "callbacks=minimal", "output_dir=run",
         "global_batch_size=1", "max_steps=1", "save_strategy=no"]  # fmt: skip


def own(kind: str = "list") -> dict[str, Any]:
    held_out = {"list": [], "stream": tiny.stream([]), "none": None}[kind]
    return {"train": tiny.RandomTokens(), "eval": held_out, "seq_len": 16, "vocab_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that the tests read, and where what they tokenize is cached."""
    root = tmp_path_factory.mktemp("held out")
    with contextlib.chdir(root):
        paired.write_corpus()
        Path("some.txt").write_text("Some words to train on. " * 40)
        Path("some.jsonl").write_text("".join(f'{{"text": "{"word " * 40}{n}"}}\n' for n in range(20)))
        for name in ("empty.txt", "empty.jsonl"):
            Path(name).touch()
        Path("bad.jsonl").write_text('{"text": null}\n{"txt": "a"}\n')
        np.full(400, 97, np.uint16).tofile("a.bin")
        chats.write_chats(Path("one.jsonl"), 1)
        chats.write_chats(Path("chats.jsonl"), 8)
        turns = [{"role": "user", "content": "a" * 400}, {"role": "assistant", "content": "b"}]
        chats.write_lines(Path("long.jsonl"), [{"messages": turns}])
    return root


@pytest.fixture(autouse=True)
def _here(folder: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    yield
    shutil.rmtree("run", ignore_errors=True)


TEXT = "data=text files=[some.txt] seq_len=16"
CHATS = "data=instruct chat_template=chatml files=[chats.jsonl] seq_len=256"
OWN, PAIRED = "data._target_=test_held_out.own", "model=qwen3_encdec hidden_size=32"
REFUSED = {
    f"{TEXT} eval_files=[empty.txt]": "data.eval_files",
    "data=text files=[some.jsonl] eval_files=[bad.jsonl] on_bad_row=skip": "data.eval_files",
    "data=tokens seq_len=16 files=[a.bin] eval_fraction=0.0001": "data.eval_fraction",
    f"{CHATS} files=[one.jsonl] eval_on_start=true": "eval_on_start",
    f"{CHATS} eval_files=[long.jsonl] too_long=drop": "data.eval_files",
    f"{PAIRED} data=seq2seq files=[pairs.jsonl] eval_files=[empty.jsonl]": "data.eval_files",
    f"{PAIRED} data=ul2 source=text files=[corpus/*.txt] eval_files=[empty.txt]": "data.eval_files",
    "data=hf data_files=[some.jsonl] eval_files=[empty.jsonl]": "data.eval_files",
    "data=hf data_files=[some.jsonl] eval_files=[empty.jsonl] streaming=true": "data.eval_files",
    f"{OWN} eval_on_save=true save_strategy=steps": "eval_on_save",
    f"{OWN} +data.kind=stream load_best_model_at_end=true save_strategy=steps": "load_best_model_at_end",
    f"{OWN} +data.kind=none eval_strategy=steps": "eval_strategy",
    # no data are read for these
    f"{TEXT} eval_fraction=0 eval_strategy=steps": "eval_strategy",
    "data=synthetic num_eval_samples=0 eval_on_start=true": "eval_on_start",
    "data=hf data_files=[some.jsonl] streaming=true eval_strategy=epoch": "eval_strategy",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_was_asked_for_has_something_to_read(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    told = refusal(capfd, *TRAIN, *words.split()).strip().splitlines()[-1]
    assert REFUSED[words].removeprefix("data.") in told
    assert re.search(r"; .+(leave|set|raise|give) ", told), told
    assert not list(Path("run").glob("checkpoints/*"))


@pytest.mark.parametrize(
    "words",
    [
        f"{CHATS} files=[one.jsonl]", "data=tokens seq_len=16 files=[a.bin] eval_fraction=0", OWN,
        f"{OWN} +data.kind=stream", f"{TEXT} eval_files=[empty.txt] eval_strategy=no",
    ],
)  # fmt: skip
def test_by_itself_a_run_without_evaluations_says_so_in_one_line(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert forgather(*TRAIN, *words.split()) == 0
    told = "".join(capfd.readouterr()).splitlines()
    assert sum("nothing is evaluated" in line for line in told) == ("eval_strategy=no" not in words), told


def test_a_later_word_that_takes_the_split_away_counts() -> None:
    Path("mine.yaml").write_text("defaults: [train, {override data: text}, _self_]\neval_strategy: steps\n")
    assert forgather("train", "./mine.yaml", *TRAIN[1:], "files=[some.txt]", "seq_len=16", "eval_fraction=0") == 0


def test_from_python_it_is_refused_as_well() -> None:
    model = tiny.decoder()
    for dataset in ([], tiny.stream([])):
        for asked in ({"eval_strategy": "steps"}, {"eval_on_start": True}):
            args = TrainingArguments(output_dir="run", max_steps=1, device="cpu", **asked)
            trainer = Trainer(model, args, train_dataset=tiny.RandomTokens(), eval_dataset=dataset)
            with pytest.raises(DataError, match=r"eval_dataset: .*eval_strategy=no"):
                trainer.train()
    words = [*TRAIN[1:-1], *f"{CHATS} files=[one.jsonl]".split()]
    with pytest.raises(DataError, match=r"eval_fraction.*eval_strategy"):
        api.compose(*words, "eval_strategy=steps").train()
    with pytest.raises(ConfigError, match=r"eval_strategy.*eval_dataset"):
        Trainer(model, TrainingArguments(output_dir="x", eval_strategy="steps"), train_dataset=tiny.RandomTokens())

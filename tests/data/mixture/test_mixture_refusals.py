"""Mixtures that are refused: what is given, and what is said of it, by the name of the source."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixing import QUIET, config, data, loader, settle, write_files
from program import forgather, refusal

from forgather_cli.config.load import load_config
from forgather_cli.documents.fields import FieldError
from forgather_cli.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _files(own_directory: None) -> None:
    write_files()


WEIGHTS = "{prose: 1, code: 1, notes: 1}"
MISTAKES = {
    "data.sources.cod.weight=0.5": "data.sources.cod.weight: nothing of that name there; did you mean code?",
    "data.sources.code.wieght=0.5": "data.sources.code.wieght: text has no such setting; did you mean weight?",
    "data.sources.code.packin=pad": "data.sources.code.packin: text has no such setting; did you mean packing?",
    "data.sources.code.type=txt": "data.sources.code: an option names a _target_ or its type, got 'txt'",
    "data.sources.code.type=ul2": "data.sources.code: an option names a _target_ or its type, got 'ul2'",
    "data.sources.code.weight=0": "data.sources.code.weight: must be greater than 0, got 0",
    "data.sources.code.weight=-0.5": "data.sources.code.weight: must be greater than 0, got -0.5",
    "data.sources.code.weight=much": "data.sources.code.weight: must be a number, got 'much'",
    "data.sources.code.weight=nan": "data.sources.code.weight: must be a finite number, got nan",
    "~data.sources.code.weight": "data.sources.code.weight: is left out, but others have one; give each source one",
    "data.sources.code.on_exhausted=stop": "data.sources.code.on_exhausted: nothing reads it with data.sources.code.",
    "data.sources.prose.text_key=body": "data.sources.prose.text_key: nothing reads it with data.sources.prose.files=[",
    "data.weight_schedule.0.at=0.9": "data.weight_schedule: at goes back, got 0.9, 0.8; put them in order",
    f"data.weight_schedule=[{{at: 5, weights: {WEIGHTS}}}, {{at: 4, weights: {WEIGHTS}}}]": "goes back, got 5, 4",
    "data.weight_schedule=[{at: 5, weights: {prose: 1, code: 1}}]": "weights: names every source, got none for notes",
    "data.weight_schedule=[{at: 5, weights: {prose: 0, code: 0, notes: 0}}]": "data.weight_schedule.0.weights: are",
    "+data.weight_schedule.0.weights.coda=1": "data.weight_schedule.0.weights.coda: no such source; did you mean code?",
    "data.chat_template=chatml": "chat_template: nothing reads it with data=mixture; add a source of chats",
    "+data.sources.web={type: hf, data_files: [a.jsonl], streaming: true, weight: 1}": (
        "data.sources.web.streaming: streams as sources are not there yet, got true; leave it out"
    ),
    "+data.sources.web={type: hf, weight: 1}": "data.sources.web.dataset: data=hf reads a dataset of the hub",
    "data.sources.notes={_target_: nowhere.rows, weight: 1}": "data.sources.notes._target_: cannot import nowhere",
    "+data={sources: {a/b: {type: text, files: [a.txt], weight: 1}}}": "data.sources: a name has letters, digits, -",
    "+data={sources: {a.b: {type: text, files: [a.txt], weight: 1}}}": "data.sources: a name has letters, digits, -",
    **{
        f"data.sources.code.{name}={value}": f"data.sources.code.{name}: is the same for all, and stands above; set "
        for name, value in {"tokenizer": "bytes", "bpe_vocab_size": 300, "seq_len": 16, "isolate_documents": "true",
                            "chat_template": "chatml", "add_bos": "true", "cache_dir": "c"}.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_has_one_message(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(word)
    [problem] = [each for each in refused.value.problems if MISTAKES[word] in each]
    assert all(each == problem or "names every source" in each for each in refused.value.problems)


@pytest.mark.parametrize("ats", [(5, 4), (0.5, 0.4), (0.5, 5, 0.4)])
def test_a_schedule_that_goes_back_in_any_run(ats: tuple[float, ...]) -> None:
    entries = ", ".join(f"{{at: {at}, weights: {WEIGHTS}}}" for at in ats)
    with pytest.raises(ConfigError, match=r"data\.weight_schedule: at goes back"):
        config("max_steps=-1", f"data.weight_schedule=[{entries}]")


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"], ["train"], ["train", "trainer=ddp"],
                                     ["train", "trainer=fsdp2"], ["data", "show"]], ids=" ".join)  # fmt: skip
def test_a_schedule_that_goes_back_where_epochs_end(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Where only the number of steps says so, which the data say."""
    words = ["max_steps=-1", f"data.weight_schedule=[{{at: 900, weights: {WEIGHTS}}}, {{at: 0.5, weights: {WEIGHTS}}}]"]
    data()  # it is cached
    name, *more = command[:1] if command[0] != "data" else ["data", "show"]
    assert forgather(name, *more, "mix.yaml", *QUIET, *words, *command[1 + len(more) :], "output_dir=run") == 2
    assert "data.weight_schedule: at goes back, got the steps [900, " in "".join(capfd.readouterr())


def test_ul2_over_a_mixture_is_not_there_yet() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.source: must be .*, got 'mixture'; ul2 over a mixture is not there yet"
    ):
        load_config("default", ["data=ul2", "data.source=mixture", "model=qwen3_encdec"])


def test_a_mixture_without_sources() -> None:
    with pytest.raises(ConfigError, match=r"data\.sources: a mixture has sources, got none"):
        load_config("default", ["data=mixture", "model=nano"])


UNREADABLE = {
    "data.sources.prose.files=[gone.txt]": r"data\.sources\.prose\.files: no file matches 'gone.txt'",
    "data.seq_len=4000": r"data\.sources\.prose: data\.seq_len: 4000 is longer than the training split",
    "data.sources.prose.files=[empty.txt]": r"data\.sources\.prose\.files: no text in 1 files",
    "data.isolate_documents=true data.sources.prose.type=tokens data.sources.prose.files=[t.npy]": (
        r"data\.sources\.prose: data\.isolate_documents=true: nothing marks the documents"
    ),
    "+data.sources.mine={_target_: users_rows.short,weight: 1}": r"data\.sources\.mine\._target_: its samples have 8",
    "+data.sources.mine={_target_: users_rows.other,weight: 1}": r"data\.sources\.mine\._target_: its tokenizer is",
    "+data.sources.mine={_target_: users_rows.none,weight: 1}": r"data\.sources\.mine\._target_: it has no samples",
    "+data.sources.mine={_target_: users_rows.stream,weight: 1}": r"data\.sources\.mine\._target_: sources are read",
}
USERS = """
from forgather_cli.data.text.tokenizer import ByteTokenizer

def rows(count=20, width=32):
    return [{"input_ids": [n] * width, "labels": [n] * width} for n in range(count)]

def short():
    return rows(width=8)

def other():
    return {"train": rows(), "seq_len": 32, "tokenizer": ByteTokenizer(None, ("<x>",))}

def none():
    return {"train": [], "seq_len": 32}

def stream():
    return {"train": iter(rows()), "seq_len": 32}
"""


@pytest.mark.parametrize("words", UNREADABLE)
def test_what_is_wrong_with_a_source_is_said_with_its_name(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("empty.txt").touch()
    Path("users_rows.py").write_text(USERS)
    np.save("t.npy", np.zeros(4000, np.uint16))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "users_rows", raising=False)
    given = [words] if words.startswith("+") else words.split()
    with pytest.raises(DataError, match=UNREADABLE[words]):
        data("data.weight_schedule=[]", *given)


def test_rows_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("users_rows.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "users_rows", raising=False)
    made = data("data.weight_schedule=[]", "+data.sources.mine={_target_: users_rows.rows, count: 5, weight: 3}")
    number = made.train.parts_by_source["mine"].start
    assert made.train[number + 4]["labels"].tolist() == [4] * 32


def test_samples_cannot_be_grouped_by_length() -> None:
    with pytest.raises(DataError, match="train_sampling_strategy: group_by_length"):
        loader(data().train, 8, 4, group_by_length="length")


def test_a_source_whose_data_have_changed_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*QUIET, "output_dir=run", "max_steps=4", "data.weight_schedule=[]"]
    assert forgather("train", "mix.yaml", *words) == 0
    text = Path("notes.txt").read_text()
    Path("notes.txt").write_text(text + "one more\n")
    capsys.readouterr()
    assert forgather("resume", "run", "max_steps=6", "data.sources.notes.weight=0.3") != 0
    told = capsys.readouterr().err
    assert "weight" not in told
    assert "data.sources.notes: the samples are not those of the checkpoint" in told
    assert f"{Path('notes.txt').resolve()} (changed)" in told
    assert forgather("resume", "run", "max_steps=6", "~data.sources.notes") == 0
    Path("notes.txt").write_text(text)
    assert forgather("resume", "run", "max_steps=8", "seq_len=16") != 0
    assert "seq_len: the checkpoint has 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"position": -8}, {"position": 8}, {"stretches": []}, {"stretches": [{}]}, {"stretches": 3}, {"stretches": "last"},
     {"position": None}],
    ids=str,
)  # fmt: skip
def test_a_position_that_no_mixture_has_saved(change: dict[str, Any]) -> None:
    made = loader(data().train, 8, 4)
    settle(made, made.state_dict(), 0, 12)
    position = {**made.state_dict(), "position": 16}
    position["stretches"] = [*position["stretches"], {**position["stretches"][0], "begin": 16}]
    made.load_state_dict(position)
    if change == {"stretches": "last"}:  # the first is gone
        change = {"stretches": position["stretches"][1:]}
    with pytest.raises((FieldError, DataError)):
        made.load_state_dict({**position, **change})


NO_SOURCE = """
defaults: [train, override model: nano, override data: mixture, _self_]
max_steps: 4
"""
TOLD = {
    ("none.yaml",): "data.sources: a mixture has sources, got none",
    ("mix.yaml", "data.sources.prose.files=[empty.txt]"): "data.sources.prose.files: no text in 1 files",
    ("mix.yaml", "data.sources.prose.files=[short.txt]"): "data.sources.prose: data.seq_len: 32 is longer than the",
    ("mix.yaml", "data.sources.code.weight=0"): "data.sources.code.weight: must be greater than 0, got 0",
    ("mix.yaml", "data.sources.code.weight=-0.5"): "data.sources.code.weight: must be greater than 0, got -0.5",
    ("mix.yaml", "data.sources.code.weight=much"): "data.sources.code.weight: must be a number, got 'much'",
    ("mix.yaml", "data.sources.code.weight=nan"): "data.sources.code.weight: must be a finite number, got nan",
    ("mix.yaml", "data.sources.code.weight=inf"): "data.sources.code.weight: must be a finite number, got inf",
    ("mix.yaml", "data.weight_schedule.0.weights.code=-1"): "data.weight_schedule.0.weights.code: must be greater than",
    ("mix.yaml", "data.weight_schedule.0.weights.code=nan"): "data.weight_schedule.0.weights.code: must be a finite",
    ("mix.yaml", "~data.sources.code.weight"): "data.sources.code.weight: is left out, but others have one",
    ("mix.yaml", "data.weight_schedule.0.at=0.9"): "data.weight_schedule: at goes back, got 0.9, 0.8",
    ("mix.yaml", "data.weight_schedule.0.at=11"): "data.weight_schedule: at goes back, got 11, 0.8",
    ("mix.yaml", "~data.weight_schedule", "+data.sources.mine={_target_: users_rows.other, weight: 1}"): (
        "data.sources.mine._target_: its tokenizer is unlike the other sources'"
    ),
    ("mix.yaml", "data.sources.code.seq_len=16"): "data.sources.code.seq_len: is the same for all, and stands above",
    ("mix.yaml", "data.sources.code.tokenizer=bytes"): "data.sources.code.tokenizer: is the same for all, and stands",
    ("slash.yaml",): "data.sources: a name has letters, digits, - and _, got 'a/b'",
    ("dotted.yaml",): "data.sources: a name has letters, digits, - and _, got 'a.b'",
}


@pytest.mark.parametrize("words", TOLD, ids=" ".join)
def test_the_command_ends_with_one_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").touch()
    Path("short.txt").write_text("no")
    Path("none.yaml").write_text(NO_SOURCE)
    for file, name in ("dotted.yaml", "a.b"), ("slash.yaml", "a/b"):
        Path(file).write_text(f"{NO_SOURCE}data:\n  sources: {{{name}: {{type: text, files: [notes.txt]}}}}\n")
    Path("users_rows.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "users_rows", raising=False)
    recipe, *given = words
    told = refusal(capsys, "train", recipe, *QUIET, *given, "output_dir=run")
    [line] = [line for line in told.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: {TOLD[words]}")
    assert not Path("run/metrics.jsonl").exists()

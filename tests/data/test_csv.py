"""csv and tsv files: rows of texts, for text, chats and pairs."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from chats import conversation, write_lines
from program import forgather
from streams import all_ids

from forgather_cli.config.load import load_config, reload_config
from forgather_cli.config.schema import HfSettings, InstructSettings, Seq2SeqSettings, TextSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.cache import Cache
from forgather_cli.data.paired.seq2seq import tokenize_pairs
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text.corpus import find_corpus, split_documents
from forgather_cli.data.text.read import Damage
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import ConfigError, DataError

BODIES = [
    "plain", 'said "so", twice ""', "two\nlines, one\r\ncell", "", "naïve\t🙂", "0012", " 1e5 ", "'single'",
    "x" * 200_000,
]  # fmt: skip


def write_cells(path: Path, rows: list[list[str]], encoding: str = "utf-8", **style: Any) -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",", **style).writerows(rows)
    return path


def texts(path: Path, damage: Damage | None = None, **settings: Any) -> list[str]:
    corpus = find_corpus(TextSettings(files=[str(path)], eval_fraction=0.0, **settings))
    return [document.text for _, document in split_documents(corpus, damage or Damage())]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.CSV"])
@pytest.mark.parametrize("style", [{}, {"quoting": csv.QUOTE_ALL, "lineterminator": "\n"}])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_cells_are_the_texts_that_were_written(tmp_path: Path, name: str, style: Any, encoding: str) -> None:
    rows = [["id", "body"], *([str(number), body] for number, body in enumerate(BODIES))]
    path = write_cells(tmp_path / name, rows, encoding, **style)
    for each in (path, path.with_name(f"{name}.gz")):
        each.write_bytes(gzip.compress(path.read_bytes()) if each != path else path.read_bytes())
        assert texts(each, text_key="body") == [body for body in BODIES if body]
        assert texts(each, text_key="id") == [str(number) for number in range(len(BODIES))]


def test_long_files_are_read_in_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in it may be the middle of a cell."""
    monkeypatch.setattr("forgather_cli.data.text.read.PIECE", 100)
    lines = [f"number {n},\n2,3\n" for n in range(50)]
    path = write_cells(tmp_path / "a.csv", [["text", "n"], *([line, "1"] for line in lines)])
    corpus = find_corpus(TextSettings(files=[str(path)], eval_fraction=0.0))
    assert [text for piece in corpus.pieces() for text in (d.text for d in corpus.read(piece, Damage()))] == lines


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    path = write_cells(tmp_path / "a.csv", [["text"], ["some words"]], encoding)
    name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(DataError, match=rf"a\.csv: is text in {name}, .*iconv -f {name} -t UTF-8"):
        texts(path)
    (tmp_path / "b.csv").write_bytes(b"text\ncaf\xe9\n")  # Latin-1 is replaced and counted, as in text
    assert texts(tmp_path / "b.csv", damage := Damage()) == ["caf\ufffd"]
    assert damage.replaced == {str(tmp_path / "b.csv"): 1}


def test_rows_with_other_numbers_of_cells_are_left_out_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,n\none,1\ntwo\nthree,3\nfour,4,4\n")
    assert texts(path, damage := Damage(), on_bad_row="skip") == ["one", "three"]
    assert [row.partition(": ")[0] for row in damage.skipped] == [f"{path}:3", f"{path}:5"]


def test_tokens_that_were_once_made_of_lines_with_commas_are_not_taken(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.csv", [["text"], ["word"]])
    corpus = find_corpus(TextSettings(files=[str(path)]))
    assert corpus.files[0].label != ".csv"
    assert corpus.fingerprint(Cache(tmp_path / "cache"))


def test_files_of_json_lines_by_their_other_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.ndjson", [{"text": "one"}, {"text": "two"}])
    assert texts(tmp_path / "a.ndjson") == ["one", "two"]


# ---------------------------------------------------------------------------------------------------- chats and pairs


def chats(path: Path, **settings: Any) -> DataSplits:
    both: dict[str, Any] = {"chat_template": "chatml", "seq_len": 100, "eval_fraction": 0.0, "packing": "pad"}
    both |= {"cache_dir": str(path.parent / "cache"), **settings}
    return load_data(InstructSettings(files=[str(path)], **both), seed=0)


def same(one: DataSplits, other: DataSplits) -> bool:
    labels = [[each.train[i]["labels"].tolist() for i in range(len(each.train))] for each in (one, other)]
    return all_ids(one.train) == all_ids(other.train) and labels[0] == labels[1]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_chats_are_those_of_json_lines(tmp_path: Path, suffix: str) -> None:
    alpaca = [
        {"instruction": "Add, please.", "input": "1\n2", "output": '"3"', "history": [["Hi", "Hello"]]},
        {"instruction": "Name primes.", "input": "", "output": "[2, 3, 5]", "history": [["Hi", "Hello"]]},
    ]
    layouts: list[list[dict[str, Any]]] = [
        alpaca,
        [{"prompt": "How many?", "completion": "12"}, {"prompt": "[1]", "completion": "0.50"}],
        [{"messages": conversation(n)} for n in range(3)],
        [{"conversations": [{"from": "human", "value": "Hi, you"}, {"from": "gpt", "value": "12"}]}],
    ]
    for number, records in enumerate(layouts):
        cells = [[v if isinstance(v, str) else json.dumps(v) for v in each.values()] for each in records]
        table = write_cells(tmp_path / f"{number}{suffix}", [list(records[0]), *cells])
        assert same(chats(table), chats(write_lines(tmp_path / f"{number}.jsonl", records)))


def test_a_cell_that_is_no_list_of_messages_is_said(tmp_path: Path) -> None:
    path = write_cells(tmp_path / "a.csv", [["messages"], [json.dumps(conversation(1))], ["[{'role': 'user'}]"]])
    with pytest.raises(DataError, match=r"a\.csv:3: 'messages' must be a list of messages, got str"):
        chats(path)


def test_pairs_and_their_lines(tmp_path: Path) -> None:
    rows = [["input", "target"], ["one,\n1", "eins"], ["two", '"zwei"'], ["three"]]
    path = write_cells(tmp_path / "a.csv", rows)
    both: dict[str, Any] = {"files": [str(path)], "eval_fraction": 0.0}
    cache, tokenizer = Cache(tmp_path / "cache"), load_tokenizer("bytes")
    with pytest.raises(DataError, match=r"a\.csv:5: has 1 cells, and the header 2 \(input, target\)"):
        tokenize_pairs(Seq2SeqSettings(**both), tokenizer, cache)
    made = tokenize_pairs(Seq2SeqSettings(**both, on_bad_row="skip"), tokenizer, cache)
    assert made.train.records.array.tolist() == [0, 2, 0, 4]
    found = bytes(number for number in made.train.tokens.files[0].array if number < 256)
    assert found == b'one,\n1einstwo"zwei"'
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError, match=r"b\.txt: holds no records by its name; .*csv or tsv"):
        tokenize_pairs(Seq2SeqSettings(files=[str(tmp_path / "b.txt")]), tokenizer, cache)


def test_samples_are_shown_with_the_first_line_of_their_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [["n", "text"], *([str(n), f"words of\nrow {n}, " * 9] for n in range(20))]
    write_cells(tmp_path / "a.csv", rows)
    words = ["data=text", "data.files=[a.csv]", "tokenizer=bytes", "seq_len=64", f"data.cache_dir={tmp_path}/cache"]
    assert forgather("data", "show", *words, "--from", "a.csv:12", "--json") == 0
    shown = json.loads(capsys.readouterr().out)["samples"]
    assert all(f"{tmp_path}/a.csv:12" in sample["source"] for sample in shown)
    assert "words of\nrow 1, " in "".join(piece for sample in shown for piece in sample["pieces"])
    assert forgather("data", "stats", *words) == 0


def test_tsv_by_the_datasets_library(tmp_path: Path) -> None:
    """One comma in each row would make the first words of each an index."""
    rows = [["text", "n"], *([f"row {n}, word", "x"] for n in range(9))]
    both: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "seq_len": 8, "tokenizer": "bytes"}
    path = write_cells(tmp_path / "a.tsv", rows)
    found = load_data(HfSettings(data_files=[str(path)], **both), seed=0)
    wanted = load_data(TextSettings(files=[str(path)], **both), seed=0)
    assert all_ids(found.train) == all_ids(wanted.train)


# ------------------------------------------------------------------------------------------------ a field of plain text


@pytest.mark.parametrize("files", ["[a.txt]", "[a.txt.gz,b.md]", "['*.txt']", "['*']"])
@pytest.mark.parametrize("data", ["text", "ul2"])
def test_a_field_that_no_file_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, data: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    words = [f"data={data}", f"data.files={files}", "text_key=body", *(["data.source=text"] if data == "ul2" else [])]
    words += ["model=qwen3_encdec"] if data == "ul2" else []
    with pytest.raises(
        ConfigError, match=r"text_key: nothing reads it with files=\[.*; give jsonl, json, parquet, csv"
    ):
        load_config(None, words)
    (tmp_path / "b.csv.gz").touch()
    for more in ("a.txt,b.csv.gz", "'*.*'", "x.jsonl", "x.JSON"):
        load_config(None, [each if "files" not in each else f"data.files=[{more}]" for each in words])
    load_config(None, [*words, "data.eval_files=[b.csv.gz]"])
    if data == "ul2":  # a column of the datasets library
        load_config(
            None, [*words[:1], *words[2:], "data.source=hf", "data.data_files=[a.txt]", "data.eval_files=[a.txt]"]
        )


def test_a_run_that_was_begun_with_such_a_field_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config(None, ["data=text", "data.files=[a.jsonl]", "text_key=body"])
    from forgather_cli.config.decode import dump_saved

    tree = {**loaded.tree, "data": {**loaded.tree["data"], "files": ["a.txt"]}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(dump_saved(tree))
    assert reload_config(tmp_path / "run", []).config.data.text_key == "body"

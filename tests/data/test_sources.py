"""Documents from files, and which of them are held out."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
from chats import write_lines, write_table

from forgather_cli.config.schema import PythonStdlibSettings, TextSettings
from forgather_cli.data.cache import Cache, NotCached
from forgather_cli.data.text import corpus as sources
from forgather_cli.data.text import read as reading
from forgather_cli.data.text.corpus import Corpus, find_corpus, split_documents
from forgather_cli.data.text.read import Damage
from forgather_cli.errors import DataError


def texts(corpus: Corpus, damage: Damage | None = None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "eval": []}
    for split, document in split_documents(corpus, damage or Damage()):
        found[split].append(document.text)
    return found


def option(file: Path, **settings: Any) -> TextSettings:
    return TextSettings(files=[str(file)], **settings)


def read(file: Path, **settings: Any) -> list[str]:
    """With nothing held out."""
    return texts(find_corpus(option(file, eval_fraction=0.0, **settings)))["train"]


def test_standard_library_without_tests_held_out_by_names_alone() -> None:
    corpus = find_corpus(PythonStdlibSettings())
    names = [source.label for source in corpus.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert corpus.origin["python"] == platform.python_version()
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert sum(source.path.stat().st_size for source in corpus.all_files) > 5_000_000
    fewer = Corpus(corpus.files[::2], eval_fraction=corpus.eval_fraction, by_name=True)

    def held_out(of: Corpus) -> set[str]:
        return {document.name for split, document in split_documents(of, Damage()) if split == "eval"}

    all_names, few_names = held_out(corpus), held_out(fewer)
    assert 0.02 < len(all_names) / len(corpus.files) < 0.1
    assert few_names == all_names & {source.label for source in fewer.files}


def test_documents_of_every_kind(tmp_path: Path) -> None:
    """JSON files are lists or lines."""
    records = [{"text": "one"}, {"text": ""}, {"text": "two\n"}]
    for name, content in (("a.txt", "plain"), ("b.md", "# mark\n"), ("c.txt", ""), ("d.json", json.dumps(records))):
        (tmp_path / name).write_text(content)
    for name in ("e.json", "f.jsonl"):
        write_lines(tmp_path / name, records)
    assert read(tmp_path / "*.*") == ["plain", "# mark\n", *["one", "two\n"] * 3]
    (tmp_path / "g.json").write_text('[{"text": "x\\ud800y"}, {"text": "z"}]')
    assert read(tmp_path / "g.json", on_bad_row="skip") == ["z"]


def test_split_by_fraction_keeps_equal_texts_together_and_the_first_always_trains(tmp_path: Path) -> None:
    records = [{"text": f"document {i % 500}"} for i in range(1000)]
    found = texts(find_corpus(option(write_lines(tmp_path / "a.jsonl", records), eval_fraction=0.2)))
    assert len(found["train"]) + len(found["eval"]) == 1000
    assert 0.1 < len(found["eval"]) / 1000 < 0.3
    assert not set(found["train"]) & set(found["eval"])
    low = [f"text {i}" for i in range(300) if sources.held_out_share(f"text {i}") < 0.05][:2]  # both would be held out
    found = texts(find_corpus(option(write_lines(tmp_path / "a.jsonl", [{"text": name} for name in low]))))
    assert found == {"train": low[:1], "eval": low[1:]}


def test_one_text_is_cut_at_a_line_one_line_anywhere_and_one_letter_nowhere(tmp_path: Path) -> None:
    lines = [f"line {i}\n" for i in range(1000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    found = texts(find_corpus(option(tmp_path / "a.txt", eval_fraction=0.1)))
    head, tail = found["train"][0], found["eval"][0]
    assert head + tail == "".join(lines)
    assert head.endswith("\n")
    assert 0.09 < len(tail) / len(head + tail) < 0.11
    (tmp_path / "a.txt").write_text("x" * 100)
    assert texts(find_corpus(option(tmp_path / "a.txt"))) == {"train": ["x" * 95], "eval": ["x" * 5]}
    (tmp_path / "a.txt").write_text("x")
    assert texts(find_corpus(option(tmp_path / "a.txt"))) == {"train": ["x"], "eval": []}


@pytest.mark.parametrize("piece", [reading.PIECE, 60])
def test_all_bad_rows_of_a_file_are_one_report_or_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(reading, "PIECE", piece)  # the file in one part, or in several
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": f"text {n}"}) for n in range(10)]
    lines = [*good[:4], '{"text": "cut', *good[4:8], '{"text": null}', "", *good[8:], '{"body": 1}']
    path.write_text("\n".join(lines) + "\n")
    bad = [5, 10, 14]
    with pytest.raises(DataError) as raised:
        texts(find_corpus(option(path)))
    assert "3 bad rows" in str(raised.value)
    assert all(f"\n  {number}: " in str(raised.value) for number in bad)
    assert "data.on_bad_row=skip" in str(raised.value)
    corpus, damage = find_corpus(option(path, on_bad_row="skip", eval_fraction=0.0)), Damage()
    assert texts(corpus, damage)["train"] == [f"text {n}" for n in range(10)]
    assert [row.partition(": ")[0] for row in damage.skipped] == [f"{path}:{number}" for number in bad]
    assert "3 bad rows left out" in damage.lines()["skipped"]
    other = find_corpus(option(path, eval_fraction=0.0))
    assert corpus.fingerprint(Cache(tmp_path / "cache")) != other.fingerprint(Cache(tmp_path / "cache"))


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x" * 10)
    assert len(find_corpus(option(tmp_path / "a[1].txt")).files) == 1


@pytest.mark.parametrize(
    ("name", "modules", "install"),
    [
        ("a.parquet", ("pyarrow", "pyarrow.parquet"), r"pyarrow; pip install 'forgather\[parquet\]'"),
        ("a.txt.zst", ("zstandard", "compression", "compression.zstd"), "zstandard; pip install zstandard"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, modules: tuple[str, ...], install: str
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(DataError, match=rf"{name}: .*needs? the package {install}"):
        read(tmp_path / name)


def test_parquet(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", [{"text": text, "n": 1} for text in ("one", None, "two")])
    with pytest.raises(DataError, match=r"a\.parquet:2: 'text' is null, not text.* data\.on_bad_row=skip"):
        read(path)
    corpus = find_corpus(option(path, eval_fraction=0.0, on_bad_row="skip"))
    assert texts(corpus, damage := Damage())["train"] == ["one", "two"]
    assert [row.partition(": ")[0] for row in damage.skipped] == [f"{path}:2"]
    with pytest.raises(DataError, match=r"no column 'body' \(its columns: text, n\)"):
        read(path, text_key="body")


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    def fingerprint(path: Path, **settings: Any) -> str:
        return find_corpus(option(path, **settings)).fingerprint(Cache(tmp_path / "cache"))

    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same")
    first = fingerprint(tmp_path / "a.txt")
    assert fingerprint(tmp_path / "b.txt") == first
    assert fingerprint(tmp_path / "b.txt", eval_fraction=0.5) != first
    (tmp_path / "a.txt").write_text("other")
    assert fingerprint(tmp_path / "a.txt") != first
    unseen = tmp_path / "c.txt"
    unseen.write_text("same")
    corpus = find_corpus(option(unseen))
    with pytest.raises(NotCached):
        corpus.fingerprint(Cache(tmp_path / "cache", build=False))
    assert corpus.fingerprint(Cache(tmp_path / "cache")) == first

"""A corpus of large files: compressed ones, tokenized by any number of processes, gone on with after a kill."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import os
import resource
import signal
import tracemalloc
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import zstandard
from chats import write_table
from program import nobody_runs
from stepwise import Stepwise

from forgather_cli.config.schema import HfSettings, TextSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.text import encode
from forgather_cli.data.text import read as reading
from forgather_cli.data.text import tokenize as tokenizing
from forgather_cli.data.text.corpus import find_corpus, held_out_share, split_documents
from forgather_cli.data.text.read import Damage, FilePart, SourceFile, parts_of, read_documents
from forgather_cli.data.text.tokenizer import train_bpe
from forgather_cli.errors import DataError
from forgather_cli.launch.processes import children

PIECE = 1000  # bytes, in place of 16 MiB
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
}
LINES = "".join(f"Line {i} of a text, naïve café.\n" for i in range(120))
RECORDS = "".join(json.dumps({"text": f"Record {i}: " + "word " * (i % 11)}) + "\n" for i in range(120))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", PIECE)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe([LINES, RECORDS], 320, directory)
    return str(directory)


def documents(path: Path, part: FilePart = reading.WHOLE) -> list[str]:
    return [each.text for each in read_documents(SourceFile(path, ""), "text", Damage(), part)]


def option(cache: Path, *files: Path | str, **settings: Any) -> TextSettings:
    return TextSettings(files=[str(file) for file in files], cache_dir=str(cache), seq_len=2, **settings)


def written(cache: Path) -> dict[str, bytes]:
    """Every file of the tokenized corpus in a cache."""
    (directory,) = (cache / "tokens").iterdir()
    assert not directory.name.startswith(".")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_holds_the_documents_of_the_plain_one(tmp_path: Path, suffix: str) -> None:
    for name, text in (("a.txt", LINES), ("b.md", "# Title\n"), ("c.jsonl", RECORDS), ("d.txt", "")):
        plain, packed = tmp_path / name, tmp_path / f"{name}{suffix}"
        plain.write_text(text, encoding="utf-8")
        packed.write_bytes(COMPRESS[suffix](text.encode()))
        assert documents(packed) == documents(plain)
        (part,) = parts_of(packed)
        found = list(read_documents(SourceFile(packed, ""), "text", Damage(), part))
        assert sum(each.num_bytes for each in found) <= part.num_bytes == packed.stat().st_size
        assert not found or found[-1].num_bytes >= 0
    frames = b"".join(COMPRESS[suffix](part) for part in (b"one\n", b"", b"two\n"))
    (tmp_path / f"e.txt{suffix}").write_bytes(frames)
    assert documents(tmp_path / f"e.txt{suffix}") == ["one\ntwo\n"]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "overwritten", "other"])
def test_a_damaged_archive_is_told_with_its_file(tmp_path: Path, suffix: str, damage: str) -> None:
    whole = COMPRESS[suffix](os.urandom(5000).hex().encode())
    half = len(whole) // 2
    path = tmp_path / f"a.txt{suffix}"
    overwritten = whole[:-6] + bytes(255 - byte for byte in whole[-6:])  # where the checksums are
    path.write_bytes({"cut": whole[:half], "overwritten": overwritten, "other": b"plain text"}[damage])
    with pytest.raises(DataError, match=rf"a\.txt{suffix}: a damaged {suffix} file, or none \(.+\); fetch it again"):
        load_data(option(tmp_path / "cache", path), seed=0)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_of_no_bytes_among_good_files_is_told(tmp_path: Path, suffix: str) -> None:
    """A fetch that failed. No archive is that short: one of an empty text has a header."""
    for name, content in (("a.jsonl", RECORDS.encode()), ("b.jsonl", b""), (f"c.jsonl{suffix}", COMPRESS[suffix](b""))):
        (tmp_path / name).write_bytes(content)
    good = option(tmp_path / "cache", tmp_path / "*.jsonl*")
    assert len(load_data(good, seed=0).train)
    (tmp_path / f"d.jsonl{suffix}").touch()
    hub = HfSettings(dataset=str(tmp_path), cache_dir=good.cache_dir)
    files = HfSettings(dataset="json", data_files=good.files, streaming=True)
    for each in (good, hub, files, dataclasses.replace(good, files=[str(tmp_path / "b.jsonl")], eval_files=good.files)):
        with pytest.raises(DataError, match=rf"d\.jsonl{suffix}: .*0 bytes.*fetch it again"):
            load_data(each, seed=0)


MARK = b"\xef\xbb\xbf"
LIST = json.dumps([{"text": "one"}, {"text": "zwei é"}], indent=1, ensure_ascii=False).encode()
ROWS = b'{"text": "one"}\n' + '{"text": "zwei é"}\n'.encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", MARK + LIST),
        ("a.json", MARK + b"\r\n" + LIST),  # the mark is a line of its own
        ("a.json", MARK + b" \t\n\n" + LIST),
        ("a.json", b"\n" + MARK + LIST),
        ("a.json", MARK + b"\n" + ROWS),
        ("a.jsonl", MARK + ROWS),
        ("a.jsonl", MARK + b"\r\n" + ROWS),
        ("a.jsonl", ROWS.replace(b"\n", b"\n" + MARK)),  # files that were put together, the last of them empty
    ],
)
def test_records_behind_a_byte_order_mark(tmp_path: Path, name: str, content: bytes) -> None:
    for path, written in ((tmp_path / name, content), (tmp_path / f"{name}.gz", gzip.compress(content))):
        path.write_bytes(written)
        assert documents(path) == ["one", "zwei é"]


def test_a_mark_alone_is_an_empty_file(tmp_path: Path) -> None:
    for name in ("a.txt", "a.json", "a.jsonl"):
        (tmp_path / name).write_bytes(MARK)
        assert documents(tmp_path / name) == []
    (tmp_path / name).write_bytes(MARK[:2] + b"\n" + ROWS)
    with pytest.raises(DataError, match=r"a\.jsonl:1: "):
        documents(tmp_path / name)


def test_an_archive_is_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of its 8 MB of text is in memory, not all."""
    monkeypatch.setattr(reading, "PIECE", 1 << 18)
    text = "".join(f"{i * 7919 % 1000003} words and\n" for i in range(450_000)).encode()
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(gzip.compress(text, 1) if suffix == ".gz" else COMPRESS[suffix](text))
        tracemalloc.start()
        size = sum(len(each.text) for each in read_documents(SourceFile(path, ""), "text", Damage()))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size == len(text) > 7_500_000
        assert peak < 5_000_000, suffix


def test_parts_of_a_file_hold_its_documents_in_order(tmp_path: Path) -> None:
    one_line = "é" * 5000  # whose pieces end with a character
    long_row = json.dumps({"text": "x" * 5000}) + "\n" + RECORDS.rstrip("\n")
    for name, text in {"a.txt": LINES, "b.txt": one_line, "c.jsonl": RECORDS, "d.jsonl": long_row}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    write_table(tmp_path / "e.parquet", [json.loads(line) for line in RECORDS.splitlines()], row_group_size=10)
    for path in sorted(tmp_path.iterdir()):
        parts = parts_of(path)
        assert len(parts) > 2, path
        assert sum(part.num_bytes for part in parts) <= path.stat().st_size
        assert [text for part in parts for text in documents(path, part)] == documents(path)
    assert "".join(documents(tmp_path / "b.txt")) == "é" * 5000
    assert "".join(pieces := documents(tmp_path / "a.txt")) == LINES
    assert all(piece.endswith("\n") for piece in pieces)


def test_bad_records_in_a_later_part_are_told_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(RECORDS + "[1]\n")
    with pytest.raises(DataError, match=r"a\.jsonl:121: expected a JSON object, got list"):
        load_data(option(tmp_path / "cache", path, tokenize_processes=2), seed=0)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    monkeypatch.setattr(reading, "PIECE", 4000)
    path.write_text("[\n" * 5000)  # more in a part than are named
    with pytest.raises(DataError, match=r"at least 1000 bad rows(.|\n)* 1, 2, 3, "):
        documents(path, parts_of(path)[-1])


def corpora(folder: Path) -> dict[str, tuple[list[Path], dict[str, Any]]]:
    """Corpora whose split depends on what comes before and after a piece."""
    held_out = next(f"text {i}" for i in range(10**4) if held_out_share(f"text {i}") < 0.1)
    files = {
        "a.txt": LINES, "b.jsonl": RECORDS, "c.jsonl": '{"text": ""}\n' * 100,
        "d.jsonl": json.dumps({"text": held_out}) + "\n" + RECORDS, "e.txt": LINES[:500],
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "f.txt.gz").write_bytes(gzip.compress(LINES.encode()))
    at = {name.split(".")[0]: folder / name for name in [*files, "f.txt.gz"]}
    return {
        "all kinds": ([at["a"], at["b"], at["f"], at["e"]], {"eval_fraction": 0.1}),
        "nothing at the beginning": ([at["c"], at["d"]], {"eval_fraction": 0.1}),
        "the end of the last is held out": ([at["a"], at["c"]], {"eval_fraction": 0.001}),
        "own files": ([at["b"], at["a"]], {"eval_files": [str(at["d"]), str(at["f"])]}),
        "all is held out but the first": ([at["b"]], {"eval_fraction": 0.999999}),
        "nothing is held out": ([at["b"], at["a"]], {"eval_fraction": 0.0}),
    }


def test_processes_write_what_one_writes(tmp_path: Path, bpe: str) -> None:
    """And that is what the documents say, split as the rules say."""
    for number, (name, (files, settings)) in enumerate(corpora(tmp_path).items()):
        tokenizer = "bytes" if number else bpe
        results = []
        for processes in (1, 2) if number < 2 else (1,):  # a start costs half a second
            cache = tmp_path / f"{number}-{processes}"
            chosen = option(cache, *files, tokenizer=tokenizer, tokenize_processes=processes, **settings)
            data = load_data(chosen, seed=0)
            results.append(written(cache))
        assert results[0] == results[-1], name
        found: dict[str, list[int]] = {"train": [], "eval": []}
        for split, document in split_documents(find_corpus(chosen), Damage()):
            found[split] += [*data.tokenizer.encode(document.text), data.tokenizer.eos_token_id or 0]
        for split, ids in found.items():
            assert results[0][f"{split}.bin"] == b"".join(each.to_bytes(2, "little") for each in ids), (name, split)


def build(connection: Connection, path: Path, cache: Path, processes: int, one_is_stopped: bool = False) -> None:
    """In a process: tokenize a corpus piece by piece, each when told so."""
    commit, start = tokenizing.TokenFiles.commit, encode._start

    def told(self: Any, made: Any) -> None:
        commit(self, made)
        connection.send(f"piece {self.journal.done}")
        connection.recv()

    def one_stopped() -> Any:  # the one that is asked for the second piece, which is never done
        worker, process = start()
        send = worker.send

        def asked(what: Any) -> None:
            if what == 1:
                process.send_signal(signal.SIGSTOP)
            send(what)

        worker.send = asked  # type: ignore[method-assign]
        return worker, process

    reading.PIECE, tokenizing.TokenFiles.commit = PIECE, told  # type: ignore[method-assign]
    if one_is_stopped:
        encode._start = one_stopped
    try:
        load_data(option(cache, path, tokenize_processes=processes), seed=0)
        connection.send("built")
    except DataError as error:
        connection.send(str(error))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds children in /proc")
def test_a_killed_build_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(RECORDS * 2)
    load_data(option(tmp_path / "whole", path), seed=0)
    done = 0
    for signum, processes, pieces in ((signal.SIGINT, 2, 2), (signal.SIGKILL, 2, 3), (None, 1, 99)):
        builder = Stepwise(build, path, tmp_path / "cache", processes)
        heard = builder.hears()
        for number in range(pieces):
            done += 1
            assert heard == f"piece {done}", "those before are done"
            if number < pieces - 1:
                builder.tell()
                heard = builder.hears()
            if heard == "built":
                break
        workers = children(builder.pid) if signum else set()
        assert len(workers) == (processes if signum else 0)
        if signum is not None:
            os.kill(builder.pid, signum)
        builder.ends()
        assert nobody_runs(workers)  # a builder ends them; where it was killed, they see that nobody listens
    assert done > 8
    assert written(tmp_path / "cache") == written(tmp_path / "whole")


def test_a_process_that_is_killed_is_told_and_what_is_done_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(RECORDS * 2)
    builder = Stepwise(build, path, tmp_path / "cache", 2, True)
    assert builder.hears() == "piece 1"
    for pid in children(builder.pid):
        os.kill(pid, signal.SIGKILL)
    for _ in range(30):
        builder.tell()
    error = builder.ends()
    assert "data.tokenize_processes: a process that tokenizes has ended (signal 9, perhaps for lack of memory)" in error
    (left,) = (tmp_path / "cache" / "tokens").iterdir()
    assert json.loads((left / "journal.json").read_text())["done"] >= 1
    load_data(option(tmp_path / "cache", path), seed=0)
    load_data(option(tmp_path / "whole", path), seed=0)
    assert written(tmp_path / "cache") == written(tmp_path / "whole")


def build_on_a_full_disk(connection: Connection, path: Path, cache: Path, processes: int) -> None:
    reading.PIECE = 40000
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    try:
        load_data(option(cache, path, tokenize_processes=processes), seed=0)
    except DataError as error:
        connection.send(str(error))


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """In this process and in others, whose files are limited in size as a full disk would."""
    path = tmp_path / "a.jsonl"
    path.write_text(RECORDS * 40)
    for processes in (1, 2):
        error = Stepwise(build_on_a_full_disk, path, tmp_path / "cache", processes).ends()
        assert "data.cache_dir: cannot write the data cache (File too large" in error
        assert list((tmp_path / "cache" / "tokens").iterdir()) == []


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(
    ("name", "begins", "line"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "', 2), ("a.json", '{"text": "a"}\n{"text": "', 2),
        ("list.json", '[{"text": "', None), ("a.csv", 'text\n"a\n', 3),
    ],
)  # fmt: skip
def test_what_a_line_of_a_compressed_file_becomes_is_bounded(
    tmp_path: Path, suffix: str, name: str, begins: str, line: int | None
) -> None:
    """Without the bound it becomes 1 GB."""
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESS[suffix](begins.encode()) + COMPRESS[suffix](b"x" * 8_000_000) * 125)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=rf"{name}{suffix}:{line or ''}.* more than 100,000,000 bytes"):
            documents(path)
        assert tracemalloc.get_traced_memory()[1] < 300_000_000
    finally:
        tracemalloc.stop()


def test_a_line_of_a_later_part_is_told_by_its_number_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 500)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "0123456789"}\n' * 200 + '{"text": "' + "x" * 600 + '"}\n')
    last = parts_of(path)[-1]
    assert last.start
    with pytest.raises(DataError, match=rf"^{path}:201: has more than 500 bytes; split it$"):
        documents(path, last)

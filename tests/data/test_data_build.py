"""From a data option to datasets: the cache, its faults, every option, and what a plan may know."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import write_lines
from program import modules_after
from stepwise import Stepwise
from streams import all_ids

from forgather_cli.config.schema import DataTarget, SyntheticSettings, TextSettings, TokensSettings
from forgather_cli.data import cache as cache_module
from forgather_cli.data.build import load_data, source_of
from forgather_cli.data.cache import Cache
from forgather_cli.data.loaders.loader import EvalLoader
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text import tokenize
from forgather_cli.data.text.token_files import open_token_files
from forgather_cli.data.text.tokenizer import load_tokenizer, train_bpe
from forgather_cli.errors import ConfigError, DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    records = [{"text": f"Document {i} says: " + "word " * (i % 17)} for i in range(300)]
    return write_lines(tmp_path / "corpus.jsonl", records)


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def text(path: Path, cache: str, **settings: Any) -> TextSettings:
    return TextSettings(**{"files": [str(path)], "cache_dir": cache, "seq_len": 32, **settings})


def load(option: Any, seed: int = 1) -> DataSplits:
    return load_data(option, seed=seed)


def token_dirs(cache: str) -> list[str]:
    return sorted(os.listdir(Path(cache, "tokens")))


def test_text_to_samples_and_back_and_a_second_load_builds_nothing(corpus: Path, cache: str) -> None:
    calls: list[tuple[int, int]] = []
    option = text(corpus, cache, eval_fraction=0.1)
    data = load_data(option, seed=1, progress=lambda *at: calls.append(at))
    told, size = calls.copy(), corpus.stat().st_size
    assert told == sorted(told)
    assert told[-1] == (size, size)
    again = load_data(option, seed=1, progress=lambda *at: calls.append(at))
    assert calls == told
    assert (again.fingerprint, all_ids(again.train)) == (data.fingerprint, all_ids(data.train))
    ids = all_ids(data.train)
    ends = [i for i, token in enumerate(ids) if token == data.tokenizer.eos_token_id]
    records = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert data.tokenizer.decode(ids[: ends[0]]) == records[0]
    held_out = data.tokenizer.decode(all_ids(data.eval)).split("<|endoftext|>")
    assert {document for document in held_out if document} < set(records)
    assert data.description["train_documents"] + data.description["eval_documents"] == 300
    assert (data.seq_len, data.description["train_samples"]) == (32, len(data.train))
    batches = list(EvalLoader(data.eval, batch_size=3))
    assert sum(int((batch["labels"] != -100).sum()) for batch in batches) == data.description["eval_tokens"]


def test_fingerprint_follows_everything_that_changes_samples(corpus: Path, cache: str) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"seq_len": 16}, {"packing": "pad"}, {"packing": "best_fit"}, {"isolate_documents": True},
        {"eval_fraction": 0.2}, {"tokenizer": "bpe"}, {"tokenizer": "bpe", "bpe_vocab_size": 300},
    ]  # fmt: skip
    fingerprints = [load(text(corpus, cache, **change)).fingerprint for change in changes]
    corpus.write_text(corpus.read_text() + '{"text": "more"}\n')
    fingerprints.append(load(text(corpus, cache)).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)
    assert load(text(corpus, cache)).fingerprint == fingerprints[-1]


def test_other_content_of_the_same_size_and_time_is_read_anew(corpus: Path, cache: str) -> None:
    before, stat = load(text(corpus, cache)), corpus.stat()
    other = corpus.with_name("other.jsonl")
    other.write_text(corpus.read_text().swapcase().replace('"TEXT"', '"text"'))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    subprocess.run(["cp", "-p", str(other), str(corpus)], check=True)
    assert (corpus.stat().st_size, corpus.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    after = load(text(corpus, cache))
    assert after.fingerprint != before.fingerprint
    assert all_ids(after.train) != all_ids(before.train)


def test_bpe_is_trained_once_and_on_training_text_only(corpus: Path, cache: str, tmp_path: Path) -> None:
    (tmp_path / "eval.txt").write_text("zyzzyva " * 100)
    option = text(corpus, cache, tokenizer="bpe", bpe_vocab_size=400, eval_files=[str(tmp_path / "eval.txt")])
    first, again = load(option), load(option)
    assert first.tokenizer.fingerprint == again.tokenizer.fingerprint
    assert len(os.listdir(Path(cache, "tokenizers"))) == 1
    assert 257 < first.tokenizer.vocab_size <= 400
    assert len(first.tokenizer.encode("zyzzyva")) > 4
    assert len(first.tokenizer.encode(" word")) == 1


def test_directory_tokenizer_and_large_ids(corpus: Path, cache: str, tmp_path: Path) -> None:
    directory = tmp_path / "tokenizer"
    train_bpe(["some words " * 20], 300, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["id"] = tokenizer["model"]["vocab"]["<|endoftext|>"] = 70_000
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = load(text(corpus, cache, tokenizer=str(directory)))
    assert data.tokenizer.vocab_size == 70_001
    assert 70_000 in all_ids(data.train)


def test_bad_utf8_is_said(tmp_path: Path, cache: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes("already \ufffd\n".encode() + b"bad \xff byte\n" * 20)
    for _ in range(2):
        data = load(text(tmp_path / "a.txt", cache, eval_fraction=0.0))
        assert data.tokenizer.decode(all_ids(data.train)).startswith("already \ufffd\nbad \ufffd byte\nbad \ufffd b")
        assert "20 undecodable" in data.description["replaced"]
        assert "a.txt" in data.description["replaced"]
    assert caplog.text.count("20 undecodable byte sequences in 1 files replaced") == 1


def test_the_length_that_the_error_names_works(tmp_path: Path, cache: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short")
    with pytest.raises(DataError, match=r"data\.seq_len: 32 .* split of 6 tokens; set data\.seq_len=6 or"):
        load(text(path, cache, eval_fraction=0.0))
    data = load(text(path, cache, eval_fraction=0.0, seq_len=6))
    assert (len(data.train), data.eval) == (1, None)


def build(connection: Connection, path: Path, cache: str, mode: str) -> None:
    """In a process: build a cache and tell what is done."""

    def progress(done: int, total: int) -> None:
        connection.send("building")
        if mode == "hang":
            connection.recv()

    def train(*args: Any) -> None:
        connection.send("training")
        train_bpe(*args)

    tokenize.train_bpe = train
    bpe = {"tokenizer": "bpe", "bpe_vocab_size": 300} if mode == "bpe" else {}
    data = load_data(text(path, cache, **bpe), seed=1, progress=progress)
    connection.send("built" if len(data.train) else "empty")


def test_killed_builder_leaves_nothing_in_the_way(corpus: Path, cache: str) -> None:
    builder = Stepwise(build, corpus, cache, "hang")
    assert builder.hears() == "building"
    os.kill(builder.pid, signal.SIGKILL)
    builder.ends()
    assert [name for name in token_dirs(cache) if name.startswith(".tmp-")], "killed in the middle"
    assert source_of(text(corpus, cache)).counts() is None
    assert len(load(text(corpus, cache)).train) > 10
    assert len(token_dirs(cache)) == 1
    assert not token_dirs(cache)[0].startswith(".")


@pytest.mark.parametrize("mode", ["go", "bpe"])
def test_two_processes_build_once(corpus: Path, cache: str, mode: str) -> None:
    builders = [Stepwise(build, corpus, cache, mode) for _ in range(2)]
    outputs = [builder.hears_all() for builder in builders]
    assert [output[-1] for output in outputs] == ["built", "built"]
    assert sum(output.count("training") for output in outputs) == (mode == "bpe")
    assert len(token_dirs(cache)) == 1
    if mode == "go":
        assert sorted("building" in output for output in outputs) == [False, True]


def build_once(connection: Connection, cache: Path, name: str, rank: int | None) -> None:
    """In a process: build an entry of a cache step by step, when told so; as a rank of a node if ``rank`` is given."""

    def write(directory: Path) -> dict[str, Any]:
        connection.send("writing")
        connection.recv()
        (directory / "data").write_text("x")
        return {"by": name}

    os.environ.pop("LOCAL_RANK", None)
    os.environ |= {} if rank is None else {"LOCAL_RANK": str(rank)}
    cache_module._PATIENCE = 600.0  # as long as this machine takes to get to the first rank
    connection.recv()
    connection.send(Cache(cache).build_once("kind", "key", write)[1]["by"])


def test_a_wait_for_another_builder_is_told_and_told_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SILENCE", "_REMINDER"):
        monkeypatch.setattr(cache_module, name, 0.01)
    first = Stepwise(build_once, tmp_path, "first", None)
    first.tell()
    assert first.hears() == "writing"

    def let_go(record: logging.LogRecord) -> bool:
        if len(caplog.records) == 1:
            first.tell()
        return True

    caplog.handler.addFilter(let_go)
    assert Cache(tmp_path).build_once("kind", "key", lambda directory: {"by": "second"})[1]["by"] == "first"
    caplog.handler.removeFilter(let_go)
    assert first.ends() == "first"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) >= 2
    for word in (f"pid {first.pid}", socket.gethostname(), "kind-key", str(tmp_path)):
        assert word in told[0]


def test_a_nodes_first_rank_builds_even_if_another_is_there_before(tmp_path: Path) -> None:
    """Rank 0's progress is what a person sees."""
    ranks = [Stepwise(build_once, tmp_path, f"rank {rank}", rank) for rank in range(3)]
    ranks[1].tell()
    ranks[2].tell()
    while not (tmp_path / "locks").exists():  # rank 1 or 2 has come to the cache
        time.sleep(0.01)
    ranks[0].tell()
    assert ranks[0].hears() == "writing"
    ranks[0].tell()
    assert [each.ends() for each in ranks] == ["rank 0"] * 3


def test_damaged_cache_is_built_again(corpus: Path, cache: str) -> None:
    expected = all_ids(load(text(corpus, cache)).train)
    directory = Path(cache, "tokens", token_dirs(cache)[0])
    os.truncate(directory / "train.bin", 100)
    assert source_of(text(corpus, cache)).counts() is None
    assert all_ids(load(text(corpus, cache)).train) == expected
    (directory / "meta.json").write_text("{")
    assert all_ids(load(text(corpus, cache)).train) == expected


def test_a_file_system_that_cannot_sync_a_directory_holds_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, fsync = errno.EINVAL, os.fsync

    def fails(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, "")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fails)
    assert Cache(tmp_path).build_once("kind", "key", lambda path: {"by": "me"})[1]["by"] == "me"
    code = errno.EIO
    with pytest.raises(DataError):
        Cache(tmp_path).build_once("kind", "other", lambda path: {})


def test_counts_without_building_and_without_torch(corpus: Path, cache: str) -> None:
    option = text(corpus, cache, packing="best_fit")
    assert source_of(option).counts() is None
    assert not Path(cache).exists(), "a plan writes nothing"
    data = load(option)
    expected = {key: data.description[key] for key in ("train_tokens", "eval_tokens", "train_samples", "eval_samples")}
    assert source_of(option).counts() == {"vocab_size": 257, **expected}
    concat = source_of(text(corpus, cache)).counts()
    assert concat["train_samples"] == len(load(text(corpus, cache)).train)
    code = f"""
from forgather_cli.config.schema import TextSettings
from forgather_cli.data.build import source_of
from forgather_cli.data.chat import template
assert source_of(TextSettings(files=[{str(corpus)!r}], cache_dir={cache!r}, seq_len=32)).counts()
"""
    assert not {"torch", "tokenizers"} & modules_after(code)


def tokens(cache: str, *files: Path, **settings: Any) -> TokensSettings:
    return TokensSettings(**{"files": [str(file) for file in files], "cache_dir": cache, "seq_len": 8, **settings})


def write_bin(path: Path, values: list[int], dtype: str = "uint16") -> Path:
    np.array(values, dtype).tofile(path)
    return path


def test_bin_and_npy_read_as_one(tmp_path: Path, cache: str) -> None:
    first = write_bin(tmp_path / "a.bin", list(range(50)))
    np.save(tmp_path / "b.npy", np.arange(50, 100, dtype=np.int32).reshape(5, 10))
    data = load(tokens(cache, first, tmp_path / "b.npy", eval_fraction=0.2))
    assert all_ids(data.train) == list(range(80))
    assert all_ids(data.eval) == [*range(80, 100), 256, 256, 256, 256]
    assert data.description["train_documents"] is None
    own = load(tokens(cache, first, eval_files=[str(tmp_path / "b.npy")]))
    assert (all_ids(own.train), all_ids(own.eval)[:50]) == (list(range(48)), list(range(50, 100)))


def test_documents_of_token_files(tmp_path: Path, cache: str) -> None:
    path = write_bin(tmp_path / "a.bin", [1, 2, 0, 3, 4, 5, 0, 6, 0, 7, 8, 9] * 2)
    option = tokens(cache, path, document_separator=0, isolate_documents=True, eval_fraction=0.5)
    data = load(option)
    assert (data.description["train_tokens"], data.description["eval_tokens"]) == (9, 15)  # the border next to the half
    assert data.train.__getitems__([0])["document_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 3]]
    packed = load(tokens(cache, path, document_separator=0, packing="pad", eval_fraction=0.0))
    assert packed.train.__getitems__([0])["input_ids"].tolist() == [[1, 2, 0, 256, 256, 256, 256, 256]]
    assert source_of(option).counts() == {
        "vocab_size": 257, "train_tokens": 9, "train_samples": 1, "eval_tokens": 15, "eval_samples": 2,
    }  # fmt: skip


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize(
    ("values", "settings", "train", "held_out"),
    [
        ([1, 2, 0, 3, 0, 4, 5, 6, 0, 7], {"eval_fraction": 0.5}, [0, 3, 5], [0, 4, 5]),
        ([0, 1, 2, 3, 4, 5, 6, 7, 0, 0], {"eval_fraction": 0.5}, [0, 1], [0, 8, 9]),
        ([1, 2, 3, 0, 5, 6, 7, 8, 9, 0], {"eval_fraction": 0.9}, [0, 4], [0, 6]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 0], {"eval_fraction": 0.3}, [0, 7], [0, 3]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], {"eval_fraction": 0.01}, [0, 9], [0, 1]),
        ([1, 2, 3, 4], {"eval_fraction": 0.75}, [0, 1], [0, 3]),
        ([0, 0, 0, 0], {"eval_fraction": 0.0}, [0, 1, 2, 3, 4], []),
        ([1, 2, 0, 3], {"eval_files": ["b.npy"]}, [0, 3, 4], [0, 1, 3]),
    ],
)
def test_documents_end_behind_their_separator_and_evaluation_begins_with_one(
    values: list[int], settings: dict[str, Any], train: list[int], held_out: list[int]
) -> None:
    more = [0, 200, 0] if "eval_files" in settings else []
    np.save("b.npy", np.array(more, np.int64))
    files = write_bin(Path("a.bin"), values[:3]), write_bin(Path("c.bin"), values[3:])
    option = tokens("cache", *files, document_separator=0, **settings)
    told: list[tuple[int, int]] = []
    cache = Cache("cache", lambda done, total: told.append((done, total)))
    made = open_token_files(option, load_tokenizer("bytes"), cache)
    borders, read = [], []
    for split in made.splits().values():
        borders.append(split.documents.array.tolist())
        split.tokens.read(0, ids := np.empty(len(split.tokens), np.int64))
        read += ids.tolist()
    assert (borders, read) == ([train, held_out] if held_out else [train], values + more)
    assert (made.meta["smallest"], made.meta["largest"]) == (0, max(values + more))
    size = 2 * len(values) + 8 * len(more)
    assert [done for done, _ in told] == [*sorted({6, 2 * len(values), size}), size]


def test_indexes_of_before_are_used_again(cache: str, tmp_path: Path) -> None:
    data = load(tokens(cache, write_bin(tmp_path / "a.bin", [1] * 20), document_separator=1))
    assert data.fingerprint == "81d82cf56c088ea76fa33001c7e1db91"


WIDE = np.random.default_rng(0).integers(0, 257, 5000)  # ids of a vocabulary that one byte and a bit hold
LARGE = np.random.default_rng(1).integers(0, 150_000, 5000)  # of Qwen's
PADDED = np.where(np.arange(5000) % 7 == 0, -100, WIDE)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (WIDE, "uint32"), (WIDE, "int64"), (WIDE[:9], "uint32"), (WIDE[:8], "int64"), (LARGE, "uint32"),
        (LARGE[:99], "uint32"), (LARGE, "int64"), (PADDED, "int32"), (PADDED, "int64"),
        (np.tile(WIDE, 60), "uint32"), (np.tile(LARGE, 60), "int64"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("setting", ["files", "eval_files"])
def test_wider_ids_are_refused_and_read_where_they_are_named(
    tmp_path: Path, cache: str, values: Any, dtype: str, setting: str
) -> None:
    path, good = write_bin(tmp_path / "a.bin", values, dtype), write_bin(tmp_path / "b.bin", [1] * 9)
    both: dict[str, Any] = {"tokenizer": "bytes", "cache_dir": cache, "seq_len": 8}
    files = {"files": [str(good)], setting: [str(path)]}
    with pytest.raises(DataError, match=rf"a\.bin: .* set data\.token_dtype={dtype}, or uint16 "):
        load(TokensSettings(**files, **both))
    if values.min() >= 0 and values.max() < 257:
        made = load(TokensSettings(files=[str(path)], token_dtype=dtype, eval_fraction=0.0, **both))
        assert all_ids(made.train) == values[: len(values) // 8 * 8].tolist()
    else:  # as ever
        with pytest.raises(DataError, match=rf"token id {min(values.min(), 0) or values.max()} is outside the voc"):
            load(TokensSettings(files=[str(path)], token_dtype=dtype, **both))
    halves = values.astype(dtype).view(np.uint16)
    if halves.max() < 257:  # who says so has them
        made = load(TokensSettings(files=[str(path)], token_dtype="uint16", eval_fraction=0.0, **both))
        assert all_ids(made.train)[:16] == halves[:16].tolist()


@pytest.mark.parametrize(
    "values",
    [
        [0] * 64, [1] * 50, [1, 0] * 3, [0, 7] * 40, list(range(16)) * 30, [5, 0, 9, 0, 4, 0, 2, 3] * 40,
        [*[1, 0] * 4000, 3, 3], np.arange(9001) % 257, [200, 15] * 40, [0, 0, 3, 3] * 500,
    ],
)  # fmt: skip
def test_ids_of_two_bytes_are_never_refused(tmp_path: Path, cache: str, values: Any) -> None:
    made = load(tokens(cache, write_bin(tmp_path / "a.bin", values), eval_fraction=0.0, seq_len=2))
    assert all_ids(made.train) == list(values)[: len(values) // 2 * 2]


def test_synthetic_is_a_function_of_seed_and_number(cache: str) -> None:
    option = SyntheticSettings(num_samples=50, num_eval_samples=10, seq_len=16, ragged=True)
    data, again, other = load(option), load(option), load(option, seed=2)
    batch = data.train.__getitems__(list(range(50)))
    assert all_ids(data.train) == all_ids(again.train) != all_ids(other.train)
    assert data.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(data.train.__getitems__([7])["input_ids"][0], batch["input_ids"][7])
    assert all_ids(data.eval)[:16] != all_ids(data.train)[:16]
    lengths = (batch["labels"] != -100).sum(1)
    assert 2 <= lengths.min() < lengths.max() <= 16
    assert batch["input_ids"].max() < 257
    assert source_of(option).counts() == {
        "vocab_size": 257, "train_tokens": 800, "train_samples": 50, "eval_tokens": 160, "eval_samples": 10,
    }  # fmt: skip


def make_data(kind: str) -> Any:
    """What a user's ``data._target_`` may return."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 5
    return {
        "alone": rows, "pair": (rows, rows[:2]), "mapping": {"train": iter(rows), "seq_len": 9},
        "named": {"train": rows, "tokenizer": "bytes"}, "wrong": {"train": rows, "vocab_size": "many"}, "none": {},
    }[kind]  # fmt: skip


def test_data_of_the_user() -> None:
    def target(kind: str) -> DataSplits:
        return load(DataTarget(path=f"{__name__}.make_data", kwargs={"kind": kind}))

    assert (target("alone").seq_len, target("alone").eval, target("mapping").seq_len) == (3, None, 9)
    pair = target("pair")
    assert (len(pair.train), len(pair.eval)) == (5, 2)
    assert (pair.tokenizer, pair.vocab_size) == (None, None)  # bytes are not assumed
    named = target("named")
    assert named.vocab_size == named.tokenizer.vocab_size == 257
    with pytest.raises(DataError, match=r"'vocab_size' of .* must be a number above 0, got 'many'"):
        target("wrong")
    with pytest.raises(DataError, match="returned a mapping without 'train'"):
        target("none")
    with pytest.raises(ConfigError, match=r"data\._target_: cannot import no\.such\.thing"):
        load(DataTarget(path="no.such.thing"))

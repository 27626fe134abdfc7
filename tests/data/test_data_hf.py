"""``data=hf``: datasets of the ``datasets`` library through the token cache and as streams that go on exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from chats import write_chats, write_lines
from hf_models import train
from parity import LAYOUTS
from program import Process
from ranks import run_ranks
from streams import all_rows, assert_goes_on_from_anywhere, in_order, rows_of, steps_of, write_dataset

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import HfSettings, TextSettings
from forgather_cli.data.build import cached_token_counts, load_data
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")  # deprecated in torch 2.13, called by torchdata 0.11
SEQ_LEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 documents."""
    where = tmp_path_factory.mktemp("hf")
    write_dataset(where, [{"text": f"Document {i} says " + "word " * (i * 7 % 23), "n": i} for i in range(90)], 50)
    return where


def option(folder: Path, *files: str, **settings: Any) -> HfSettings:
    names = [str(folder / name) for name in files]
    base = {"data_files": names, "cache_dir": str(folder / "cache"), "seq_len": SEQ_LEN}
    return HfSettings(**{**base, **settings})


def stream(folder: Path, *files: str, **settings: Any) -> HfSettings:
    return option(folder, *(files or ("a.jsonl", "b.jsonl")), **{"streaming": True, **settings})


def load(chosen: HfSettings | TextSettings, seed: int = 1) -> DataSplits:
    return load_data(chosen, seed=seed)


def test_local_files_give_the_samples_of_data_text(folder: Path) -> None:
    settings: dict[str, Any] = {"eval_fraction": 0.2, "isolate_documents": True}
    text = load(TextSettings(files=[f"{folder}/[ab].jsonl"], cache_dir=f"{folder}/cache", seq_len=SEQ_LEN, **settings))
    fingerprints: set[str] = set()
    for names in (("a.jsonl", "b.jsonl"), ("all.parquet",)):
        data = load(option(folder, *names, **settings))
        assert all_rows(data.train) == all_rows(text.train)
        assert all_rows(data.eval) == all_rows(text.eval)
        fingerprints.add(data.fingerprint)
    assert fingerprints == {data.fingerprint} != {load(option(folder, "a.jsonl", **settings)).fingerprint}, "by content"
    assert cached_token_counts(option(folder, "a.jsonl")) is None
    assert data.description["train_documents"] + data.description["eval_documents"] == 90
    assert (data.description["type"], data.description["split"]) == ("hf", "train")
    assert (folder / "cache" / "datasets").is_dir(), "what the library makes of local files is in our cache"


def test_other_content_of_the_same_size_and_time_is_read_anew(tmp_path: Path) -> None:
    fingerprints = set()
    for text in ("one", "two"):
        os.utime(write_lines(tmp_path / "a.jsonl", [{"text": text * 20}] * 30), (1e9, 1e9))
        fingerprints.add(load(option(tmp_path, "a.jsonl")).fingerprint)
    assert len(fingerprints) == 2


def test_slices_and_files_to_evaluate_on(folder: Path) -> None:
    half = load(option(folder, "all.parquet", train_split="train[:50%]", eval_split="train[50%:]"))
    assert (half.description["train_documents"], half.description["eval_documents"]) == (45, 45)
    own = load(option(folder, "a.jsonl", eval_files=[str(folder / "b.jsonl")], packing="best_fit"))
    assert (own.description["train_documents"], own.description["eval_documents"]) == (50, 40)


def test_bpe_in_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"tokenizer": "bpe", "bpe_vocab_size": 300}
    alone = load(option(folder, "all.parquet", **chosen))
    monkeypatch.setattr("forgather_cli.data.text.read.PIECE", 1000)
    settings = {**chosen, "cache_dir": str(folder / "other"), "tokenize_processes": 2}
    together = load(option(folder, "all.parquet", **settings))
    assert all_rows(together.train) == all_rows(alone.train)
    assert all_rows(together.eval) == all_rows(alone.eval)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_split": "test"}, r"data\.train_split: no split 'test', the dataset has train"),
        ({"eval_split": "test"}, r"data\.eval_split: no split 'test', the dataset has train"),
        ({"text_key": "body"}, r"data\.text_key: no column 'body', the dataset has text, n"),
        ({"text_key": "n"}, r"data\.text_key: column 'n' holds int64, not text; the dataset has text, n"),
        ({"data_files": ["/no/such.jsonl"]}, r"data\.data_files: no file matches '/no/such\.jsonl'"),
        ({"data_files": ["some.xyz"]}, r"data\.data_files: cannot tell the format of 'some\.xyz'; set data\.dataset="),
        ({"dataset": "json", "data_files": ["bad.jsonl"]}, "JSON parse error"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("own_directory")
def test_mistakes(
    folder: Path, settings: dict[str, Any], message: str, streaming: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=message):
        next(iter(load(option(folder, "a.jsonl", streaming=streaming, **settings)).train))
    printed = capfd.readouterr()
    assert printed.out + printed.err == "", "neither bars nor log lines of the library"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_null_text_is_a_bad_row(tmp_path: Path, streaming: bool) -> None:
    texts = [{"text": f"text {number}"} for number in range(9)]
    for name, null in (("with.jsonl", [{"text": None}]), ("without.jsonl", [])):
        write_lines(tmp_path / name, [*texts, *null, *texts])
    with pytest.raises(DataError, match=r"null.*data\.on_bad_row=skip"):
        rows_of(load(option(tmp_path, "with.jsonl", streaming=streaming)).train)
    skipped = load(option(tmp_path, "with.jsonl", on_bad_row="skip", streaming=streaming)).train
    assert rows_of(skipped) == rows_of(load(option(tmp_path, "without.jsonl", streaming=streaming)).train)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("data=hf", ["dataset: data=hf reads a dataset of the hub, a directory or data_files, got none"]),
        ("data=hf dataset=x streaming=true tokenizer=bpe eval_fraction=0.1 train_split='train[:5%]'",
         ["tokenizer: bpe is trained on a whole corpus", "eval_fraction: nothing reads it with streaming=true",
          "train_split: a stream is read from its beginning"]),
        ("data=hf dataset=x trainer=ddp dispatch_batches=false shuffle_buffer=5 eval_files=[a.json]",
         ["dispatch_batches: nothing reads it with data=hf", "shuffle_buffer: nothing reads it with streaming=false",
          "eval_files: go with data_files"]),
        ("data=instruct", ["files: data=instruct reads chat files, or a dataset"]),
        ("data=instruct files=[a.jsonl] dataset=x",
         ["dataset: nothing reads it with files=[a.jsonl]; leave files out"]),
        ("data=instruct dataset=x streaming=true eval_files=[a.json]",
         ["eval_files: go with files or data_files", "packing: best_fit"]),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(words: str, told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, words.split())
    assert [part for part in told if part not in str(caught.value)] == []


_OFFLINE = """
import time
from forgather_cli.config.schema import HfSettings
from forgather_cli.data.build import load_data
from forgather_cli.errors import DataError
import datasets
begin = time.monotonic()
try:
    load_data(HfSettings(dataset="someone/something"), seed=0)
except DataError as error:
    print(error)
    print(time.monotonic() - begin)
"""


def test_a_hub_name_without_network(tmp_path: Path) -> None:
    """At once, and says how to point at local files."""
    proxies = {key: "" for key in os.environ if key.lower().endswith("_proxy")}
    nobody_listens = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", **proxies}
    with Process(code=_OFFLINE, env=nobody_listens) as process:
        assert process.finish() == 0
    message, seconds = process.lines[-2:]
    assert f"data.dataset: 'someone/something' is not in the cache ({tmp_path}/datasets), and the hub" in message
    assert "data.dataset=json data.data_files=[...], or a directory written by save_to_disk" in message
    assert float(seconds) < 5


@pytest.mark.parametrize("packing", ["concat", "pad", "best_fit"])
def test_a_stream_gives_the_samples_of_the_cache(folder: Path, packing: str) -> None:
    settings: dict[str, Any] = {"packing": packing, "isolate_documents": True, "eval_files": [str(folder / "b.jsonl")]}
    cached = load(option(folder, "a.jsonl", **settings))
    streamed = load(stream(folder, "a.jsonl", **settings))
    for ours, theirs in ((streamed.train, cached.train), (streamed.eval, cached.eval)):
        found, expected = rows_of(ours), all_rows(theirs)
        assert sorted(found) == sorted(expected)
        assert found == expected or packing == "best_fit", "best fit has the longest first"
        assert rows_of(ours) == found, "a second pass"


@pytest.mark.parametrize(
    ("source", "settings"),
    [("files", {"shuffle_buffer": 20}), ("files", {"packing": "best_fit"}), ("saved", {"packing": "pad"})],
)
def test_a_stream_goes_on_exactly_from_anywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("forgather_cli.data.text.token_stream._MANY", 7)  # several chunks
    saved = option(folder, dataset=str(folder / "saved"), streaming=True, **settings)
    assert_goes_on_from_anywhere(lambda: load(saved if source == "saved" else stream(folder, **settings)).train)


def test_a_buffer_shuffles_by_seed_and_epoch(folder: Path) -> None:
    def order(seed: int, epoch: int, size: int) -> list[Any]:
        data = load(stream(folder, shuffle_buffer=size, packing="pad", seq_len=400), seed)
        data.train.set_epoch(epoch)
        return rows_of(data.train)

    plain, shuffled = order(1, 0, 0), order(1, 0, 40)
    assert sorted(plain) == sorted(shuffled)
    assert plain != shuffled
    assert order(1, 0, 40) == shuffled
    assert order(2, 0, 40) != shuffled != order(1, 1, 40)
    assert sorted(shuffled[:40]) == sorted(plain[:40]), "block by block"


def trained(chosen: HfSettings, state: Any = None, **options: Any) -> list[tuple[Any, Any]]:
    return steps_of(load(chosen), state, **options)


def both_ways(chosen: HfSettings, dispatched: Any = None, sharded: Any = None) -> dict[str, list[tuple[Any, Any]]]:
    return {"dispatched": trained(chosen, dispatched), "sharded": trained(chosen, sharded, dispatch=False)}


def test_ranks_share_a_stream_and_go_on_exactly(folder: Path) -> None:
    chosen = stream(folder, shuffle_buffer=8)
    alone = trained(chosen)
    ranks = run_ranks(2, both_ways, chosen)
    assert in_order([rank["dispatched"] for rank in ranks]) == in_order([alone])
    for rank, name in enumerate(("a.jsonl", "b.jsonl")):
        shard = in_order([ranks[rank]["sharded"]])
        own = in_order([trained(stream(folder, name, shuffle_buffer=8), global_batch_size=2)])
        assert shard == own[: len(shard)], "each rank has its own files"
    states = [rank["sharded"][2][1] for rank in ranks]
    again = run_ranks(2, both_ways, chosen, ranks[0]["dispatched"][2][1], states)
    for rank, after in zip(ranks, again, strict=True):
        for way, steps in after.items():
            assert in_order([steps]) == in_order([rank[way][3:]]), way
    on_one = trained(chosen, ranks[0]["dispatched"][2][1])
    assert in_order([on_one]) == in_order([alone[3:]]), "dispatched, another number of ranks goes on too"


def test_workers_divide_the_files_and_go_on_exactly(folder: Path) -> None:
    chosen = stream(folder)
    with_workers = trained(chosen, num_workers=2)
    assert trained(chosen, with_workers[1][1], num_workers=2) == with_workers[2:]
    assert len(in_order([with_workers])) > 40


@pytest.mark.parametrize("layout", ["single", "ddp 2"])
def test_training_goes_on_to_the_last_bit_in_the_middle_of_a_stream(layout: str, folder: Path, tmp_path: Path) -> None:
    """Of chats on one device, of texts on two ranks."""
    write_chats(tmp_path / "chats.jsonl", 60)
    chats = ["data=instruct", f"data.data_files=[{tmp_path}/chats.jsonl]", f"data.eval_files=[{tmp_path}/chats.jsonl]",
             "data.chat_template=chatml", "packing=concat", "seq_len=128"]  # fmt: skip
    texts = ["data=hf", f"data.data_files=[{folder}/a.jsonl,{folder}/b.jsonl]", f"data.eval_files=[{folder}/b.jsonl]",
             "seq_len=32"]  # fmt: skip
    words = ["model=nano", "streaming=true", "shuffle_buffer=16", *(chats if layout == "single" else texts)]
    six = ["max_steps=6", "deterministic=true"]
    whole = train(LAYOUTS[layout], words, tmp_path / "whole", six)
    train(LAYOUTS[layout], words, tmp_path / "rest", [*six, "+callbacks.probe.stop_after=3"])
    rest = train(LAYOUTS[layout], words, tmp_path / "rest", six, resume=True)
    assert len(whole.losses) == 6
    assert (rest.losses, rest.norms) == (whole.losses[3:], whole.norms[3:])

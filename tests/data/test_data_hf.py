"""Datasets of the ``datasets`` library, as texts and as chats: through the token cache and as streams."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chats import conversation, write_chats, write_lines, write_tokenizer
from hf_models import train
from parity import LAYOUTS
from ranks import run_ranks
from streams import all_rows, assert_goes_on_from_anywhere, in_order, rows_of, steps_of, write_dataset

from forgather_cli.config.schema import HfSettings, InstructSettings, TextSettings
from forgather_cli.data.build import load_data, source_of
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import DataError

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


def load(chosen: HfSettings | InstructSettings | TextSettings, seed: int = 1) -> DataSplits:
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
    assert source_of(option(folder, "a.jsonl")).counts() is None
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


@pytest.mark.full
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


_OFFLINE = """
import time
from forgather_cli.config.schema import HfSettings
from forgather_cli.data.build import load_data
from forgather_cli.errors import DataError
slept = []
time.sleep = slept.append
try:
    load_data(HfSettings(dataset="someone/something"), seed=0)
except DataError as error:
    print(error)
    print(slept)
"""


def test_a_hub_name_without_network(tmp_path: Path) -> None:
    """At once, and says how to point at local files."""
    proxies = {key: "" for key in os.environ if key.lower().endswith("_proxy")}
    nobody_listens = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", **proxies}
    fresh = [sys.executable, "-c", _OFFLINE]  # no fork: the libraries read the environment when they are imported
    done = subprocess.run(fresh, env={**os.environ, **nobody_listens}, capture_output=True, text=True, check=True)
    message, slept = done.stdout.splitlines()[-2:]
    assert "data.dataset: 'someone/something' (no directory here) is not in the cache" in message
    assert f"({tmp_path}/datasets), and the hub" in message
    assert "data.dataset=json data.data_files=[...], or a directory written by save_to_disk" in message
    assert slept == "[]", "by itself the library tries six times, with pauses"


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
    [
        ("files", {"shuffle_buffer": 20}), ("files", {"packing": "best_fit"}), ("saved", {"packing": "pad"}),
        ("chats", {"shuffle_buffer": 20}), ("chats", {"shuffle_buffer": 20, "packing": "pad"}),
    ],
)  # fmt: skip
def test_a_stream_goes_on_exactly_from_anywhere(
    folder: Path, talks: Path, monkeypatch: pytest.MonkeyPatch, source: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("forgather_cli.data.text.token_stream._MANY", 7)  # several chunks
    saved = option(folder, dataset=str(folder / "saved"), streaming=True, **settings)
    opened = {"files": lambda: load(stream(folder, **settings)).train, "saved": lambda: load(saved).train,
              "chats": lambda: stream_chats(talks, **settings).train}  # fmt: skip
    assert_goes_on_from_anywhere(opened[source])


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


CALLS = CHATML.replace(
    "message['content'] +",
    "(message['content'] or '') + (message['tool_calls'] | tojson if message['tool_calls'] else '') +",
)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 conversations, some with calls whose arguments have different names (a table's type has all of them), and a
    tokenizer."""
    where, found = tmp_path_factory.mktemp("chats"), []
    for number in range(60):
        messages: list[dict[str, Any]] = [*conversation(number)]
        if number % 5 == 0:
            arguments = {"x": number} if number % 2 else {"word": f"w{number}"}
            call = {"type": "function", "function": {"name": "move", "arguments": arguments}}
            messages += [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [call]}]
        found.append({"messages": messages, "id": number})
    write_dataset(where, found, 40)
    write_tokenizer(where / "tokenizer", CALLS)
    (where / "calls.jinja").write_text(CALLS)
    return where


def load_chats(folder: Path, **settings: Any) -> DataSplits:
    base: dict[str, Any] = {"tokenizer": str(folder / "tokenizer"), "cache_dir": str(folder / "cache"), "seq_len": 96}
    return load(InstructSettings(**{**base, **settings}))


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_chats_have_the_samples_of_files(talks: Path, packing: str) -> None:
    jsonl, parquet, a, b = (f"{talks}/{name}" for name in ("all.jsonl", "all.parquet", "a.jsonl", "b.jsonl"))
    places: list[dict[str, Any]] = [{"files": [jsonl]}, {"files": [parquet]}, {"data_files": [jsonl]},
                                    {"dataset": "json", "data_files": [a, b]}, {"data_files": [parquet]}]  # fmt: skip
    files, *others, table = (load_chats(talks, packing=packing, eval_fraction=0.2, **place) for place in places)
    own = load_chats(talks, files=[a], eval_files=[b], packing=packing)
    saved = load_chats(talks, dataset=f"{talks}/saved", train_split="train", eval_split="validation", packing=packing)
    for one, other in [(files, each) for each in (*others, table)] + [(own, saved)]:
        assert all_rows(other.train) == all_rows(one.train)
        assert all_rows(other.eval) == all_rows(one.eval)
    assert "null" not in files.tokenizer.decode([i for row in all_rows(table.train) for i in row[-2]])  # type: ignore[union-attr]
    assert (saved.description["dataset"], saved.description["split"]) == (f"{talks}/saved", "train")


def stream_chats(folder: Path, *files: str, **settings: Any) -> DataSplits:
    names = [str(folder / name) for name in files or ("a.jsonl", "b.jsonl")]
    return load_chats(folder, **{"data_files": names, "streaming": True, "packing": "concat", **settings})


@pytest.mark.parametrize("file", ["all.jsonl", "all.parquet"])
@pytest.mark.parametrize(
    "settings",
    [
        {"packing": "concat"},
        {"packing": "concat", "isolate_documents": False, "too_long": "drop", "train_on": "last"},
        {"packing": "pad"},
        {"packing": "pad", "too_long": "drop", "tokenizer": "bytes", "chat_template": "calls.jinja", "seq_len": 400},
    ],
)
def test_a_stream_of_chats_gives_the_samples_of_files(
    talks: Path, monkeypatch: pytest.MonkeyPatch, file: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("forgather_cli.data.text.token_stream._MANY", 7)  # several chunks
    monkeypatch.chdir(talks)
    held_out = [str(talks / f"b.{file.split('.')[1]}")] if file == "all.jsonl" else []
    cached = load_chats(talks, files=[str(talks / file)], eval_files=held_out, eval_fraction=0.0, **settings)
    streamed = stream_chats(talks, file, eval_files=held_out, **settings)
    for _ in range(2):
        assert rows_of(streamed.train) == all_rows(cached.train)
    if held_out:
        assert rows_of(streamed.eval) == all_rows(cached.eval)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_of_chats_are_named_or_left_out_and_keys_that_nothing_reads_refused(
    talks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    question, turn = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Hi"}
    write_lines(tmp_path / "c.jsonl", [{"messages": [turn]}, {"messages": []}, {"messages": [turn]}])
    write_lines(tmp_path / "d.jsonl", [{"messages": [question, turn], "passage": "It was built then."}])

    def samples(name: str, **settings: Any) -> list[Any]:
        held_out = {} if streaming else {"eval_fraction": 0.0}
        where = {"data_files": [str(tmp_path / name)], "cache_dir": str(tmp_path), "streaming": streaming}
        return list(load_chats(talks, packing="pad", **where, **held_out, **settings).train)

    place = r"the stream .*:2" if streaming else r"c\.jsonl \(train\):1"
    with pytest.raises(DataError, match=rf"{place}: 'messages' must be a list .*on_bad_row=skip"):
        samples("c.jsonl")
    assert len(samples("c.jsonl", on_bad_row="skip")) == 2
    assert ("1 rows of the stream no conversation" in caplog.text) is streaming
    with pytest.raises(DataError, match=r"'passage' \(in 1 of 1 rows\).*data\.ignore=\[passage\]"):
        samples("d.jsonl")


def test_a_stream_of_chats_tells_of_markers_and_its_fingerprint_what_is_learned(
    talks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream_chats(talks, tokenizer="bytes", chat_template=str(talks / "calls.jinja"))
    assert "data.add_tokens=true" in caplog.text
    one, other = (stream_chats(talks, train_on=train_on).fingerprint for train_on in ("last", "all"))
    assert one != other


def test_conversations_travel_to_a_data_worker(talks: Path) -> None:
    dataset = stream_chats(talks).train
    for documents in (dataset._documents, pickle.loads(pickle.dumps(dataset._documents))):
        ids, lengths, targets = documents.encoded(list(documents.read(iter([{"messages": conversation(4)}]))))
        assert len(ids) == len(targets) == lengths.sum() > 20

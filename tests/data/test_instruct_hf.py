"""``data=instruct`` of the ``datasets`` library: the ids and targets of chat files, cached and as streams."""

from __future__ import annotations

import json
import pickle
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import chats
import pytest
from chats import conversation
from program import forgather

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.build import cached_token_counts, load_data
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")  # deprecated in torch 2.13, called by torchdata 0.11
CALLS = (
    CHATML.replace("message['content'] +", "(message['content'] or '') + (message['tool_calls'] | tojson if "
                   "message['tool_calls'] else '') +")
)  # fmt: skip


def records() -> list[dict[str, Any]]:
    """60 conversations, some with calls whose arguments have different names: a table's type has all of them."""
    found: list[dict[str, Any]] = []
    for number in range(60):
        messages: list[dict[str, Any]] = [*conversation(number)]
        if number % 5 == 0:
            arguments = {"x": number} if number % 2 else {"word": f"w{number}"}
            call = {"type": "function", "function": {"name": "move", "arguments": arguments}}
            messages += [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [call]}]
        found.append({"messages": messages, "id": number})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jsonl files, a parquet file of the same records, a directory that save_to_disk wrote, a tokenizer."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = tmp_path_factory.mktemp("chats")
    rows = records()
    chats.write_lines(where / "all.jsonl", rows)
    chats.write_lines(where / "a.jsonl", rows[:40])
    chats.write_lines(where / "b.jsonl", rows[40:])
    pq.write_table(pa.Table.from_pylist(rows), where / "all.parquet")
    datasets.disable_progress_bars()
    datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows[:40]), validation=datasets.Dataset.from_list(rows[40:])
    ).save_to_disk(where / "saved")
    chats.write_tokenizer(where / "tokenizer", CALLS)
    (where / "calls.jinja").write_text(CALLS)
    return where


def option(folder: Path, **settings: Any) -> InstructSettings:
    base: dict[str, Any] = {"tokenizer": str(folder / "tokenizer"), "cache_dir": str(folder / "cache"), "seq_len": 96}
    return InstructSettings(**{**base, **settings})


def load(folder: Path, **settings: Any) -> DataSplits:
    return load_data(option(folder, **settings), seed=1)


def rows_of(samples: Any) -> list[list[Any]]:
    """Every tensor of every sample, as lists."""
    return [[sample[key].tolist() for key in sorted(sample)] for sample in samples]


def all_rows(dataset: Any) -> list[list[Any]]:
    return rows_of(dataset[i] for i in range(len(dataset)))


# ---------------------------------------------------------------------------------------------------- through the cache


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_the_samples_are_those_of_files(folder: Path, packing: str) -> None:
    settings: dict[str, Any] = {"packing": packing, "eval_fraction": 0.2}
    files = load(folder, files=[str(folder / "all.jsonl")], **settings)
    others = [
        load(folder, files=[str(folder / "all.parquet")], **settings),
        load(folder, data_files=[str(folder / "all.jsonl")], **settings),
        load(folder, data_files=[str(folder / "all.parquet")], **settings),
        load(folder, dataset="json", data_files=[str(folder / "a.jsonl"), str(folder / "b.jsonl")], **settings),
        load(folder, dataset=str(folder / "saved"), train_split="train", eval_split="validation", packing=packing),
    ]
    for other in others[:-1]:
        assert all_rows(other.train) == all_rows(files.train)
        assert all_rows(other.eval) == all_rows(files.eval)
    own = load(folder, files=[str(folder / "a.jsonl")], eval_files=[str(folder / "b.jsonl")], packing=packing)
    assert all_rows(others[-1].train) == all_rows(own.train)
    assert all_rows(others[-1].eval) == all_rows(own.eval)
    assert "null" not in files.tokenizer.decode([i for row in all_rows(others[2].train) for i in row[-2]])  # type: ignore[union-attr]
    description = others[-1].description
    assert (description["dataset"], description["split"]) == (str(folder / "saved"), "train")


def test_the_fingerprint_is_that_of_the_rows(folder: Path) -> None:
    chosen = {"data_files": [str(folder / "all.parquet")]}
    one = load(folder, **chosen)
    assert load(folder, **chosen).fingerprint == one.fingerprint
    assert load(folder, data_files=[str(folder / "a.jsonl")]).fingerprint != one.fingerprint
    assert load(folder, **chosen, train_split="train[:50%]").description["train_documents"] < 31
    assert cached_token_counts(option(folder, **chosen)) is None


def test_bad_rows_are_named_or_skipped(folder: Path, tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "Hi"}
    path = chats.write_lines(tmp_path / "c.jsonl", [{"messages": [turn]}, {"messages": []}, {"messages": [turn]}])
    with pytest.raises(DataError, match=r"c\.jsonl \(train\):1: 'messages' must be a list .*on_bad_row=skip"):
        load(folder, data_files=[str(path)], cache_dir=str(tmp_path))
    data = load(folder, data_files=[str(path)], cache_dir=str(tmp_path), on_bad_row="skip", eval_fraction=0.0)
    assert data.description["train_documents"] == 2
    question = {"role": "user", "content": "Why?"}
    path = chats.write_lines(tmp_path / "d.jsonl", [{"messages": [question, turn], "passage": "It was built then."}])
    with pytest.raises(DataError, match=r"'passage' \(in 1 of 1 rows\).*data\.ignore=\[passage\]"):
        load(folder, data_files=[str(path)], cache_dir=str(tmp_path))


def test_settings_that_contradict_each_other() -> None:
    def mistakes(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(None, ["data=instruct", *overrides])
        return str(caught.value)

    assert "files: data=instruct reads chat files, or a dataset" in mistakes()
    assert "dataset: nothing reads it with files=[a.jsonl]; leave files out" in mistakes(
        "data.files=[a.jsonl]", "data.dataset=x"
    )
    assert "train_split: nothing reads it with files=" in mistakes("data.files=[a.jsonl]", "train_split=b")
    assert "eval_files: go with files or data_files" in mistakes("dataset=x", "eval_files=[a.json]")
    assert "shuffle_buffer: nothing reads it with streaming=false" in mistakes("dataset=x", "shuffle_buffer=5")
    streams = ["dataset=x", "streaming=true"]
    assert "packing: best_fit" in mistakes(*streams)
    assert "eval_fraction: nothing reads it with streaming=true" in mistakes(
        *streams, "packing=pad", "eval_fraction=0.1"
    )
    load_config(None, ["data=instruct", *streams, "packing=concat", "trainer=ddp", "dispatch_batches=false"])


# ------------------------------------------------------------------------------------------------------------- streams


def stream(folder: Path, *files: str, **settings: Any) -> DataSplits:
    names = [str(folder / name) for name in files or ("a.jsonl", "b.jsonl")]
    return load(folder, **{"data_files": names, "streaming": True, "packing": "concat", **settings})


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
def test_a_stream_gives_the_samples_of_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("forgather_cli.data.text.token_stream._MANY", 7)  # several chunks
    monkeypatch.chdir(folder)
    held_out = [str(folder / f"b.{file.split('.')[1]}")] if file == "all.jsonl" else []
    cached = load(folder, files=[str(folder / file)], eval_files=held_out, eval_fraction=0.0, **settings)
    streamed = stream(folder, file, eval_files=held_out, **settings)
    assert rows_of(streamed.train) == all_rows(cached.train)
    assert rows_of(streamed.train) == all_rows(cached.train), "a second pass"
    if held_out:
        assert rows_of(streamed.eval) == all_rows(cached.eval)


@pytest.mark.parametrize("settings", [{}, {"shuffle_buffer": 20}, {"packing": "pad"}])
@pytest.mark.parametrize("source", ["files", "saved"])
def test_a_stream_goes_on_exactly_from_anywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("forgather_cli.data.text.token_stream._MANY", 7)
    named = {"dataset": str(folder / "saved"), "data_files": []} if source == "saved" else {}

    def opened() -> Any:
        dataset = stream(folder, **named, **settings).train
        dataset.set_epoch(3)
        return dataset

    dataset = opened()
    expected, states = [], [dataset.state_dict()]
    for sample in dataset:
        expected += rows_of([sample])
        states.append(dataset.state_dict())
    assert len(expected) > 20
    for done in (0, 1, 6, 17, len(expected) - 1, len(expected)):
        again = opened() if done == 6 else dataset
        again.set_epoch(3)
        again.load_state_dict(states[done])
        assert rows_of(again) == expected[done:]
    assert rows_of(dataset) == expected, "a pass after one that was gone on with begins at the beginning"


def test_a_stream_says_what_it_leaves_out_and_refuses_what_files_would(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turn = {"role": "assistant", "content": "Hi"}
    bad = chats.write_lines(tmp_path / "c.jsonl", [{"messages": [turn]}, {"messages": []}, {"messages": [turn]}])
    with pytest.raises(DataError, match=r"the stream .*:2: 'messages' must be a list .*on_bad_row=skip"):
        list(stream(tmp_path, bad.name, tokenizer=str(folder / "tokenizer")).train)
    left = stream(tmp_path, bad.name, tokenizer=str(folder / "tokenizer"), on_bad_row="skip", packing="pad")
    assert len(list(left.train)) == 2
    assert "1 rows of the stream no conversation" in caplog.text
    question = {"role": "user", "content": "Why?"}
    chats.write_lines(tmp_path / "d.jsonl", [{"messages": [question, turn], "passage": "It was built then."}])
    with pytest.raises(DataError, match=r"'passage' \(in 1 of 1 rows\).*data\.ignore=\[passage\]"):
        stream(tmp_path, "d.jsonl", tokenizer=str(folder / "tokenizer"))
    caplog.clear()
    stream(folder, tokenizer="bytes", chat_template=str(folder / "calls.jinja"))
    assert "data.add_tokens=true" in caplog.text
    one, other = (stream(folder, train_on=train_on).fingerprint for train_on in ("last", "all"))
    assert one != other


def test_documents_travel_to_a_data_worker(folder: Path) -> None:
    dataset = stream(folder).train
    texts = [{"messages": conversation(4)}]
    again = pickle.loads(pickle.dumps(dataset._documents))
    for documents in (dataset._documents, again):
        ids, lengths, targets = documents.encoded(list(documents.read(iter(texts))))
        assert len(ids) == len(targets) == lengths.sum() > 20


def test_data_workers_divide_the_files_and_go_on_exactly(folder: Path) -> None:
    def steps(state: Any = None) -> list[tuple[Any, Any]]:
        given: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "seed": 1, "num_workers": 2}
        loader = TrainLoader(stream(folder, shuffle_buffer=8).train, rank=0, size=1, data_ranks=None, **given)
        if state is not None:
            loader.load_state_dict(state)
        return [([b["labels"].tolist() for b in step.microbatches], loader.state_dict()) for step in islice(loader, 9)]

    whole = steps()
    assert steps(whole[1][1])[: len(whole) - 2] == whole[2:]
    assert len(whole) > 5


@pytest.mark.usefixtures("one_thread")
def test_training_on_a_stream_goes_on_exactly(folder: Path, tmp_path: Path) -> None:
    words = [
        "model=nano", "hidden_size=32", "data=instruct", f"data.data_files=[{folder}/a.jsonl,{folder}/b.jsonl]",
        "streaming=true", "packing=concat", f"data.tokenizer={folder}/tokenizer", "seq_len=96", "device=cpu",
        "precision=fp32", "callbacks=minimal", "max_steps=6", "save_steps=3", "global_batch_size=4",
        "async_save=false", "shuffle_buffer=10", "eval_strategy=no", "warmup_steps=1", "logging_steps=1",
    ]  # fmt: skip

    def losses(run: Path) -> list[float]:
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    assert forgather("train", *words, f"output_dir={tmp_path}/whole") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(RunDir(tmp_path / "half").checkpoint(6))
    (tmp_path / "half" / "metrics.jsonl").unlink()
    assert forgather("resume", str(tmp_path / "half")) == 0
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")[3:]

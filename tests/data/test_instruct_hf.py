"""``data=instruct`` of the ``datasets`` library: the ids and targets of chat files, cached and as streams."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import chats
import pytest
from chats import conversation
from streams import all_rows, assert_goes_on_from_anywhere, rows_of, write_dataset

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")  # deprecated in torch 2.13, called by torchdata 0.11
CALLS = CHATML.replace(
    "message['content'] +",
    "(message['content'] or '') + (message['tool_calls'] | tojson if message['tool_calls'] else '') +",
)


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
    """The records, and a tokenizer."""
    where = tmp_path_factory.mktemp("chats")
    write_dataset(where, records(), 40)
    chats.write_tokenizer(where / "tokenizer", CALLS)
    (where / "calls.jinja").write_text(CALLS)
    return where


def option(folder: Path, **settings: Any) -> InstructSettings:
    base: dict[str, Any] = {"tokenizer": str(folder / "tokenizer"), "cache_dir": str(folder / "cache"), "seq_len": 96}
    return InstructSettings(**{**base, **settings})


def load(folder: Path, **settings: Any) -> DataSplits:
    return load_data(option(folder, **settings), seed=1)


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_the_samples_are_those_of_files(folder: Path, packing: str) -> None:
    jsonl, parquet, a, b = (f"{folder}/{name}" for name in ("all.jsonl", "all.parquet", "a.jsonl", "b.jsonl"))
    places: list[dict[str, Any]] = [{"files": [jsonl]}, {"files": [parquet]}, {"data_files": [jsonl]},
                                    {"dataset": "json", "data_files": [a, b]}, {"data_files": [parquet]}]  # fmt: skip
    files, *others, table = (load(folder, packing=packing, eval_fraction=0.2, **place) for place in places)
    own = load(folder, files=[a], eval_files=[b], packing=packing)
    saved = load(folder, dataset=f"{folder}/saved", train_split="train", eval_split="validation", packing=packing)
    for one, other in [(files, each) for each in (*others, table)] + [(own, saved)]:
        assert all_rows(other.train) == all_rows(one.train)
        assert all_rows(other.eval) == all_rows(one.eval)
    assert "null" not in files.tokenizer.decode([i for row in all_rows(table.train) for i in row[-2]])  # type: ignore[union-attr]
    assert (saved.description["dataset"], saved.description["split"]) == (f"{folder}/saved", "train")


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
    for _ in range(2):
        assert rows_of(streamed.train) == all_rows(cached.train)
    if held_out:
        assert rows_of(streamed.eval) == all_rows(cached.eval)


@pytest.mark.parametrize("packing", ["concat", "pad"])
def test_a_stream_goes_on_exactly_from_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    monkeypatch.setattr("forgather_cli.data.text.token_stream._MANY", 7)
    assert_goes_on_from_anywhere(lambda: stream(folder, packing=packing, shuffle_buffer=20).train)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_are_named_or_left_out_and_keys_that_nothing_reads_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    question, turn = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Hi"}
    chats.write_lines(tmp_path / "c.jsonl", [{"messages": [turn]}, {"messages": []}, {"messages": [turn]}])
    chats.write_lines(tmp_path / "d.jsonl", [{"messages": [question, turn], "passage": "It was built then."}])

    def samples(name: str, **settings: Any) -> list[Any]:
        held_out = {} if streaming else {"eval_fraction": 0.0}
        where = {"data_files": [str(tmp_path / name)], "cache_dir": str(tmp_path), "streaming": streaming}
        return list(load(folder, packing="pad", **where, **held_out, **settings).train)

    place = r"the stream .*:2" if streaming else r"c\.jsonl \(train\):1"
    with pytest.raises(DataError, match=rf"{place}: 'messages' must be a list .*on_bad_row=skip"):
        samples("c.jsonl")
    assert len(samples("c.jsonl", on_bad_row="skip")) == 2
    assert ("1 rows of the stream no conversation" in caplog.text) is streaming
    with pytest.raises(DataError, match=r"'passage' \(in 1 of 1 rows\).*data\.ignore=\[passage\]"):
        samples("d.jsonl")


def test_a_stream_tells_of_markers_and_its_fingerprint_what_is_learned(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
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

"""``data=instruct`` of the ``datasets`` library: the ids and targets of chat files, cached and as streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chats
import pytest
from chats import conversation

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.build import cached_token_counts, load_data
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import ConfigError, DataError

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

"""``data=hf``: datasets of the ``datasets`` library through the token cache and as streams that go on exactly."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import HfSettings, TextSettings
from forgather_cli.data.build import cached_token_counts, load_data
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.loader import EvalLoader, TrainLoader
from forgather_cli.data.splits import DataSplits
from forgather_cli.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")  # deprecated in torch 2.13, called by torchdata 0.11
SEQ_LEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jsonl files of 90 documents in all, a parquet file of the same, and a directory that save_to_disk wrote."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = tmp_path_factory.mktemp("hf")
    rows = [{"text": f"Document {i} says " + "word " * (i * 7 % 23), "n": i} for i in range(90)]
    for name, part in (("a", rows[:50]), ("b", rows[50:])):
        (where / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    pq.write_table(pa.Table.from_pylist(rows), where / "all.parquet")
    datasets.disable_progress_bars()
    datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows[:70]), validation=datasets.Dataset.from_list(rows[70:])
    ).save_to_disk(where / "saved")
    return where


def option(folder: Path, *files: str, **settings: Any) -> HfSettings:
    names = [str(folder / name) for name in files]
    base = {"data_files": names, "cache_dir": str(folder / "cache"), "seq_len": SEQ_LEN}
    return HfSettings(**{**base, **settings})


def stream(folder: Path, *files: str, **settings: Any) -> HfSettings:
    return option(folder, *(files or ("a.jsonl", "b.jsonl")), **{"streaming": True, **settings})


def load(chosen: HfSettings | TextSettings, seed: int = 1) -> DataSplits:
    return load_data(chosen, seed=seed)


def rows_of(samples: Any) -> list[list[list[int]]]:
    """Every tensor of every sample, as lists."""
    return [[sample[key].tolist() for key in sorted(sample)] for sample in samples]


def all_rows(dataset: Any) -> list[list[list[int]]]:
    return rows_of(dataset[i] for i in range(len(dataset)))


# -------------------------------------------------------------------------------------------------- through the cache


def test_local_files_give_the_samples_of_data_text(folder: Path) -> None:
    settings: dict[str, Any] = {"eval_fraction": 0.2, "isolate_documents": True}
    files = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    text = load(TextSettings(files=files, cache_dir=str(folder / "cache"), seq_len=SEQ_LEN, **settings))
    for names in (("a.jsonl", "b.jsonl"), ("all.parquet",)):
        data = load(option(folder, *names, **settings))
        assert all_rows(data.train) == all_rows(text.train)
        assert all_rows(data.eval) == all_rows(text.eval)
    assert data.description["train_documents"] + data.description["eval_documents"] == 90
    assert (data.description["type"], data.description["split"]) == ("hf", "train")
    assert (folder / "cache" / "datasets").is_dir(), "what the library makes of local files is in our cache"


def test_the_fingerprint_is_that_of_the_content(folder: Path) -> None:
    one = load(option(folder, "all.parquet"))
    other = load(option(folder, "a.jsonl", "b.jsonl"))
    assert one.fingerprint == other.fingerprint == load(option(folder, "all.parquet")).fingerprint
    assert load(option(folder, "a.jsonl")).fingerprint != one.fingerprint
    assert cached_token_counts(option(folder, "a.jsonl")) is None


def test_other_content_of_the_same_size_and_time_is_read_anew(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.jsonl", str(tmp_path / "cache")
    fingerprints = set()
    for text in ("one", "two"):
        path.write_text((json.dumps({"text": text * 20}) + "\n") * 30)
        os.utime(path, (1e9, 1e9))
        fingerprints.add(load(option(tmp_path, "a.jsonl", cache_dir=cache)).fingerprint)
    assert len(fingerprints) == 2


def test_a_saved_directory_its_splits_and_slices(folder: Path) -> None:
    saved = option(folder, dataset=str(folder / "saved"), eval_split="validation")
    data = load(saved)
    assert (data.description["train_documents"], data.description["eval_documents"]) == (70, 20)
    half = load(option(folder, "all.parquet", train_split="train[:50%]", eval_split="train[50%:]"))
    assert (half.description["train_documents"], half.description["eval_documents"]) == (45, 45)
    own = load(option(folder, "a.jsonl", eval_files=[str(folder / "b.jsonl")], packing="best_fit"))
    assert (own.description["train_documents"], own.description["eval_documents"]) == (50, 40)


def test_bpe_in_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forgather_cli.data.text import read as reading

    chosen = {"tokenizer": "bpe", "bpe_vocab_size": 300}
    alone = load(option(folder, "all.parquet", **chosen))
    monkeypatch.setattr(reading, "PIECE", 1000)
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
        ({"dataset": "json", "data_files": ["BAD"]}, "JSON parse error"),
    ],
)  # fmt: skip
def test_mistakes(
    folder: Path, settings: dict[str, Any], message: str, streaming: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = folder / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text": \n')
    settings = {**settings, "data_files": [str(bad)]} if settings.get("data_files") == ["BAD"] else settings
    with pytest.raises(DataError, match=message):
        next(iter(load(option(folder, "a.jsonl", streaming=streaming, **settings)).train))
    printed = capfd.readouterr()
    assert printed.out + printed.err == "", "neither bars nor log lines of the library"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_null_text_is_a_bad_row(tmp_path: Path, streaming: bool) -> None:
    texts = [f"text {number}" for number in range(9)]
    for name, null in (("with.jsonl", [None]), ("without.jsonl", [])):
        lines = [json.dumps({"text": text}) for text in [*texts, *null, *texts]]
        (tmp_path / name).write_text("\n".join(lines))
    settings: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "streaming": streaming}
    with pytest.raises(DataError, match=r"null.*data\.on_bad_row=skip"):
        rows_of(load(option(tmp_path, "with.jsonl", **settings)).train)
    skipped = load(option(tmp_path, "with.jsonl", on_bad_row="skip", **settings)).train
    assert rows_of(skipped) == rows_of(load(option(tmp_path, "without.jsonl", **settings)).train)


def test_settings_that_contradict_each_other() -> None:
    def mistakes(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(None, ["data=hf", *overrides])
        return str(caught.value)

    assert "dataset: data=hf reads a dataset of the hub, a directory or data_files, got none" in mistakes()
    assert "shuffle_buffer: nothing reads it with streaming=false" in mistakes("dataset=x", "shuffle_buffer=5")
    streams = ["dataset=x", "streaming=true"]
    assert "tokenizer: bpe is trained on a whole corpus" in mistakes(*streams, "tokenizer=bpe")
    assert "eval_fraction: nothing reads it with streaming=true" in mistakes(*streams, "eval_fraction=0.1")
    assert "train_split: a stream is read from its beginning" in mistakes(*streams, "train_split='train[:5%]'")
    assert "eval_files: go with data_files" in mistakes("dataset=x", "eval_files=[a.json]")
    assert "dispatch_batches: nothing reads it with data=hf" in mistakes(
        "dataset=x", "trainer=ddp", "dispatch_batches=false"
    )
    load_config(None, ["data=hf", *streams, "trainer=ddp", "dispatch_batches=false"])


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
    environ = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environ |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}  # nothing listens there
    command = [sys.executable, "-c", _OFFLINE]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    message, seconds = done.stdout.splitlines()
    assert message.startswith(
        f"data.dataset: 'someone/something' is not in the cache ({tmp_path}/datasets), and the hub"
    )
    assert "data.dataset=json data.data_files=[...], or a directory written by save_to_disk" in message
    assert float(seconds) < 5


# ------------------------------------------------------------------------------------------------------------- streams


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
        ("files", {}),
        ("files", {"shuffle_buffer": 20}),
        ("files", {"packing": "best_fit"}),
        ("saved", {"packing": "pad"}),
    ],
)
def test_a_stream_goes_on_exactly_from_anywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr("forgather_cli.data.text.token_stream._MANY", 7)  # several chunks
    chosen = stream(folder, **settings)
    if source == "saved":
        chosen = option(folder, dataset=str(folder / "saved"), streaming=True, **settings)
    whole = load(chosen).train
    whole.set_epoch(3)
    expected = rows_of(whole)
    assert len(expected) > 20
    dataset = load(chosen).train
    dataset.set_epoch(3)
    states = [dataset.state_dict()] + [dataset.state_dict() for _ in dataset]
    for done in (0, 1, 6, 17, len(expected) - 1, len(expected)):
        again = load(chosen).train if done == 6 else dataset
        again.set_epoch(3)
        again.load_state_dict(states[done])
        assert rows_of(again) == expected[done:]
    assert rows_of(dataset) == expected, "a pass after one that was gone on with begins at the beginning"


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


# ------------------------------------------------------------------------------------------------- loaders and training


def trained(chosen: HfSettings, kwargs: dict[str, Any], state: Any = None) -> list[tuple[Any, Any]]:
    """(samples of this rank, position) of each step; ``state``: one for all, or by rank."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if dist.is_initialized():  # the pool's processes are daemons, which may have no children, and would spawn them
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        multiprocessing.set_start_method("fork", force=True)
    data_ranks = DataRanks(dist.new_group(backend="gloo"), rank, rank) if size > 1 else None
    options = {"global_batch_size": 4, "micro_batch_size": 2, "seed": 1, **kwargs}
    loader = TrainLoader(load(chosen).train, rank=rank, size=size, data_ranks=data_ranks, **options)
    if state is not None:
        loader.load_state_dict(state[rank] if isinstance(state, list) else state)
    return [([b["input_ids"].tolist() for b in step.microbatches], loader.state_dict()) for step in islice(loader, 99)]


def flat(steps: list[tuple[Any, Any]]) -> list[list[int]]:
    return [row for parts, _ in steps for part in parts for row in part]


def in_order(ranks: list[list[tuple[Any, Any]]]) -> list[list[int]]:
    """Samples of all ranks, step by step."""
    return [row for steps in zip(*ranks, strict=True) for step in steps for row in flat([step])]


def both_ways(chosen: HfSettings) -> dict[str, list[tuple[Any, Any]]]:
    return {"dispatched": trained(chosen, {}), "sharded": trained(chosen, {"dispatch": False})}


def go_on(chosen: HfSettings, dispatched: Any, sharded: Any) -> dict[str, list[tuple[Any, Any]]]:
    return {
        "dispatched": trained(chosen, {}, dispatched),
        "sharded": trained(chosen, {"dispatch": False}, sharded),
    }


def test_ranks_share_a_stream_and_go_on_exactly(folder: Path) -> None:
    chosen = stream(folder, shuffle_buffer=8)
    alone = trained(chosen, {})
    ranks = run_ranks(2, both_ways, chosen)
    assert in_order([rank["dispatched"] for rank in ranks]) == flat(alone)
    for rank, name in enumerate(("a.jsonl", "b.jsonl")):
        shard = flat(ranks[rank]["sharded"])
        own = flat(trained(stream(folder, name, shuffle_buffer=8), {"global_batch_size": 2}))
        assert shard == own[: len(shard)], "each rank has its own files"
    states = [rank["sharded"][2][1] for rank in ranks]
    again = run_ranks(2, go_on, chosen, ranks[0]["dispatched"][2][1], states)
    for rank, after in zip(ranks, again, strict=True):
        assert {way: flat(steps) for way, steps in after.items()} == {way: flat(rank[way][3:]) for way in rank}
    on_one = trained(chosen, {}, ranks[0]["dispatched"][2][1])
    assert flat(on_one) == flat(alone[3:]), "dispatched, another number of ranks goes on too"


def test_workers_divide_the_files_and_go_on_exactly(folder: Path) -> None:
    chosen = stream(folder)
    with_workers = trained(chosen, {"num_workers": 2})
    assert trained(chosen, {"num_workers": 2}, with_workers[1][1]) == with_workers[2:]
    assert len(flat(with_workers)) > 40


def test_an_evaluation_of_a_stream_counts_every_token_once(folder: Path) -> None:
    data = load(stream(folder, "a.jsonl", eval_files=[str(folder / "b.jsonl")]))
    loader = EvalLoader(data.eval, batch_size=3)
    counts = [sum(int((batch["labels"] != -100).sum()) for batch in loader) for _ in range(2)]
    cached = load(option(folder, "b.jsonl", eval_fraction=0.0))
    assert counts == [cached.description["train_tokens"]] * 2


def test_training_goes_on_to_the_last_bit_in_the_middle_of_a_stream(folder: Path, tmp_path: Path) -> None:
    results = run_ranks(1, train_in_parts, folder, tmp_path / "single", "single")
    results += run_ranks(2, train_in_parts, folder, tmp_path / "ddp", "ddp")
    for whole, rest in results:
        assert [step for step, _, _ in whole] == [1, 2, 3, 4, 5, 6]
        assert rest == whole[3:]


def train_in_parts(folder: Path, out: Path, trainer: str) -> tuple[list[Any], list[Any]]:
    """On a rank: (losses and norms of 6 steps, and of a run that goes on from the checkpoint of step 3)."""
    from tiny import training_curve

    from forgather_cli.run_dir import RunDir

    files = ",".join(str(folder / name) for name in ("a.jsonl", "b.jsonl"))
    overrides = [
        "model=nano", "precision=fp32",
        "data=hf", f"data.data_files=[{files}]", "streaming=true", "shuffle_buffer=16", "seq_len=32",
        "callbacks=minimal", "global_batch_size=4", "logging_steps=1", "eval_strategy=no", "deterministic=true",
        "+callbacks.json={}", "save_steps=3", f"trainer={trainer}",
    ]  # fmt: skip

    def train(name: str, *more: str) -> list[Any]:
        config = load_config(None, [*overrides, f"output_dir={out / name}", "max_steps=6", *more]).config
        (out / name).mkdir(parents=True, exist_ok=True)
        tiny.train(config, RunDir(out / name))
        return training_curve(out / name)

    try:
        whole = train("whole")
        return whole, train("rest", f"resume_from_checkpoint={out}/whole/checkpoints/step-00000003")
    finally:
        torch.use_deterministic_algorithms(False)

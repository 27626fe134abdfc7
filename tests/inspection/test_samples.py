"""Samples that are shown are those that a step trains on; their documents, and where these come from."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import write_chats, write_lines, write_tokenizer
from paired import SHAPE
from tiny import note_batches

from forgather_cli.config.load import load_config
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text import read as reading
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.inspection.samples import Samples, ShownSample
from forgather_cli.run_dir import RunDir
from forgather_cli.worker import build, read_data

pytestmark = pytest.mark.usefixtures("own_directory")

CHATS = ["data=instruct", "data.files=[chats.jsonl]", "data.chat_template=chatml", "data.add_tokens=false"]
PAIRS = ["data=seq2seq", "data.files=[pairs.jsonl]", *SHAPE]
OWN = '''
import torch

def padded(count):
    """Samples whose last two tokens are padding, as their masks say; the first two are no targets."""
    ids = torch.arange(count * 8).reshape(count, 8) % 250
    labels = ids.clone()
    labels[:, :3], labels[:, 6:] = -100, -100
    mask = (torch.arange(8) < 6).long()
    rows = [{"input_ids": i, "labels": t, "attention_mask": mask} for i, t in zip(ids, labels)]
    return {"train": rows, "tokenizer": "bytes", "seq_len": 8}

def batches(count):
    """Ready batches of two."""
    loader = torch.utils.data.DataLoader(padded(count)["train"], batch_size=2)
    return {"train": loader, "vocab_size": 250, "seq_len": 8}
'''
OPTIONS: dict[str, list[str]] = {
    "bpe, packed": ["data=text", "data.files=[pages.jsonl]", "tokenizer=bpe", "bpe_vocab_size=270", "seq_len=32",
                    "packing=best_fit", "isolate_documents=true"],
    "text": ["data=text", "data.files=[pages.jsonl]", "seq_len=32", "isolate_documents=true"],
    "tokens": ["data=tokens", "data.files=[tokens.npy]", "seq_len=16", "document_separator=9"],
    "hf": ["data=hf", "data.data_files=[pages.jsonl]", "seq_len=32"],
    "hf, streaming": ["data=hf", "data.data_files=[pages.jsonl]", "seq_len=32", "streaming=true", "shuffle_buffer=8",
                      "eval_strategy=no"],
    "instruct": [*CHATS, "seq_len=256"],
    "instruct, new tokens": [*CHATS[:3], "seq_len=64"],
    "instruct, rows": ["data=instruct", "data.data_files=[chats.jsonl]", *CHATS[2:], "seq_len=256"],
    "instruct, streaming": ["data=instruct", "data.data_files=[chats.jsonl]", *CHATS[2:], "seq_len=256",
                            "streaming=true", "packing=pad", "eval_strategy=no"],
    "instruct, one each": [*CHATS, "seq_len=128", "packing=pad", "data.tokenizer=tokenizer"],
    "instruct, concat": [*CHATS, "seq_len=160", "packing=concat", "data.train_on=last"],
    "synthetic": ["data=synthetic", "seq_len=16", "ragged=true"],
    "ul2": ["data=ul2", "source=text", "data.files=[pages.jsonl]", "max_seq_length=96", "max_encoder_length=96",
            "max_decoder_length=64", *SHAPE],
    "seq2seq": [*PAIRS, "max_encoder_length=64", "max_decoder_length=48"],
    "seq2seq, one each": [*PAIRS, "packing=pad", "max_encoder_length=12", "max_decoder_length=8"],
    "own": ["+data._target_=own.padded", "+data.count=32", "eval_strategy=no"],
    "own batches": ["+data._target_=own.batches", "+data.count=32", "eval_strategy=no",
                    "per_device_train_batch_size=2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, None)
    return path


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chats(tmp_path / "chats.jsonl", 40)
    write_lines(tmp_path / "pages.jsonl", [{"text": f"A page, number {n}. " * (1 + n % 4)} for n in range(60)])
    write_lines(tmp_path / "pairs.jsonl", [{"input": f"question {n}", "target": f"answer {n}"} for n in range(40)])
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 11)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "tokenizer").symlink_to(tokenizer)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)


def settings(*words: str) -> Any:
    small = ["hidden_size=32"] if any("qwen3" in word for word in words) else ["model=nano"]
    common = ["global_batch_size=4", "device=cpu", "precision=fp32", "callbacks=minimal", "save_strategy=no",
              "warmup_steps=1", "max_steps=1", "seed=3"]  # fmt: skip
    return load_config("default", [*small, *common, *words]).config


def samples_of(*words: str, split: Any = "train") -> Samples:
    config = settings(*words)
    return Samples(config, read_data(config), split)


@pytest.mark.parametrize("kind", sorted(OPTIONS.keys() - {"hf", "instruct, rows"}))
def test_what_is_shown_is_what_a_step_trains_on(kind: str, tmp_path: Path) -> None:
    """Two are left out, whose datasets are those of text and instruct."""
    config = settings(*OPTIONS[kind])
    samples = Samples(config, read_data(config), "train")
    shown = list(islice(samples.read(), 4))
    (tmp_path / "run").mkdir()
    trainer = build(config, RunDir(tmp_path / "run"), {})
    steps = note_batches(trainer.strategy)
    trainer.train()
    rows = [row for batch in steps[0] for row in zip(batch["input_ids"].tolist(), batch["labels"], strict=True)]
    first = 0 if "decoder_input_ids" in steps[0][0] else 1
    assert [each.index for each in shown] == [0, 1, 2, 3]
    for sample, (ids, labels) in zip(shown, rows, strict=True):
        assert len(sample.targets) == len(sample.pieces) == len(sample.documents) == len(sample.ids)
        wanted = [label for label in labels[first:].tolist() if label != -100]
        assert [number for number, is_target in zip(sample.ids, sample.targets, strict=True) if is_target] == wanted
        assert wanted
        if sample.encoder is None:
            assert sample.ids == ids
            assert sample.targets[0] is False
        else:
            assert ids[: len(sample.encoder.ids)] == sample.encoder.ids
            assert set(ids[len(sample.encoder.ids) :]) <= {256}  # padding
    assert next(samples.read(2)) == shown[2]


def test_the_first_token_of_a_document_is_a_target_where_the_one_before_may_predict_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "pages.jsonl", [{"text": "abc"}, {"text": "def"}, {"text": "ghi"}])
    common = ["data=text", "data.files=[pages.jsonl]", "tokenizer=bytes", "seq_len=12", "data.eval_fraction=0"]
    sample = next(samples_of(*common).read())
    assert sample.targets == [False, *[True] * 11]
    isolated = next(samples_of(*common, "isolate_documents=true").read())
    assert isolated.targets == [False, True, True, True] * 3
    assert sample.documents == isolated.documents == [0] * 4 + [1] * 4 + [2] * 4


def test_a_decoder_is_shown_what_it_is_to_write_with_its_end(tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs.jsonl", [{"input": "one", "target": "eins"}])
    words = [*PAIRS, "packing=pad", "max_encoder_length=16"]
    sample = next(samples_of(*words, "max_decoder_length=3").read())
    assert (sample.encoder.pieces, sample.pieces) == (list("one"), list("ein"))
    assert sample.targets == [True] * 3
    assert sample.parts[0].behind == 2  # of it
    assert sample.parts[0].is_cut
    sample = next(samples_of(*words, "max_decoder_length=16").read())
    assert sample.pieces == [*"eins", "<|endoftext|>"]
    assert sample.document()["encoder"] == {"ids": list(b"one"), "pieces": list("one")}
    assert sample.source == f"{tmp_path}/pairs.jsonl:1"


def test_of_a_decoder_tokens_that_are_no_targets_are_those_that_it_reads_next() -> None:
    read = {"input_ids": [7, 8], "decoder_input_ids": [0, 1, 2, 3], "labels": [-100, 2, 3, 4]}
    rows = [{name: torch.tensor(values) for name, values in read.items()}]
    sample = next(Samples(settings("data=synthetic"), DataSplits(rows, None, None, "", 4), "train").read())
    assert (sample.ids, sample.targets) == ([1, 2, 3, 4], [False, True, True, True])
    assert sample.pieces == ["<1>", "<2>", "<3>", "<4>"]
    assert sample.encoder.ids == [7, 8]


def lines(sample: ShownSample) -> list[int]:
    return [part.place[1] or 0 for part in sample.parts if part.place is not None]


@pytest.mark.parametrize("kind", ["text", "bpe, packed", "instruct", "instruct, rows", "hf"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_each_document_comes_from_the_line_that_holds_it(
    kind: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE", 600)  # so that a file has several pieces
    file = tmp_path / f"{'chats' if 'instruct' in kind else 'pages'}.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    count = 0
    for sample in samples_of(*OPTIONS[kind], "data.eval_fraction=0.2", split=split).read():
        for number, line in enumerate(lines(sample)):
            record = records[line if kind in ("hf", "instruct, rows") else line - 1]  # rows of the library, from 0
            wanted = record["text"] if "text" in record else record["messages"][-1]["content"]
            letters = zip(sample.letters, sample.documents, strict=True)
            shown = "".join(text for text, document in letters if document == number).removesuffix("<|endoftext|>")
            part = sample.parts[number]
            if part.before == 0 and part.behind == 0:
                assert wanted in shown
                count += 1
            elif "text" in record and part.before == 0:
                assert wanted.startswith(shown)
    assert count > 1


@pytest.mark.parametrize("kind", ["text", "bpe, packed", "instruct", "seq2seq"])
def test_a_record_is_found_in_every_sample_that_has_any_of_it(kind: str, tmp_path: Path) -> None:
    name = {"instruct": "chats", "seq2seq": "pairs"}.get(kind, "pages")
    samples = samples_of(*OPTIONS[kind], "data.eval_fraction=0.1")
    by_line: dict[int, list[int]] = {}
    for sample in samples.read():
        for line in dict.fromkeys(lines(sample)):
            by_line.setdefault(line, []).append(sample.index)
    for line, indices in list(by_line.items())[:10]:
        assert samples.holding(tmp_path / f"{name}.jsonl", line) == indices
    assert samples.holding(tmp_path / f"{name}.jsonl", None) == sorted({i for each in by_line.values() for i in each})
    [line, *_] = {*range(1, 41)} - by_line.keys()
    with pytest.raises(ConfigError, match="--split eval"):
        samples.holding(tmp_path / f"{name}.jsonl", line)


def test_what_is_cut_is_told_from_what_goes_on_elsewhere() -> None:
    chats = samples_of(*CHATS, "seq_len=70", "packing=pad")
    assert any(sample.parts[0].is_cut and sample.parts[0].behind for sample in chats.read())
    pages = samples_of("data=text", "data.files=[pages.jsonl]", "tokenizer=bytes", "seq_len=32", "packing=pad")
    parts = [sample.parts[0] for sample in pages.read()]
    assert any(part.behind and not part.is_cut for part in parts)
    assert any(part.before for part in parts)


@pytest.mark.parametrize(("kind", "count"), [("synthetic", 12), ("hf, streaming", 0)])
def test_a_number_that_no_sample_has_is_an_error_that_says_how_many_there_are(kind: str, count: int) -> None:
    samples = samples_of(*OPTIONS[kind], *(["num_samples=12"] if kind == "synthetic" else []))
    count = count or len(list(samples.read()))
    assert len(list(samples.read(count - 1))) == 1
    with pytest.raises(DataError, match=rf"--sample.* {count} samples"):
        next(samples.read(count))


@pytest.mark.parametrize("kind", ["tokens", "hf", "instruct, rows"])
def test_a_line_of_data_that_nobody_has_noted_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--from.*--sample"):
        samples_of(*OPTIONS[kind]).holding(tmp_path / "pages.jsonl", 1)


def test_a_tokenizer_directory_marks_its_special_tokens() -> None:
    sample = next(samples_of(*OPTIONS["instruct, one each"]).read())
    special = {p for p, is_special in zip(sample.pieces, sample.special, strict=True) if is_special}
    assert special == {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}

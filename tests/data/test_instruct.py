"""Chat data: conversations to tokens, targets and packed samples, compared with transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import chats
import numpy as np
import pytest
import torch
import transformers
from chats import conversation, write_chats, write_lines
from parity import LAYOUTS, assert_parity, train

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.build import load_data, source_of
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.packing import in_turn
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import DataError
from forgather_cli.inference.source import load_source
from forgather_cli.labels import LENGTHS
from forgather_cli.loss.model_io import model_kwargs

WITHOUT_BLOCKS = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
NONE = -100


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template has generation blocks."""
    path = tmp_path_factory.mktemp("tokenizer")
    chats.write_tokenizer(path, CHATML)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl", 30)


def option(corpus: Path, directory: Path | str, **settings: Any) -> InstructSettings:
    defaults: dict[str, Any] = {"seq_len": 200, "eval_fraction": 0.0}
    cache = str(corpus.parent / "cache")
    return InstructSettings(files=[str(corpus)], tokenizer=str(directory), cache_dir=cache, **{**defaults, **settings})


def load(corpus: Path, directory: Path | str, **settings: Any) -> DataSplits:
    return load_data(option(corpus, directory, **settings), seed=0)


def samples(dataset: Any) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each sample of one conversation, without the padding."""
    found = []
    for index in range(len(dataset)):
        ids, labels = dataset[index]["input_ids"].tolist(), dataset[index]["labels"].tolist()
        end = len(ids) - next((n for n, i in enumerate(reversed(ids)) if i != 0), 0)
        assert set(labels[end:]) <= {NONE}
        found.append((ids[:end], labels[:end]))
    return found


def expected(directory: Path, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Ids and labels by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = made["input_ids"], made["assistant_masks"]
    return ids, [i if inside else NONE for i, inside in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("template", [None, "without blocks"])
def test_ids_and_targets_are_those_of_transformers(
    corpus: Path, directory: Path, template: str | None, tmp_path: Path
) -> None:
    if template:
        (tmp_path / "own.jinja").write_text(WITHOUT_BLOCKS)
        template = str(tmp_path / "own.jinja")
    data = load(corpus, directory, packing="pad", chat_template=template).train
    assert set(data.__getitems__([0, 1])) == {"input_ids", "labels", LENGTHS}, "masks would only cost time"
    assert samples(data) == [expected(directory, conversation(number)) for number in range(30)]


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_packings_hold_every_conversation_once(corpus: Path, directory: Path, packing: str) -> None:
    data = load(corpus, directory, packing=packing, seq_len=256)
    alone = [expected(directory, conversation(number)) for number in range(30)]
    batch = data.train.__getitems__(list(range(len(data.train))))
    found = []
    keys = ("input_ids", "labels", "document_ids", "position_ids")
    for ids, labels, documents, positions in zip(*(batch[key] for key in keys), strict=True):
        for document in range(int(documents.max()) + 1):
            where = documents == document
            assert positions[where].tolist() == list(range(int(where.sum())))
            if (labels[where] != NONE).any():
                found.append((ids[where].tolist(), labels[where].tolist()))
    if packing == "best_fit":
        assert sorted(found) == sorted(alone)
        assert len(data.train) < 16
    ids = batch["input_ids"].flatten()
    assert sorted(ids[ids != 0].tolist()) == sorted(i for each, _ in alone for i in each)
    lost = 3 if packing == "concat" else 0  # targets at the start of a row that nothing there predicts
    num_targets = int((batch["labels"][:, 1:] != NONE).sum())
    assert num_targets <= sum(label != NONE for _, labels in alone for label in labels) <= num_targets + lost


def test_rows_in_turn() -> None:
    starts, lengths, rows = in_turn(np.array([10, 20, 40]), np.array([3, 9, 4]), 5)
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == [
        (10, 3), (20, 2), (22, 5), (27, 2), (40, 3), (43, 1)
    ]  # fmt: skip
    assert rows.tolist() == [0, 2, 3, 5, 6]
    assert [len(part) for part in in_turn(np.zeros(0, np.int64), np.zeros(0, np.int64), 5)] == [0, 0, 1]


def test_loss_of_packed_rows_is_that_of_transformers_on_each_conversation(
    corpus: Path, directory: Path, tmp_path: Path
) -> None:
    """Of a model whose rotations depend on the length."""
    tokenizer = load_tokenizer(str(directory))
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    theirs = chats.write_model(tmp_path / "model", "llama", tokenizer.vocab_size, rope_parameters=scaling)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((directory / name).read_bytes())
    data = load(corpus, directory, seq_len=256)
    batch = data.train.__getitems__(list(range(len(data.train))))
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = load_source(tmp_path / "model", device="cpu").model(**model_kwargs(batch))
        packed = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        sums, count = 0.0, 0
        for number in range(30):
            ids, wanted = (torch.tensor([each]) for each in expected(directory, conversation(number)))
            targets = int((wanted[:, 1:] != NONE).sum())
            sums += float(theirs(input_ids=ids, labels=wanted).loss) * targets
            count += targets
    assert count == int((labels[:, 1:] != NONE).sum())
    assert float(packed) == pytest.approx(sums / count, rel=1e-5)


def test_long_conversations_are_cut_or_left_out_and_counted(
    corpus: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = [expected(directory, conversation(number)) for number in range(30)]
    fits = [ids for ids, _ in alone if len(ids) <= 60]
    cut = [ids[:60] for ids, labels in alone if len(ids) > 60 and set(labels[1:60]) != {NONE}]
    empty = 30 - len(fits) - len(cut)
    assert cut
    with caplog.at_level(logging.WARNING):
        data = load(corpus, directory, seq_len=60, packing="pad")
    assert sorted(ids for ids, _ in samples(data.train)) == sorted(fits + cut)
    said = f"of 30 train conversations {len(cut)} longer, cut (data.too_long=cut)"
    assert said in caplog.text
    assert data.description["left_out"].startswith(said)
    assert (f"{empty} without a target in it, left out" in caplog.text) is (empty > 0)
    dropped = load(corpus, directory, seq_len=60, packing="pad", too_long="drop")
    assert sorted(ids for ids, _ in samples(dropped.train)) == sorted(fits)
    assert f"{30 - len(fits)} longer, left out (data.too_long=drop)" in dropped.description["left_out"]
    assert dropped.fingerprint != data.fingerprint
    with pytest.raises(DataError, match=r"data\.seq_len: every conversation is longer than 4 tokens, the shortest has"):
        load(corpus, directory, seq_len=4, too_long="drop")
    with pytest.raises(DataError, match=r"data\.seq_len: no conversation has a target within its first 4 tokens, the"):
        load(corpus, directory, seq_len=4)


def test_the_fingerprint_follows_what_changes_samples(corpus: Path, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("A chat\n" + WITHOUT_BLOCKS)
    changes: list[dict[str, Any]] = [
        {}, {"train_on": "last"}, {"seq_len": 97}, {"packing": "concat"}, {"isolate_documents": False},
        {"eval_fraction": 0.5}, {"chat_template": str(tmp_path / "own.jinja")},
    ]  # fmt: skip
    found = [load(corpus, directory, **change).fingerprint for change in changes]
    assert load(corpus, directory).fingerprint == found[0]
    write_chats(corpus, 31)
    found.append(load(corpus, directory).fingerprint)
    assert len(set(found)) == len(found)


def test_counts_are_known_without_reading(corpus: Path, directory: Path) -> None:
    chosen = option(corpus, directory, eval_fraction=0.3)
    assert source_of(chosen).counts() is None
    data = load_data(chosen, seed=0)
    counts = {f"{split}_tokens": data.description[f"{split}_tokens"] for split in ("train", "eval")}
    rows = {"train_samples": len(data.train), "eval_samples": len(data.eval)}
    assert source_of(chosen).counts() == {"vocab_size": data.tokenizer.vocab_size, **counts, **rows}


def test_held_out_conversations(corpus: Path, directory: Path, tmp_path: Path) -> None:
    write_lines(corpus, [{"messages": conversation(number % 20)} for number in range(60)])
    data = load(corpus, directory, eval_fraction=0.3, packing="pad")
    train, held_out = ({tuple(ids) for ids, _ in samples(split)} for split in (data.train, data.eval))
    assert held_out
    assert not train & held_out, "equal conversations stay on one side"
    assert len(train | held_out) == 20
    one = load(write_chats(tmp_path / "one.jsonl", 1), directory, eval_fraction=0.3)
    assert (len(one.train), one.eval) == (1, None)
    two = load(write_chats(tmp_path / "two.jsonl", 2), directory, eval_fraction=0.001)
    assert (len(two.train), len(two.eval)) == (1, 1)


def test_tokens_of_the_template_that_the_tokenizer_lacks_are_named(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chats.write_tokenizer(tmp_path / "poor", None, ["<|endoftext|>", "<|im_end|>"])
    for _ in range(2):  # from the cache too
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(corpus, tmp_path / "poor", chat_template="chatml")
        assert "data.tokenizer: <|im_start|> of the chat template is no token of the tokenizer" in caplog.text
        assert "forgather finalize MODEL DEST --add-tokens FILE" in caplog.text


def test_stages_train_as_one_device_does(directory: Path, tmp_path: Path) -> None:
    corpus = write_chats(tmp_path / "chats.jsonl", 90)
    settings = ("data=instruct", f"data.files=[{corpus}]", f"tokenizer={directory}", f"data.cache_dir={tmp_path}/cache",
                "seq_len=128", "eval_fraction=0.2", "global_batch_size=8", "max_steps=3", "eval_steps=3",
                "warmup_steps=1")  # fmt: skip
    reference = train(LAYOUTS["single"], settings, tmp_path / "single")
    assert len(reference.eval_losses) == 1
    assert_parity(train(LAYOUTS["1F1B 2"], settings, tmp_path / "stages"), reference)

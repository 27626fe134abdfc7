"""Counts of data: what they are for small corpora, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from chats import write_lines
from paired import SHAPE

from forgather_cli.config.load import load_config
from forgather_cli.data.text import read as reading
from forgather_cli.inspection.stats import SourceStats, SplitStats, stats_of
from forgather_cli.worker import read_data

pytestmark = pytest.mark.usefixtures("own_directory")


def counted(*words: str) -> dict[Any, SplitStats]:
    """Of a small model, if ``words`` name none."""
    model = [] if "model=qwen3_encdec" in words else ["model=nano"]
    config = load_config("default", [*model, *words]).config
    told: list[tuple[int, int | None]] = []
    found = stats_of(config, read_data(config), lambda done, total: told.append((done, total)))
    assert told[-1][0] == list(found.values())[-1].samples
    return found


def test_text_by_file_with_the_end_that_is_in_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 40)  # so that there are several pieces
    write_lines(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "ü"}, {"text": "cdef"}])
    write_lines(tmp_path / "b.jsonl", [{"text": "12345678"}] * 3)
    write_lines(tmp_path / "c.jsonl", [{"text": "held out"}])
    words = ["data=text", "data.files=[a.jsonl,b.jsonl]", "data.eval_files=[c.jsonl]", "seq_len=10", "tokenizer=bytes"]
    found = counted(*words)
    train = found["train"]
    assert (train.documents, train.document_tokens) == (6, 3 + 3 + 5 + 27)
    assert (train.samples, train.tokens, train.targets, train.padding) == (3, 30, 27, 0)
    assert train.lengths == [3, 3, 5, 9, 9, 9]
    assert train.quantiles()["median"] == 5
    assert train.sources == {
        str(tmp_path / "a.jsonl"): SourceStats(3, 11, None),
        str(tmp_path / "b.jsonl"): SourceStats(3, 27, None),
    }
    assert train.bytes_per_token == pytest.approx((30 - 5) / 30)  # five ends in the first 30
    assert (found["eval"].tokens, found["eval"].padding) == (9, 1)
    assert found["eval"].bytes_per_token == pytest.approx(8 / 9)
    assert found["eval"].sources == {str(tmp_path / "c.jsonl"): SourceStats(1, 9, None)}


def test_a_document_whose_end_is_held_out_is_of_its_file_in_both_splits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line\n" * 20)
    found = counted("data=text", "data.files=[a.txt]", "data.eval_fraction=0.2", "seq_len=10")
    assert [(each.documents, len(each.sources)) for each in found.values()] == [(1, 1), (1, 1)]
    assert all(each.sources[str(tmp_path / "a.txt")].documents == 1 for each in found.values())


def test_chats_by_file_with_what_is_cut_and_dropped(tmp_path: Path) -> None:
    def chat(question: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    write_lines(tmp_path / "a.jsonl", [chat("q", "yes"), chat("q", "a" * 100), chat("q" * 200, "never")])
    write_lines(tmp_path / "b.jsonl", [chat("q", "no")])
    words = ["data=instruct", "data.files=[a.jsonl,b.jsonl]", "data.eval_fraction=0", "data.chat_template=chatml",
             "data.add_tokens=false", "seq_len=100"]  # fmt: skip
    train = counted(*words)["train"]
    assert (train.cut, train.dropped) == (1, 1)
    assert train.documents == 4
    end = len("<|im_end|>")
    before = len("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    assert train.targets == 3 + end + 2 + end + (100 - before)
    assert [each.targets for each in train.sources.values()] == [3 + 100 + 5 + 3 * end, 2 + end]
    assert counted(*words, "data.too_long=drop")["train"].dropped == 2


def test_pairs_count_both_sides(tmp_path: Path) -> None:
    pairs = [{"input": "one", "target": "eins"}, {"input": "twenty", "target": "zwanzig"}]
    write_lines(tmp_path / "pairs.jsonl", pairs)
    words = ["data=seq2seq", "data.files=[pairs.jsonl]", "data.eval_fraction=0", "max_encoder_length=5",
             "max_decoder_length=8", *SHAPE]  # fmt: skip
    train = counted(*words)["train"]
    assert (train.tokens, train.targets) == (3 + 5 + 5 + 8, 5 + 8)
    assert (train.cut, train.dropped) == (1, 0)
    assert train.bytes_per_token is None or train.bytes_per_token > 0


def test_unknown_tokens_and_text_of_a_tokenizer_whose_ids_do_not_tell_their_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "</s>": 1, "one": 2, "three": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words/tokenizer.json"))
    (tmp_path / "words/tokenizer_config.json").write_text('{"eos_token": "</s>", "unk_token": "<unk>"}')
    write_lines(tmp_path / "a.jsonl", [{"text": "one two three"}, {"text": "two two one"}])
    words = ["data=text", "data.files=[a.jsonl]", "data.eval_fraction=0", "data.tokenizer=words", "seq_len=8"]
    train = counted(*words)["train"]
    assert train.unknown == 3
    assert train.bytes_per_token == len("one three one") / 8


def test_data_without_documents_tell_the_lengths_of_samples(tmp_path: Path) -> None:
    train = counted("data=synthetic", "num_samples=70", "num_eval_samples=0", "seq_len=16", "ragged=true")["train"]
    assert train.documents is None
    assert len(train.lengths) == train.samples == 70
    assert sum(train.lengths) == train.tokens == 70 * 16 - train.padding
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.uint16) % 10)
    words = ["data=tokens", "data.files=[tokens.npy]", "data.eval_fraction=0", "seq_len=16"]
    assert counted(*words, "document_separator=9")["train"].lengths == [10] * 10
    assert counted(*words)["train"].lengths == [16] * 6

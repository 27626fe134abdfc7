"""``tokens`` are what is not padding, ``targets`` what the loss counts, and ``bits_per_byte`` is over their bytes.

What is expected is counted from the texts: a byte is a token, and each document ends with one more.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tiny
import torch
from chats import write_lines
from program import forgather
from tokenizers import Tokenizer

TEXTS = ["a" * 7, "bc" * 9, "defg" * 3, "h" * 30, "ij" * 4, "k"]
TALKS = [("two and two", "four"), ("the sky", "blue and wide"), ("a" * 20, "b")]
SEQ_LEN, EPOCH = 32, 2
BASE = [
    "model=nano", "precision=fp32", "optimizer=adamw", "callbacks=minimal", "device=cpu", "data.cache_dir=cache",
    "data.tokenizer=bytes", "max_steps=-1", f"num_train_epochs={EPOCH}",
    "dataloader_drop_last=false", "global_batch_size=2", "logging_steps=1", "eval_strategy=epoch", "save_strategy=no",
    "output_dir=run",
]  # fmt: skip


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(Path("texts.jsonl"), [{"text": text} for text in TEXTS])
    write_lines(Path("pairs.jsonl"), [{"input": source, "target": target} for source, target in TALKS])
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in TALKS]
    write_lines(Path("chats.jsonl"), [{"messages": talk} for talk in turns])
    Path("template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )


WHOLE = sum(len(text) + 1 for text in TEXTS)
ASKED, SAID = (sum(map(len, each)) for each in zip(*TALKS, strict=True))
TEXT = ["data=text", "data.files=[texts.jsonl]", "data.eval_files=[texts.jsonl]", f"data.seq_len={SEQ_LEN}"]
CHATS = [f"data.{name}=[chats.jsonl]" for name in ("files", "eval_files")]
PAIRS = ["data=seq2seq", *(f"data.{name}=[pairs.jsonl]" for name in ("files", "eval_files"))]
ENCODER_DECODER = [
    "model=qwen3_encdec", "hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2", "num_sentinel_tokens=16",
]  # fmt: skip
OF_TEXTS = (WHOLE, WHOLE - len(TEXTS), WHOLE - 2 * len(TEXTS))
OF_PAIRS = (ASKED + SAID + len(TALKS), SAID + len(TALKS), SAID)  # a target ends with a token
# data: tokens and targets of an epoch, and the targets' bytes. A row's first token is no target, and each text is in a
# row of its own or, where documents are isolated, loses its first one too
SPLITS: dict[str, tuple[list[str], int, int, int]] = {
    "pad": ([*TEXT, "data.packing=pad"], *OF_TEXTS),
    "best_fit": ([*TEXT, "data.packing=best_fit", "data.isolate_documents=true"], *OF_TEXTS),
    "instruct": (
        ["data=instruct", *CHATS, "data.chat_template=template.jinja", "data.packing=pad", f"data.seq_len={SEQ_LEN}"],
        ASKED + SAID, SAID, SAID,
    ),
    "seq2seq": ([*PAIRS, *ENCODER_DECODER, "data.packing=pad"], *OF_PAIRS),
    "seq2seq packed": ([*PAIRS, *ENCODER_DECODER, "max_encoder_length=32", "max_decoder_length=32"], *OF_PAIRS),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_tokens_are_without_padding_and_targets_what_the_loss_counts(name: str) -> None:
    words, tokens, targets, num_bytes = SPLITS[name]
    assert forgather("train", *BASE, *words) == 0
    logged, last = [each for each in tiny.metrics("run") if "tokens" in each], tiny.metrics("run")[-1]
    assert sum(each["tokens"] for each in logged) == EPOCH * tokens
    assert logged[-1]["total_tokens"] == last["total_tokens"] == EPOCH * tokens
    assert sum(each["targets"] for each in logged) == last["total_targets"] == EPOCH * targets
    assert last["tokens_per_second"] * last["train_runtime"] == pytest.approx(EPOCH * tokens)
    timed = [each for each in logged if "tok_per_sec" in each]
    assert all(each["tok_per_sec"] * each["step_time"] == pytest.approx(each["tokens"]) for each in timed)
    evaluated = [each for each in tiny.metrics("run") if "eval_loss" in each]
    assert {(each["eval_tokens"], each["eval_targets"]) for each in evaluated} == {(tokens, targets)}
    assert [_bytes(each) for each in evaluated] == pytest.approx([num_bytes] * EPOCH)
    assert sum(map(_bytes, logged)) == pytest.approx(EPOCH * num_bytes)
    if name.startswith("seq2seq"):
        assert sum(each["decoder_tokens"] for each in logged) == EPOCH * targets
        assert all(each["tokens"] == each["encoder_tokens"] + each["decoder_tokens"] for each in logged)


def _bytes(record: dict[str, float]) -> float:
    """Of which a record's bits per byte are the mean."""
    kind = "eval_" if "eval_loss" in record else ""
    return record[f"{kind}loss"] * record[f"{kind}targets"] / math.log(2) / record[f"{kind}bits_per_byte"]


def test_a_token_has_the_bytes_of_its_text() -> None:
    texts = ["the cat, the hat", "naïve 🙂🙂 naïve 🙂🙂", "日本語の日本語 the"] * 4
    write_lines(Path("texts.jsonl"), [{"text": text} for text in texts])
    assert forgather("train", *BASE, *TEXT, "data.packing=pad", "data.tokenizer=bpe", "data.bpe_vocab_size=300") == 0
    [file] = Path("cache").rglob("tokenizer.json")
    first = [Tokenizer.from_file(str(file)).encode(text).offsets[0][1] for text in texts]  # characters
    num_bytes = sum(len(text[n:].encode()) for text, n in zip(texts, first, strict=True))
    evaluated = [each for each in tiny.metrics("run") if "eval_loss" in each]
    assert [_bytes(each) for each in evaluated] == pytest.approx([num_bytes] * EPOCH)


def test_of_a_loss_that_is_no_likelihood_and_of_a_script_there_are_none(tmp_path: Path) -> None:
    assert forgather("train", *BASE, *TEXT, "label_smoothing=0.1") == 0
    trainer = tiny.script(tmp_path / "script", max_steps=1)
    trainer.train()
    assert not any("bits_per_byte" in name for each in tiny.metrics("run") + trainer.state.log_history for name in each)


def test_the_last_row_of_an_evaluation_is_counted_as_far_as_it_is_filled() -> None:
    assert WHOLE % SEQ_LEN
    assert forgather("train", *BASE, *TEXT) == 0
    rows, logged = WHOLE // SEQ_LEN, [each for each in tiny.metrics("run") if "tokens" in each]
    assert sum(each["tokens"] for each in logged) == EPOCH * rows * SEQ_LEN  # training leaves the last one out
    evaluated = next(each for each in tiny.metrics("run") if "eval_loss" in each)
    assert (evaluated["eval_tokens"], evaluated["eval_targets"]) == (WHOLE, WHOLE - rows - 1)


def test_of_a_users_batches_the_mask_says_what_is_padding(tmp_path: Path) -> None:
    rows = tiny.RandomTokens(8, ragged=True)
    masks = (torch.arange(16) < rows.lengths[:, None]).long()  # as a collator of Hugging Face leaves them
    data = [{**row, "attention_mask": mask} for row, mask in zip(rows, masks, strict=True)]
    settings = {"max_steps": 1, "per_device_train_batch_size": 8, "eval_strategy": "steps", "eval_steps": 1}
    trainer = tiny.script(tmp_path / "run", None, data, data, **settings)
    trainer.train()
    tokens = int(rows.lengths.sum())
    first = next(each for each in trainer.state.log_history if "tokens" in each)
    assert (first["tokens"], first["targets"]) == (tokens, tokens - 8)
    assert trainer.state.num_input_tokens_seen == tokens
    evaluated = next(each for each in trainer.state.log_history if "eval_tokens" in each)
    assert (evaluated["eval_tokens"], evaluated["eval_targets"]) == (tokens, tokens - 8)

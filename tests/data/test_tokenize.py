"""Tokenizers: ids, decoding, and what is written loads in transformers with equal ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from forgather_cli.data.text.tokenizer import END, FileTokenizer, _pieces, load_tokenizer, train_bpe
from forgather_cli.errors import DataError

TEXTS = [
    "def f(x):\n    return x  # a\ttab\r\n\n\n",
    "naïve café — 日本語 🙂👩‍👩‍👧 \u0000\u001f end  ",
    "  leading and trailing  ",
    f"one{END}two{END}",
    "".join(map(chr, range(1, 300))),
]
CORPUS = ["the quick brown fox jumps over the lazy dog\n" * 50, "def f(x):\n    return x\n" * 50]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bpe")
    train_bpe(CORPUS, 320, directory)
    return directory


def test_bytes_are_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("hé\n") == list("hé\n".encode())
    assert tokenizer.encode(f"a{END}b") == [97, 256, 98]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 256


def test_decode_survives_what_a_model_may_generate(bpe: Path) -> None:
    for tokenizer in (load_tokenizer("bytes"), FileTokenizer(bpe)):
        assert "\ufffd" in map(tokenizer.decode, ([i] for i in range(tokenizer.vocab_size))), "a byte that is no UTF-8"
        assert tokenizer.decode(np.array([tokenizer.vocab_size + 5])) == ""
        end = [tokenizer.eos_token_id]
        assert (tokenizer.decode(end), tokenizer.decode(end, skip_special_tokens=True)) == (END, "")


def test_ids_and_text_are_those_of_transformers_one_by_one_and_together(bpe: Path, tmp_path: Path) -> None:
    for number, tokenizer in enumerate((load_tokenizer("bytes"), FileTokenizer(bpe))):
        directory = tmp_path / str(number)
        tokenizer.save(directory)
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert theirs(text)["input_ids"] == ids
            assert theirs.decode(ids) == tokenizer.decode(ids) == text
        assert [array.tolist() for array in tokenizer.encode_arrays(TEXTS)] == list(map(tokenizer.encode, TEXTS))
        assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.eos_token_id
        assert len(theirs) == tokenizer.vocab_size


def test_a_saved_tokenizer_is_the_same_again_with_all_files(bpe: Path, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    FileTokenizer(bpe).save(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    FileTokenizer(source).save(copy)
    assert FileTokenizer(copy).fingerprint == FileTokenizer(bpe).fingerprint
    assert (copy / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (copy / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()
    load_tokenizer("bytes").save(tmp_path / "bytes")
    again = load_tokenizer(str(tmp_path / "bytes"))
    assert (again.vocab_size, again.eos_token_id, again.encode(TEXTS[1])) == (257, 256, list(TEXTS[1].encode()))


def test_special_tokens_come_from_whichever_file_names_them(bpe: Path, tmp_path: Path) -> None:
    FileTokenizer(bpe).save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert FileTokenizer(tmp_path).eos_token_id is None
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 8], "pad_token_id": None}))
    tokenizer = FileTokenizer(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (7, 7)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END}}))
    assert FileTokenizer(tmp_path).eos_token_id == 0


def test_bpe_training_is_deterministic(bpe: Path, tmp_path: Path) -> None:
    train_bpe(CORPUS, 320, tmp_path)
    assert FileTokenizer(tmp_path).fingerprint == FileTokenizer(bpe).fingerprint
    assert len(FileTokenizer(bpe).encode("the quick brown fox")) < 8


def test_long_texts_are_cut_where_it_changes_no_id(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = FileTokenizer(bpe)
    text = "def f(x):\nreturn x\n" * 200
    whole = tokenizer.encode(text)
    monkeypatch.setattr("forgather_cli.data.text.tokenizer._PIECE", 1000)
    assert len(_pieces(text)) > 3
    assert "".join(_pieces(text)) == text
    assert tokenizer.encode_arrays([text])[0].tolist() == whole


@pytest.mark.parametrize("content", [None, "not json"])
def test_a_directory_that_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"data\.tokenizer.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))

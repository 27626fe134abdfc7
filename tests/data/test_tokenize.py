"""Tokenizers: ids, decoding, the text of each token; what is written loads in transformers with equal ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import test_add_bos
import transformers
from chats import write_tokenizer

from forgather_cli.data.text.pieces import letters_of, pieces_of, special_ids
from forgather_cli.data.text.tokenizer import END, FileTokenizer, Tokenizer, _pieces, load_tokenizer, train_bpe

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


def test_one_that_is_trained_again_or_saved_is_the_same_with_all_files(bpe: Path, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    train_bpe(CORPUS, 320, tmp_path)
    FileTokenizer(bpe).save(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    FileTokenizer(source).save(copy)
    assert FileTokenizer(copy).fingerprint == FileTokenizer(tmp_path).fingerprint == FileTokenizer(bpe).fingerprint
    assert len(FileTokenizer(bpe).encode("the quick brown fox")) < 8
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


def test_long_texts_are_cut_where_it_changes_no_id(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = FileTokenizer(bpe)
    text = "def f(x):\nreturn x\n" * 200
    whole = tokenizer.encode(text)
    monkeypatch.setattr("forgather_cli.data.text.tokenizer._PIECE", 1000)
    assert len(_pieces(text)) > 3
    assert "".join(_pieces(text)) == text
    assert tokenizer.encode_arrays([text])[0].tolist() == whole


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    write_tokenizer(root / "level", None)
    test_add_bos.write_tokenizer(root / "spelled", spelled=True)
    places = {"bytes": "bytes", "byte level": root / "level", "spelled": root / "spelled"}
    return {kind: load_tokenizer(str(place)) for kind, place in places.items()}


@pytest.mark.parametrize("kind", ["bytes", "byte level", "spelled"])
@pytest.mark.parametrize(
    "text", ["What is 7 + 1?\n", "Ünïcödé 🙂 数学\x1b[31m", " two  blanks ", "\\x41 as it stands", ""]
)
def test_pieces_and_letters_are_the_text(kind: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    text = "What is 7?" + text if kind == "spelled" else text
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id or 0, *tokenizer.encode("What is 7?")]
    whole = tokenizer.decode(ids)
    assert "".join(letters_of(tokenizer, ids)) == whole
    assert len(pieces_of(tokenizer, ids)) == len(letters_of(tokenizer, ids)) == len(ids)
    # the letters of a text without ASCII escapes of its own can be had back from the parts
    pieces = "".join(pieces_of(tokenizer, ids))
    escaped, expected = (each.encode().decode("ascii", "backslashreplace") for each in (pieces, whole))
    assert escaped == expected


def test_a_part_of_a_letter_is_written_as_its_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode("aü")
    assert pieces_of(tokenizer, ids) == ["a", "\\xc3", "\\xbc"]
    assert letters_of(tokenizer, ids) == ["a", "", "ü"]
    assert letters_of(tokenizer, ids[:2]) == ["a", "\\xc3"]
    assert letters_of(tokenizer, [*ids[:2], 256, 97]) == ["a", "", "\\xc3<|endoftext|>", "a"]


def test_ids_without_text_are_numbers(tokenizers: dict[str, Tokenizer]) -> None:
    assert pieces_of(None, [3, 4]) == ["<3>", "<4>"]
    assert pieces_of(tokenizers["byte level"], [-1, 10_000]) == ["<-1>", "<10000>"]
    assert special_ids(tokenizers["byte level"]) == {0, 1, 2}
    assert special_ids(None) == set()

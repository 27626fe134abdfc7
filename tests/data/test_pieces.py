"""The text of each token: joined it is the text, and parts of letters are written as bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_add_bos
from chats import write_tokenizer

from forgather_cli.data.text.pieces import letters_of, pieces_of, special_ids
from forgather_cli.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

TEXTS = ["What is 7 + 1?\n", "Ünïcödé 🙂 数学\x1b[31m", " two  blanks ", "\\x41 as it stands", ""]


@pytest.fixture
def byte_level(tmp_path: Path) -> FileTokenizer:
    write_tokenizer(tmp_path / "level", None)
    return FileTokenizer(tmp_path / "level")


@pytest.mark.parametrize("kind", ["bytes", "byte level", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_and_letters_are_the_text(kind: str, text: str, tmp_path: Path, byte_level: FileTokenizer) -> None:
    tokenizer: Tokenizer = byte_level if kind == "byte level" else ByteTokenizer()
    if kind == "sentencepiece":
        tokenizer = FileTokenizer(test_add_bos.write_tokenizer(tmp_path / "sentencepiece", spelled=True))
        text = "What is 7?" + text
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id or 0, *tokenizer.encode("What is 7?")]
    whole = tokenizer.decode(ids)
    assert "".join(letters_of(tokenizer, ids)) == whole
    assert len(pieces_of(tokenizer, ids)) == len(letters_of(tokenizer, ids)) == len(ids)
    # the letters of a text without ASCII escapes of its own can be had back from the parts
    escaped = "".join(each if each.isascii() else each.encode().decode("ascii", "backslashreplace") for each in whole)
    pieces = "".join(pieces_of(tokenizer, ids))
    assert "".join(c if c.isascii() else c.encode().decode("ascii", "backslashreplace") for c in pieces) == escaped


def test_a_part_of_a_letter_is_written_as_its_bytes() -> None:
    ids = ByteTokenizer().encode("aü")
    assert pieces_of(ByteTokenizer(), ids) == ["a", "\\xc3", "\\xbc"]
    assert letters_of(ByteTokenizer(), ids) == ["a", "", "ü"]
    assert letters_of(ByteTokenizer(), ids[:2]) == ["a", "\\xc3"]
    assert letters_of(ByteTokenizer(), [*ids[:2], 256, 97]) == ["a", "", "\\xc3<|endoftext|>", "a"]


def test_ids_without_text_are_numbers(byte_level: FileTokenizer) -> None:
    assert pieces_of(None, [3, 4]) == ["<3>", "<4>"]
    assert pieces_of(byte_level, [-1, 10_000]) == ["<-1>", "<10000>"]
    assert special_ids(byte_level) == {0, 1, 2}
    assert special_ids(None) == set()

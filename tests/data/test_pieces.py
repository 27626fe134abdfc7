"""The text of each token: joined it is the text, and parts of letters are written as bytes."""

from __future__ import annotations

import pytest
import test_add_bos
from chats import write_tokenizer

from forgather_cli.data.text.pieces import letters_of, pieces_of, special_ids
from forgather_cli.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

TEXTS = ["What is 7 + 1?\n", "Ünïcödé 🙂 数学\x1b[31m", " two  blanks ", "\\x41 as it stands", ""]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    write_tokenizer(root / "level", None)
    spelled = test_add_bos.write_tokenizer(root / "spelled", spelled=True)
    return {"bytes": ByteTokenizer(), "byte level": FileTokenizer(root / "level"), "spelled": FileTokenizer(spelled)}


@pytest.mark.parametrize("kind", ["bytes", "byte level", "spelled"])
@pytest.mark.parametrize("text", TEXTS)
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
    ids = ByteTokenizer().encode("aü")
    assert pieces_of(ByteTokenizer(), ids) == ["a", "\\xc3", "\\xbc"]
    assert letters_of(ByteTokenizer(), ids) == ["a", "", "ü"]
    assert letters_of(ByteTokenizer(), ids[:2]) == ["a", "\\xc3"]
    assert letters_of(ByteTokenizer(), [*ids[:2], 256, 97]) == ["a", "", "\\xc3<|endoftext|>", "a"]


def test_ids_without_text_are_numbers(tokenizers: dict[str, Tokenizer]) -> None:
    assert pieces_of(None, [3, 4]) == ["<3>", "<4>"]
    assert pieces_of(tokenizers["byte level"], [-1, 10_000]) == ["<-1>", "<10000>"]
    assert special_ids(tokenizers["byte level"]) == {0, 1, 2}
    assert special_ids(None) == set()

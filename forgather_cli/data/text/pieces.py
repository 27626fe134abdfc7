"""The text of each token by itself, for people who look at tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each id stands for; joined the pieces are the text. Bytes that are only a part of a letter are written
    ``\\xNN``.

    ``tokenizer``: ours, or a user's with ``decode``. Ids that stand for no text, outside of the vocabulary or without a
    tokenizer, are ``<17>``.
    """
    return [
        each if isinstance(each, str) else each.decode("utf-8", "backslashreplace") for each in _each(tokenizer, ids)
    ]


def letters_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """As ``pieces_of``, with no letter divided: it stands with the last of its tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    letters: list[str] = []
    for each in _each(tokenizer, ids):
        if isinstance(each, bytes):
            letters.append(decoder.decode(each))
        else:
            letters.append(decoder.decode(b"", final=True) + each)
    if letters:
        letters[-1] += decoder.decode(b"", final=True)
    return letters


def _each(tokenizer: Any, ids: Sequence[int]) -> Iterator[bytes | str]:
    """Of each id its bytes where these are known whatever stands around it, else its text."""
    bytes_of = getattr(tokenizer, "bytes_of", lambda number: None)
    size = 0 if tokenizer is None else getattr(tokenizer, "vocab_size", None)
    for at, number in enumerate(ids):
        known = bytes_of(number)
        if known is not None:
            yield known
        elif number < 0 or (size is not None and number >= size):
            yield f"<{number}>"
        else:
            # what it adds to the token before it: SentencePiece writes no blank before a text's first word
            before = tokenizer.decode(ids[at - 1 : at]) if at else ""
            both = tokenizer.decode(ids[max(at - 1, 0) : at + 1])
            yield both[len(before) :] if both.startswith(before) else tokenizer.decode([number])


def special_ids(tokenizer: Any) -> set[int]:
    """Ids that stand for no text, such as begin and end tokens."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    named = [getattr(tokenizer, name, None) for name in names]
    return {number for number in (*named, *getattr(tokenizer, "all_special_ids", ())) if number is not None}

"""Text as its UTF-8 bytes, and a document's end."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.text.tokenizer import Marked, Span
from forgather_cli.data.text.tokenizer_files import END, write_template, write_tokenizer

_NUM_BYTES = 256


class ByteTokenizer:
    """Ids 0-255 are UTF-8 bytes, 256 is ``<|endoftext|>``, which is also the begin and pad token."""

    vocab_size = _NUM_BYTES + 1
    eos_token_id = bos_token_id = pad_token_id = _NUM_BYTES
    fingerprint = hashlib.sha256(b"forgather bytes 1").hexdigest()[:32]

    def __init__(self, chat_template: str | None = None) -> None:
        self._chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._encode(text).tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [self._encode(text) for text in texts]

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Marked]:
        return [self._marked(text, marks) for text, marks in zip(texts, spans, strict=True)]

    def _marked(self, text: str, spans: Sequence[Span]) -> Marked:
        borders = [0, *(border for span in spans for border in span), len(text)]  # outside and inside by turns
        pieces = [self._encode(text[start:stop]) for start, stop in itertools.pairwise(borders)]
        inside = np.repeat(np.arange(len(pieces)) % 2 == 1, list(map(len, pieces)))
        return np.concatenate(pieces), inside

    def _encode(self, text: str) -> NDArray[Any]:
        if END not in text:
            return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        pieces: list[NDArray[Any]] = []
        for piece in text.split(END):
            pieces += [self._encode(piece).astype(np.uint16), np.array([_NUM_BYTES], np.uint16)]
        return np.concatenate(pieces[:-1])

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        end = b"" if skip_special_tokens else END.encode()
        known = (int(i) for i in ids)
        parts = (bytes((i,)) if i < _NUM_BYTES else end for i in known if 0 <= i <= _NUM_BYTES)
        return b"".join(parts).decode("utf-8", "replace")

    def bytes_of_tokens(self) -> NDArray[np.int64]:
        """Bytes of text that each id stands for; none for the end token."""
        return np.array([1] * _NUM_BYTES + [0], np.int64)

    def save(self, directory: Path) -> None:
        import tokenizers
        from tokenizers import AddedToken, decoders, models, pre_tokenizers

        vocab = {char: byte for byte, char in enumerate(_byte_chars())}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
        write_tokenizer(tokenizer, directory)
        write_template(self._chat_template, directory)


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(_NUM_BYTES)]

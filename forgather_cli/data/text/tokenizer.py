"""What a tokenizer is here, and the one of a name: bytes, or a directory with ``tokenizer.json``.

``import tokenizers`` happens where it is used: training on bytes with a warm cache never needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forgather_cli.errors import DataError

Span = tuple[int, int]
"""Characters [start, stop) of a text."""
Marked = tuple[NDArray[Any], NDArray[np.bool_]]
"""Token ids, and of each whether it stands in a span."""


class Tokenizer(Protocol):
    """What the trainer, generation and finalize need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int:
        """The end token where the tokenizer names none: padding never carries a target."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits; equal fingerprints give equal ids for every text."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text. Special tokens spelled out in it become their ids, as in Hugging Face.

        ``add_special_tokens`` adds those that the tokenizer puts around a text (Llama's ``<s>``).
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """``encode_batch`` as integer arrays: the fast way for a corpus."""

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Marked]:
        """Ids of texts, and which of them stand in the spans of characters given for each text, in order.

        A token counts if any of its characters does, as in Hugging Face's ``return_assistant_tokens_mask``.
        """

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids; ids outside the vocabulary are left out, broken UTF-8 becomes U+FFFD."""

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and what belongs to them, for ``AutoTokenizer``."""


def load_tokenizer(name: str, *, chat_template: str | None = None) -> Tokenizer:
    """``bytes`` or a directory with ``tokenizer.json``; ``bpe`` is made by ``train_bpe``. Raises DataError.

    ``chat_template``: the source that ``save`` writes in place of the directory's own.
    """
    from forgather_cli.data.text.byte_tokenizer import ByteTokenizer
    from forgather_cli.data.text.file_tokenizer import FileTokenizer

    if name == "bytes":
        return ByteTokenizer(chat_template)
    if name == "bpe":
        raise DataError("data.tokenizer: bpe is trained on text; use it with data=python_stdlib or data=text")
    return FileTokenizer(Path(name).expanduser(), chat_template)

"""What is taken of the ``tokenizers`` library beside its ``Tokenizer``. It is gone in 1.0 (1.0.0rc3), which encodes and
decodes by a tokenizer.json and makes none; ``tests/test_layers.py`` names it, and the methods that are gone too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers


def byte_level(vocab: dict[str, int], *, use_regex: bool) -> tokenizers.Tokenizer:
    """A BPE of bytes without merges. ``use_regex``: it cuts words as GPT-2 does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def trained(texts: Iterable[str], vocab_size: int, special: str) -> tokenizers.Tokenizer:
    """A byte-level BPE with a special token before all others."""
    from tokenizers import pre_tokenizers, trainers

    tokenizer = byte_level({}, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Iterable[tuple[str, bool]]) -> None:
    """Put tokens, (text, whether it is special) each, behind those of a tokenizer, in this order."""
    from tokenizers import AddedToken

    for text, special in tokens:  # one by one: several at once are sorted
        token = AddedToken(text, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])


def replaced(text: str, pattern: str, by: str) -> str:
    """``text`` with what an expression of the library's matches replaced."""
    from tokenizers import Regex, normalizers

    return normalizers.Replace(Regex(pattern), by).normalize_str(text)


def document_of(part: Any) -> dict[str, Any]:
    """The JSON object of a part of a tokenizer, empty where it has none."""
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


def from_document(document: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of what a tokenizer.json holds."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(document))

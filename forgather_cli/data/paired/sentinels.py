"""A tokenizer with the tokens that stand for spans, and those that name a denoiser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forgather_cli.data.cache import Cache, Meta, digest
from forgather_cli.data.text.tokenizer import FileTokenizer, Tokenizer, add_to_directory
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError

_VERSION = 1


def sentinel(number: int) -> str:
    """The text of a sentinel, as in T5."""
    return f"<extra_id_{number}>"


def with_sentinels(tokenizer: Tokenizer, name: str, count: int, prefixes: Sequence[str], cache: Cache) -> FileTokenizer:
    """``tokenizer`` with ``count`` sentinels and ``prefixes`` behind its tokens. The tokenizer of an encoder-decoder of
    ours, which has them, is returned as it is.

    ``name``: what ``data.tokenizer`` says. Raises DataError for another one that has some of them.
    """
    directory = Path(name).expanduser()
    tokens = [*map(sentinel, range(count)), *dict.fromkeys(prefixes)]
    there = [token for token in tokens if len(tokenizer.encode(token)) == 1]
    if (directory / "config.json").is_file() and isinstance(tokenizer, FileTokenizer):
        config = read_json_object(directory / "config.json", DataError)
        if config.get("model_type") == "qwen3_encdec" and len(there) == len(tokens):
            return tokenizer
    if there:
        raise DataError(
            f"data.tokenizer: {name} has {there[0]} already, which the data add as a token of their own; give the "
            "tokenizer without it" + (", or set model.num_sentinel_tokens=0" if there[0] not in prefixes else "")
        )

    def write(temporary: Path) -> Meta:
        tokenizer.save(temporary)
        add_to_directory(temporary, [(token, True) for token in tokens])
        return {"tokenizer": name, "added": len(tokens)}

    key = digest(["sentinels", _VERSION, tokenizer.fingerprint, tokens])
    made = FileTokenizer(cache.build_once("tokenizers", key, write)[0], add_bos=False)
    if made.encode("".join(tokens[:2])) != list(range(tokenizer.vocab_size, tokenizer.vocab_size + len(tokens[:2]))):
        raise DataError(
            f"data.tokenizer: {name} cannot be given tokens behind its {tokenizer.vocab_size}; give one whose "
            "tokenizer.json has no gaps"
        )
    return made

"""The counts that a plan may know of a data option: what the caches tell, without reading text and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgather_cli.config.schema import (
    DataOption,
    HfSettings,
    InstructSettings,
    PythonStdlibSettings,
    SyntheticSettings,
    Target,
    TextSettings,
    TokensSettings,
)
from forgather_cli.data.cache import cache_root, find
from forgather_cli.data.packing import packing_key
from forgather_cli.data.text.corpus import find_corpus
from forgather_cli.data.text.token_files import cached_token_files
from forgather_cli.data.text.tokenize import bpe_directory, cached_corpus
from forgather_cli.data.text.tokenizer import load_tokenizer

OnDisk = PythonStdlibSettings | TextSettings | TokensSettings


def cached_token_counts(option: DataOption) -> dict[str, int | None] | None:
    """What is known of the data without building anything; None if it is not in the cache. Imports no torch.

    Keys: vocab_size, and tokens and samples of each split (``train_tokens``, ``train_samples``, ...); samples are None
    where the packing has not been computed. Raises DataError when files do not exist.
    """
    if isinstance(option, Target | HfSettings):  # it takes the datasets library to know which data that is
        return None
    if isinstance(option, SyntheticSettings):
        counts = {"train": option.num_samples, "eval": option.num_eval_samples}
        vocab_size = load_tokenizer(option.tokenizer).vocab_size
        tokens = {f"{name}_tokens": n * option.seq_len for name, n in counts.items()}
        return {"vocab_size": vocab_size, **tokens, **{f"{name}_samples": n for name, n in counts.items()}}
    root = cache_root(option.cache_dir)
    if isinstance(option, InstructSettings):
        return _cached_chats(option, root)
    found = _cached(option, root)
    if found is None:
        return None
    key, meta, vocab_size = found
    known: dict[str, int | None] = {"vocab_size": vocab_size}
    packed = _cached_rows(option, key, root)
    for name in ("train", "eval"):
        tokens_of = int(meta[name]["tokens"])
        known[f"{name}_tokens"] = tokens_of
        concat = tokens_of // option.seq_len if name == "train" else -(-tokens_of // option.seq_len)
        known[f"{name}_samples"] = concat if option.packing == "concat" else packed.get(name)
    return known


def _cached_chats(option: InstructSettings, root: Path) -> dict[str, int | None] | None:
    from forgather_cli.data.chat.instruct import cached_chats

    found = cached_chats(option, root)
    if found is None:
        return None
    meta, rows, vocab_size = found
    known: dict[str, int | None] = {"vocab_size": vocab_size}
    for name in ("train", "eval"):
        known |= {f"{name}_tokens": meta[name]["tokens"], f"{name}_samples": rows.get(name)}
    return known


def _cached(option: OnDisk, root: Path) -> tuple[str, dict[str, Any], int] | None:
    if isinstance(option, TokensSettings):
        indexed = cached_token_files(option, root)
        return (*indexed, load_tokenizer(option.tokenizer).vocab_size) if indexed else None
    corpus = find_corpus(option)
    name = option.tokenizer
    if name == "bpe":
        directory = bpe_directory(corpus, option.bpe_vocab_size, root, read=False)
        if directory is None or find(root, "tokenizers", directory.name) is None:
            return None
        name = str(directory)
    tokenizer = load_tokenizer(name)
    known = cached_corpus(corpus, tokenizer.fingerprint, root)
    return (*known, tokenizer.vocab_size) if known else None


def _cached_rows(option: OnDisk, key: str, root: Path) -> dict[str, int]:
    if option.packing == "concat":
        return {}
    meta = find(root, "packings", packing_key(key, option.seq_len, option.packing))
    return {name: meta[name]["rows"] for name in ("train", "eval") if name in meta} if meta else {}

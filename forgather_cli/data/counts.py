"""The counts that a plan may know of a data option: what the caches tell, without reading text and without torch."""

from __future__ import annotations

from collections.abc import Mapping

from forgather_cli.config.schema import (
    DataOption,
    HfSettings,
    InstructSettings,
    SyntheticSettings,
    Target,
    TokensSettings,
)
from forgather_cli.data.cache import Meta, cache_root, find
from forgather_cli.data.packing import packing_key
from forgather_cli.data.text.corpus import find_corpus
from forgather_cli.data.text.token_files import cached_token_files
from forgather_cli.data.text.tokenize import bpe_directory, cached_corpus
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.data.tokens import SPLITS


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
        from forgather_cli.data.chat.instruct import cached_chats

        chats = cached_chats(option, root)
        if chats is None:
            return None
        meta, samples, vocab_size = chats
        return _counts(meta, samples, vocab_size)
    if isinstance(option, TokensSettings):
        found = cached_token_files(option, root)
        vocab_size = load_tokenizer(option.tokenizer).vocab_size if found else 0
    else:
        corpus, name = find_corpus(option), option.tokenizer
        if name == "bpe":
            directory = bpe_directory(corpus, option.bpe_vocab_size, root, read=False)
            if directory is None or find(root, "tokenizers", directory.name) is None:
                return None
            name = str(directory)
        tokenizer = load_tokenizer(name)
        vocab_size, found = tokenizer.vocab_size, cached_corpus(corpus, tokenizer.fingerprint, root)
    if found is None:
        return None
    key, meta = found
    if option.packing == "concat":  # training leaves a last partial sample out
        tokens = {name: meta[name]["tokens"] for name in SPLITS}
        samples = {"train": tokens["train"] // option.seq_len, "eval": -(-tokens["eval"] // option.seq_len)}
    else:
        packed = find(root, "packings", packing_key(key, option.seq_len, option.packing)) or {}
        samples = {name: packed[name]["rows"] for name in SPLITS if name in packed}
    return _counts(meta, samples, vocab_size)


def _counts(meta: Meta, samples: Mapping[str, int], vocab_size: int) -> dict[str, int | None]:
    known: dict[str, int | None] = {"vocab_size": vocab_size}
    for name in SPLITS:
        known |= {f"{name}_tokens": int(meta[name]["tokens"]), f"{name}_samples": samples.get(name)}
    return known

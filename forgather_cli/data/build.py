"""A data option to datasets: the one entry for training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from forgather_cli.data.cache import Progress, cache_root, digest
from forgather_cli.data.custom import custom_data
from forgather_cli.data.packing import packed_tables
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text.corpus import Documents, find_corpus
from forgather_cli.data.text.read import damage_of
from forgather_cli.data.text.token_files import open_token_files
from forgather_cli.data.text.tokenize import tokenize_corpus, trained_bpe
from forgather_cli.data.text.tokenizer import Tokenizer, end_of, load_tokenizer
from forgather_cli.data.tokens import Tokenized
from forgather_cli.errors import DataError

if TYPE_CHECKING:
    from forgather_cli.data.samples import Batched

Text = PythonStdlibSettings | TextSettings | HfSettings
Packed = Text | TokensSettings


def load_data(
    option: DataOption, *, seed: int, progress: Progress | None = None, model_path: str | None = None
) -> DataSplits:
    """Datasets and tokenizer of a data option; builds the token cache when it is missing.

    ``seed`` is that of synthetic data; ``model_path`` the directory of a pretrained model, whose tokenizer data of the
    user's get that name none. ``progress(done, total)`` is called in bytes while a cache is built. Raises
    DataError for data or a tokenizer that cannot be used.
    """
    if isinstance(option, Target):
        return custom_data(option, model_path)
    if isinstance(option, SyntheticSettings):
        return _synthetic(option, seed)
    root = cache_root(option.cache_dir)
    if isinstance(option, InstructSettings):
        return _instruct(option, root, progress)
    if isinstance(option, HfSettings) and option.streaming:
        return _stream(option, root, seed)
    if isinstance(option, TokensSettings):
        tokenizer = load_tokenizer(option.tokenizer)
        data = open_token_files(option, tokenizer.vocab_size, root, progress)
        return _pack(option, data, tokenizer, root)
    corpus: Documents
    if isinstance(option, HfSettings):
        from forgather_cli.data.text.hf import hf_corpus

        corpus = hf_corpus(option, root)
    else:
        corpus = find_corpus(option)
    if option.tokenizer == "bpe":
        tokenizer = trained_bpe(corpus, option.bpe_vocab_size, root, progress)
    else:
        tokenizer = load_tokenizer(option.tokenizer)
    data = tokenize_corpus(corpus, tokenizer, root, progress, processes=option.tokenize_processes)
    return _pack(option, data, tokenizer, root)


def _instruct(option: InstructSettings, root: Path, progress: Progress | None) -> DataSplits:
    from forgather_cli.data.chat.instruct import find_chats, pack_chats, tokenize_chats

    chats = find_chats(option)
    data = tokenize_chats(chats, root, progress)
    train, evaluation, description = pack_chats(chats, data, root)
    rules = [option.seq_len, option.packing, option.isolate_documents, option.too_long]
    fingerprint = digest([data.fingerprint, *rules])
    return DataSplits(train, evaluation, chats.tokenizer, fingerprint, option.seq_len, description)


def _stream(option: HfSettings, root: Path, seed: int) -> DataSplits:
    """Documents that are tokenized and packed while they are read."""
    from forgather_cli.data.text.hf import open_datasets, origin_of, stream_identity
    from forgather_cli.data.text.token_stream import Rules, TokenStream

    tokenizer = load_tokenizer(option.tokenizer)
    opened = open_datasets(option, root)
    rules = Rules(
        tokenizer,
        end_of(tokenizer),
        option.text_key,
        option.seq_len,
        option.packing,
        option.isolate_documents,
        skip_bad=option.on_bad_row == "skip",
    )
    train = TokenStream(opened.train, replace(rules, shuffle_buffer=option.shuffle_buffer, seed=seed))
    evaluation = None if opened.eval is None else TokenStream(opened.eval, replace(rules, keep_tail=True))
    parts = [option.seq_len, option.packing, option.isolate_documents, option.shuffle_buffer]
    fingerprint = digest(["stream", stream_identity(option), tokenizer.fingerprint, *parts])
    description = {"type": "hf", "tokenizer": option.tokenizer, "packing": option.packing}
    return DataSplits(train, evaluation, tokenizer, fingerprint, option.seq_len, description | origin_of(option))


def _pack(option: Packed, data: Tokenized, tokenizer: Tokenizer, root: Path) -> DataSplits:
    if data.train.documents is None and (option.isolate_documents or option.packing != "concat"):
        setting = "isolate_documents=true" if option.isolate_documents else f"packing={option.packing}"
        raise DataError(
            f"data.{setting}: nothing marks the documents of these token files; set data.document_separator"
            + (
                f" (the tokenizer's end token is {tokenizer.eos_token_id})"
                if tokenizer.eos_token_id is not None
                else ""
            )
        )
    from forgather_cli.data.samples import ConcatDataset, PackedDataset

    splits = {"train": data.train} | ({"eval": data.eval} if data.eval else {})
    pad, isolate = tokenizer.pad_token_id, option.isolate_documents
    made: dict[str, Batched] = {}
    if option.packing == "concat":
        for name, split in splits.items():
            documents = split.documents if isolate else None
            made[name] = ConcatDataset(split.tokens, option.seq_len, pad, keep_tail=name == "eval", documents=documents)
    else:
        tables = packed_tables(root, data, option.seq_len, option.packing)
        for name, split in splits.items():
            made[name] = PackedDataset(split.tokens, tables[name], option.seq_len, pad, isolate=isolate)
    train, evaluation = made["train"], made.get("eval")
    if not len(train):
        tokens = len(data.train.tokens)
        remedy = f"set data.seq_len={tokens} or less" if tokens >= 2 else "give more data"
        raise DataError(
            f"data.seq_len: {option.seq_len} is longer than the training split of {tokens} tokens; {remedy}"
        )
    fingerprint = digest([data.fingerprint, option.seq_len, option.packing, option.isolate_documents])
    description = _describe(option, data, train, evaluation)
    return DataSplits(train, evaluation, tokenizer, fingerprint, option.seq_len, description)


def _describe(option: Packed, data: Tokenized, train: Any, evaluation: Any) -> dict[str, Any]:
    meta = data.meta
    description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer, "packing": option.packing}
    for name, dataset in (("train", train), ("eval", evaluation)):
        description[f"{name}_tokens"] = meta[name]["tokens"]
        description[f"{name}_documents"] = meta[name]["documents"]
        description[f"{name}_samples"] = len(dataset) if dataset is not None else 0
    return {**description, **meta["origin"], **damage_of(meta), "content": meta["content"]}


def _synthetic(option: SyntheticSettings, seed: int) -> DataSplits:
    from forgather_cli.data.samples import SyntheticDataset

    tokenizer = load_tokenizer(option.tokenizer)
    splits = [
        SyntheticDataset(
            length,
            option.seq_len,
            tokenizer.vocab_size,
            tokenizer.pad_token_id,
            seed=seed,
            first=first,
            ragged=option.ragged,
            isolate=option.isolate_documents,
        )
        for length, first in ((option.num_samples, 0), (option.num_eval_samples, option.num_samples))
    ]
    rules = [option.num_samples, option.num_eval_samples, option.ragged, option.isolate_documents]
    fingerprint = digest(["synthetic", seed, option.seq_len, tokenizer.vocab_size, rules])
    description = {
        "type": "synthetic",
        "train_samples": option.num_samples,
        "train_tokens": option.num_samples * option.seq_len,
        "eval_samples": option.num_eval_samples,
        "eval_tokens": option.num_eval_samples * option.seq_len,
    }
    return DataSplits(
        splits[0], splits[1] if option.num_eval_samples else None, tokenizer, fingerprint, option.seq_len, description
    )

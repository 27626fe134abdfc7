"""A data option to datasets: the one entry for training, and the counts that a plan may know without reading text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.config.schema import (
    DataOption,
    DataTarget,
    HfSettings,
    InstructSettings,
    PythonStdlibSettings,
    SyntheticSettings,
    Target,
    TextSettings,
    TokensSettings,
)
from forgather_cli.data.cache import cache_root, digest, find
from forgather_cli.data.corpus import (
    Progress,
    bpe_directory,
    cached_corpus,
    end_of,
    tokenize_corpus,
    trained_bpe,
)
from forgather_cli.data.sources import Documents, find_corpus
from forgather_cli.data.tables import packed_tables, packing_key
from forgather_cli.data.token_files import cached_token_files, open_token_files
from forgather_cli.data.tokenize import Tokenizer, load_tokenizer
from forgather_cli.data.tokens import Tokenized
from forgather_cli.errors import DataError
from forgather_cli.targets import import_target

if TYPE_CHECKING:
    from forgather_cli.data.packing import Batched

Text = PythonStdlibSettings | TextSettings | HfSettings
Packed = Text | TokensSettings


@dataclass(frozen=True)
class DataSplits:
    """What training reads. ``train`` and ``eval`` are what ``TrainLoader`` takes; the shipped ones are map-style."""

    train: Any
    eval: Any | None
    tokenizer: Tokenizer
    fingerprint: str
    """Of content, tokenizer, split, seq_len, packing and isolation: equal fingerprints give equal samples."""
    seq_len: int
    """Tokens per sample."""
    description: dict[str, Any] = field(default_factory=dict)
    """Plain values for logs: type, documents, tokens and samples of each split, origin, what was replaced."""


def load_data(option: DataOption, *, seed: int, progress: Progress | None = None) -> DataSplits:
    """Datasets and tokenizer of a data option; builds the token cache when it is missing.

    ``seed`` is that of synthetic data. ``progress(done, total)`` is called in bytes while a cache is built. Raises
    DataError for data or a tokenizer that cannot be used.
    """
    if isinstance(option, Target):
        return _target(option)
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
    else:
        corpus = _corpus(option, root)
        tokenizer = _text_tokenizer(option, corpus, root, progress)
        data = tokenize_corpus(corpus, tokenizer, root, progress, processes=option.tokenize_processes)
    return _pack(option, data, tokenizer, root)


def _instruct(option: InstructSettings, root: Path, progress: Progress | None) -> DataSplits:
    from forgather_cli.data.chat_tokens import tokenize_chats
    from forgather_cli.data.instruct import find_chats, pack_chats

    chats = find_chats(option)
    data = tokenize_chats(chats, root, progress)
    train, evaluation, description = pack_chats(chats, data, root)
    rules = [option.seq_len, option.packing, option.isolate_documents, option.too_long]
    fingerprint = digest([data.fingerprint, *rules])
    return DataSplits(train, evaluation, chats.tokenizer, fingerprint, option.seq_len, description)


def _corpus(option: Text, root: Path) -> Documents:
    if isinstance(option, HfSettings):
        from forgather_cli.data.hf import hf_corpus

        return hf_corpus(option, root)
    return find_corpus(option)


def _stream(option: HfSettings, root: Path, seed: int) -> DataSplits:
    """Documents that are tokenized and packed while they are read."""
    from forgather_cli.data.hf import open_datasets, origin_of, stream_identity
    from forgather_cli.data.token_stream import Rules, TokenStream

    tokenizer = load_tokenizer(option.tokenizer)
    opened = open_datasets(option, root)
    rules = Rules(
        tokenizer, end_of(tokenizer), option.text_key, option.seq_len, option.packing, option.isolate_documents
    )
    train = TokenStream(opened.train, replace(rules, shuffle_buffer=option.shuffle_buffer, seed=seed))
    evaluation = None if opened.eval is None else TokenStream(opened.eval, replace(rules, keep_tail=True))
    parts = [option.seq_len, option.packing, option.isolate_documents, option.shuffle_buffer]
    fingerprint = digest(["stream", stream_identity(option), tokenizer.fingerprint, *parts])
    description = {"type": "hf", "tokenizer": option.tokenizer, "packing": option.packing}
    return DataSplits(train, evaluation, tokenizer, fingerprint, option.seq_len, description | origin_of(option))


def _text_tokenizer(option: Text, corpus: Documents, root: Path, progress: Progress | None) -> Tokenizer:
    if option.tokenizer == "bpe":
        return trained_bpe(corpus, option.bpe_vocab_size, root, progress)
    return load_tokenizer(option.tokenizer)


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
    train, evaluation = _datasets(option, data, tokenizer.pad_token_id, root)
    if not len(train):
        raise _too_short(option, data)
    fingerprint = digest([data.fingerprint, option.seq_len, option.packing, option.isolate_documents])
    return DataSplits(
        train, evaluation, tokenizer, fingerprint, option.seq_len, _describe(option, data, train, evaluation)
    )


def _datasets(option: Packed, data: Tokenized, pad: int, root: Path) -> tuple[Batched, Batched | None]:
    from forgather_cli.data.packing import ConcatDataset, PackedDataset

    splits = {"train": data.train} | ({"eval": data.eval} if data.eval else {})
    isolate = option.isolate_documents
    made: dict[str, Batched] = {}
    if option.packing == "concat":
        for name, split in splits.items():
            documents = split.documents if isolate else None
            made[name] = ConcatDataset(split.tokens, option.seq_len, pad, keep_tail=name == "eval", documents=documents)
    else:
        tables = packed_tables(root, data, option.seq_len, option.packing)
        for name, split in splits.items():
            made[name] = PackedDataset(split.tokens, tables[name], option.seq_len, pad, isolate=isolate)
    return made["train"], made.get("eval")


def _too_short(option: Packed, data: Tokenized) -> DataError:
    tokens = len(data.train.tokens)
    remedy = f"set data.seq_len={tokens} or less" if tokens >= 2 else "give more data"
    return DataError(f"data.seq_len: {option.seq_len} is longer than the training split of {tokens} tokens; {remedy}")


def _describe(option: Packed, data: Tokenized, train: Any, evaluation: Any) -> dict[str, Any]:
    meta = data.meta
    description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer, "packing": option.packing}
    for name, dataset in (("train", train), ("eval", evaluation)):
        description[f"{name}_tokens"] = meta[name]["tokens"]
        description[f"{name}_documents"] = meta[name]["documents"]
        description[f"{name}_samples"] = len(dataset) if dataset is not None else 0
    replaced = {"replaced": meta["replaced"]} if meta.get("replaced") else {}
    return {**description, **meta["origin"], **replaced, "content": meta["content"]}


def _synthetic(option: SyntheticSettings, seed: int) -> DataSplits:
    from forgather_cli.data.synthetic import SyntheticDataset

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


# -------------------------------------------------------------------------------------------------- a user's own data


def _target(option: Target) -> DataSplits:
    """Data of the user's: a DataSplits, a mapping with ``train`` and, if any, ``eval``, ``tokenizer`` (a name or an
    object; bytes) and ``seq_len``, a (train, eval) pair, or a training dataset alone."""
    made = _splits(option, import_target(option.path, "data")(**option.kwargs))
    if isinstance(option, DataTarget):
        _check_dispatch(option, made)
    return made


def _splits(option: Target, made: Any) -> DataSplits:
    if isinstance(made, DataSplits):
        return made
    parts: dict[str, Any] = {"train": made}
    if isinstance(made, Mapping):
        parts = dict(made)
    elif isinstance(made, tuple) and len(made) == 2:
        parts = {"train": made[0], "eval": made[1]}
    if "train" not in parts:
        raise DataError(
            f"data._target_: {option.path} returned a mapping without 'train' (its keys: {', '.join(parts)})"
        )
    tokenizer = parts.get("tokenizer", "bytes")
    fingerprint = digest([option.path, repr(sorted(option.kwargs.items()))])
    return DataSplits(
        parts["train"],
        parts.get("eval"),
        load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer,
        fingerprint,
        _seq_len(parts, option.path),
        {"type": option.path},
    )


def _check_dispatch(option: DataTarget, made: DataSplits) -> None:
    """Raise DataError for settings that only data without numbers has, given for data with numbers."""
    from forgather_cli.data.stream import is_map_style

    splits = {"train": made.train, "eval": made.eval}
    streams = {name: data is not None and not is_map_style(data) for name, data in splits.items()}
    follows = option.dispatch_eval_batches is None
    reads = {
        "dispatch_batches": streams["train"] or (follows and streams["eval"]),
        "dispatch_eval_batches": streams["eval"],
    }
    for name, is_read in reads.items():
        if getattr(option, name) is not None and not is_read:
            raise DataError(
                f"data.{name}: nothing reads it, since what {option.path} returned has numbers, by which each rank "
                "reads its own samples; leave it out"
            )


def _seq_len(parts: dict[str, Any], path: str) -> int:
    if "seq_len" in parts:
        return int(parts["seq_len"])
    try:
        return len(parts["train"][0]["input_ids"])
    except (TypeError, KeyError, IndexError, NotImplementedError) as error:
        raise DataError(
            f"data._target_: cannot tell the sequence length of what {path} returned; "
            f"return a mapping with 'train' and 'seq_len'"
        ) from error


# ------------------------------------------------------------------------------------------------- without reading text


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
    from forgather_cli.data.instruct import cached_chats

    found = cached_chats(option, root)
    if found is None:
        return None
    meta, rows, vocab_size = found
    known: dict[str, int | None] = {"vocab_size": vocab_size}
    for name in ("train", "eval"):
        known |= {f"{name}_tokens": meta[name]["tokens"], f"{name}_samples": rows.get(name)}
    return known


def _cached(
    option: PythonStdlibSettings | TextSettings | TokensSettings, root: Path
) -> tuple[str, dict[str, Any], int] | None:
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


def _cached_rows(option: Packed, key: str, root: Path) -> dict[str, int]:
    if option.packing == "concat":
        return {}
    meta = find(root, "packings", packing_key(key, option.seq_len, option.packing))
    return {name: meta[name]["rows"] for name in ("train", "eval") if name in meta} if meta else {}

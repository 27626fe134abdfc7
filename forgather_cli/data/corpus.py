"""Text to the token cache: one token file and one file of document borders per split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.cache import Meta, build_once, digest, find
from forgather_cli.data.sources import Corpus, Damage, Document, Split, content_hash, split_documents
from forgather_cli.data.tokenize import FileTokenizer, Tokenizer, train_bpe
from forgather_cli.data.tokens import ArrayFile, Tokenized, Tokens, TokenSplit
from forgather_cli.errors import DataError

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in bytes of the source."""

_VERSION = 1  # of the files below
_CHUNK = 1 << 20  # characters encoded at once
_log = logging.getLogger(__name__)


def corpus_key(corpus: Corpus, tokenizer_fingerprint: str, root: Path, *, read: bool = True) -> str | None:
    """Name of the cache directory; None if the content is not known yet and ``read`` is false."""
    content = corpus.fingerprint(root, read=read)
    return None if content is None else digest([_VERSION, content, tokenizer_fingerprint])


def bpe_directory(corpus: Corpus, vocab_size: int, root: Path, *, read: bool = True) -> Path | None:
    """Where the BPE tokenizer of a corpus belongs; None if the content is not known yet and ``read`` is false."""
    content = corpus.fingerprint(root, read=read)
    return None if content is None else root / "tokenizers" / digest([_VERSION, content, vocab_size])


def trained_bpe(corpus: Corpus, vocab_size: int, root: Path, progress: Progress | None) -> Tokenizer:
    """The BPE tokenizer of a corpus, trained on its training documents if it is not in the cache."""
    directory = bpe_directory(corpus, vocab_size, root)
    assert directory is not None

    def write(temporary: Path) -> Meta:
        documents = _reported(split_documents(corpus, Damage()), corpus.num_bytes(), progress)
        train_bpe((doc.text for split, doc in documents if split == "train"), vocab_size, temporary)
        return {"corpus": corpus.origin}

    build_once(root, "tokenizers", directory.name, write)
    return FileTokenizer(directory)


def tokenize_corpus(corpus: Corpus, tokenizer: Tokenizer, root: Path, progress: Progress | None) -> Tokenized:
    """The tokens of a corpus, from the cache or made now. Raises DataError for a corpus without text."""
    key = corpus_key(corpus, tokenizer.fingerprint, root)
    assert key is not None

    def write(temporary: Path) -> Meta:
        return _write(temporary, corpus, tokenizer, progress) | {"content": content_hash(root, corpus.all_files)}

    directory, meta = build_once(root, "tokens", key, write)
    evaluation = _open(directory, "eval", meta) if meta["eval"]["tokens"] else None
    return Tokenized(_open(directory, "train", meta), evaluation, key, meta)


def cached_corpus(corpus: Corpus, tokenizer_fingerprint: str, root: Path) -> tuple[str, Meta] | None:
    """Key and meta data of a corpus that is in the cache already; reads no text and writes nothing."""
    key = corpus_key(corpus, tokenizer_fingerprint, root, read=False)
    meta = find(root, "tokens", key) if key else None
    return None if key is None or meta is None else (key, meta)


def _open(directory: Path, split: Split, meta: Meta) -> TokenSplit:
    counts = meta[split]
    tokens = ArrayFile(directory / f"{split}.bin", meta["dtype"], counts["tokens"])
    documents = ArrayFile(directory / f"{split}.documents.bin", "int64", counts["documents"] + 1)
    return TokenSplit(Tokens([tokens]), documents)


def _write(directory: Path, corpus: Corpus, tokenizer: Tokenizer, progress: Progress | None) -> Meta:
    if tokenizer.eos_token_id is None:
        raise DataError("data.tokenizer: names no end token; add eos_token to its tokenizer_config.json")
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    damage = Damage()
    with (directory / "train.bin").open("wb") as train, (directory / "eval.bin").open("wb") as evaluation:
        writers = {"train": _Writer(train, dtype), "eval": _Writer(evaluation, dtype)}
        documents = _reported(split_documents(corpus, damage), corpus.num_bytes(), progress)
        for chunk in _chunks(documents):
            ids = tokenizer.encode_arrays([document.text for _, document in chunk])
            for name, writer in writers.items():
                part = [each for each, (split, _) in zip(ids, chunk, strict=True) if split == name]
                writer.add(part, tokenizer.eos_token_id)
    for name, writer in writers.items():
        writer.offsets().tofile(directory / f"{name}.documents.bin")
    if not writers["train"].num_tokens:
        raise _nothing_to_train(corpus, has_eval=bool(writers["eval"].num_tokens))
    if damage.count:
        _log.warning("%s", damage)
    counts = {name: writer.counts() for name, writer in writers.items()}
    return {"dtype": dtype, **counts, "origin": corpus.origin, "replaced": str(damage) if damage.count else None}


def _nothing_to_train(corpus: Corpus, *, has_eval: bool) -> DataError:
    if has_eval and not corpus.eval_files:
        return DataError(f"data.eval_fraction: {corpus.eval_fraction} leaves nothing to train on; lower it")
    names = ", ".join(str(source.path) for source in corpus.files[:3])
    return DataError(f"data.files: no text in {len(corpus.files)} files ({names}); they are empty")


def _chunks(documents: Iterable[tuple[Split, Document]]) -> Iterator[list[tuple[Split, Document]]]:
    """Documents in lists of about a million characters: enough for the tokenizer's threads, little memory."""
    chunk: list[tuple[Split, Document]] = []
    size = 0
    for split, document in documents:
        chunk.append((split, document))
        size += len(document.text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _reported(
    documents: Iterable[tuple[Split, Document]], total: int, progress: Progress | None
) -> Iterator[tuple[Split, Document]]:
    done = reported = 0
    for split, document in documents:
        yield split, document
        done = min(done + document.num_bytes, total)
        if progress is not None and done - reported >= total // 200:  # a bar needs no more, and documents may be small
            reported = done
            progress(done, total)
    if progress is not None:
        progress(total, total)


class _Writer:
    """Appends documents, each with its end token, to one token file."""

    def __init__(self, handle: BinaryIO, dtype: str) -> None:
        self._handle = handle
        self._dtype = dtype
        self._lengths: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self.num_tokens = 0

    def add(self, documents: list[NDArray[Any]], end: int) -> None:
        lengths = np.array([len(ids) + 1 for ids in documents], np.int64)
        out = np.empty(int(lengths.sum()), self._dtype)
        start = 0
        for ids in documents:
            out[start : start + len(ids)] = ids
            start += len(ids) + 1
            out[start - 1] = end
        self._handle.write(out.data)
        self._lengths.append(lengths)
        self.num_tokens += len(out)

    def offsets(self) -> NDArray[np.int64]:
        return np.cumsum(np.concatenate(self._lengths))

    def counts(self) -> Meta:
        return {"tokens": self.num_tokens, "documents": sum(map(len, self._lengths)) - 1}

"""Pre-tokenized memory maps (``data=tokens``): checked and indexed once, then read in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forgather_cli.config.schema import TokensSettings
from forgather_cli.data.cache import Meta, build_once, digest, find
from forgather_cli.data.text.corpus import content_hash, find_files
from forgather_cli.data.text.read import SourceFile
from forgather_cli.data.text.tokenize import Progress
from forgather_cli.data.tokens import ArrayFile, Tokenized, Tokens, TokenSplit
from forgather_cli.errors import DataError

_VERSION = 1  # of the index
_CHUNK = 1 << 23  # tokens scanned at once


@dataclass(frozen=True)
class _Scan:
    smallest: int
    largest: int
    borders: NDArray[np.int64]
    """(documents + 1,); without a separator the whole is one document."""


def open_token_files(option: TokensSettings, vocab_size: int, root: Path, progress: Progress | None) -> Tokenized:
    """The token files of an option, with their document borders where ``document_separator`` is set.

    The first use reads every file whole: for its hash, the range of its ids and its documents. Raises DataError for
    files that are no tokens, and for ids outside the vocabulary.
    """
    train, evaluation = _files(option)
    key = _key(option, root)
    assert key is not None
    directory, meta = build_once(root, "indexes", key, lambda path: _write(path, option, train, evaluation, progress))
    _check_range(meta, vocab_size)
    splits = [_open(directory, name, files, meta) for name, files in (("train", train), ("eval", evaluation or train))]
    meta = meta | {"content": content_hash(root, _sources(option))}
    return Tokenized(splits[0], splits[1] if meta["eval"]["tokens"] else None, key, meta)


def cached_token_files(option: TokensSettings, root: Path) -> tuple[str, Meta] | None:
    """Key and meta data of token files that are indexed already; reads no tokens and writes nothing."""
    key = _key(option, root, read=False)
    meta = find(root, "indexes", key) if key else None
    return None if key is None or meta is None else (key, meta)


def _key(option: TokensSettings, root: Path, *, read: bool = True) -> str | None:
    content = content_hash(root, _sources(option), read=read)
    rules = [
        _VERSION,
        len(find_files("data.files", option.files)),
        option.token_dtype,
        option.document_separator,
        option.eval_fraction,
    ]
    return None if content is None else digest([content, rules])


def _sources(option: TokensSettings) -> list[SourceFile]:
    paths = find_files("data.files", option.files)
    paths += find_files("data.eval_files", option.eval_files) if option.eval_files else []
    return [SourceFile(path, path.suffix) for path in paths]


def _files(option: TokensSettings) -> tuple[list[ArrayFile], list[ArrayFile]]:
    train = [_array_file(path, option) for path in find_files("data.files", option.files)]
    evaluation = find_files("data.eval_files", option.eval_files) if option.eval_files else []
    return train, [_array_file(path, option) for path in evaluation]


def _array_file(path: Path, option: TokensSettings) -> ArrayFile:
    if path.suffix == ".npy":
        return _npy(path)
    if path.suffix != ".bin":
        raise DataError(f"{path}: token files are .bin or .npy; use data=text for text")
    itemsize = np.dtype(option.token_dtype).itemsize
    length, rest = divmod(path.stat().st_size, itemsize)
    if rest:
        raise DataError(f"{path}: {path.stat().st_size} bytes are no multiple of {itemsize}; set data.token_dtype")
    return ArrayFile(path, option.token_dtype, length)


def _npy(path: Path) -> ArrayFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a .npy file ({error})") from error
    if array.dtype.kind not in "iu" or not array.flags.c_contiguous:
        raise DataError(f"{path}: expected a C-ordered array of integers, got {array.dtype}")
    return ArrayFile(path, array.dtype.str, array.size, getattr(array, "offset", 0))


def _open(directory: Path, name: str, files: Sequence[ArrayFile], meta: Meta) -> TokenSplit:
    counts = meta[name]
    documents = None
    if counts["documents"] is not None:
        documents = ArrayFile(directory / f"{name}.documents.bin", "int64", counts["documents"] + 1)
    return TokenSplit(Tokens(files, counts["start"], counts["start"] + counts["tokens"]), documents)


def _write(
    directory: Path,
    option: TokensSettings,
    train: Sequence[ArrayFile],
    evaluation: Sequence[ArrayFile],
    progress: Progress | None,
) -> Meta:
    total = sum(file.array.nbytes for file in [*train, *evaluation])
    scan = _scan(train, option.document_separator, progress, total)
    if scan.borders[-1] == 0:
        raise DataError(f"data.files: no tokens in {len(train)} files ({train[0].path}); they are empty")
    borders, scans, start = [scan.borders], [scan], 0
    if evaluation:
        scans.append(_scan(evaluation, option.document_separator, progress, total))
        borders.append(scans[1].borders)
    elif option.eval_fraction:
        start = _border(scan.borders, option)
        borders = _cut(scan.borders, start)
    else:
        borders.append(np.zeros(1, np.int64))
    meta: Meta = {"smallest": min(s.smallest for s in scans), "largest": max(s.largest for s in scans)}
    for name, first, each in zip(("train", "eval"), (0, start), borders, strict=True):
        marked = option.document_separator is not None
        if marked:
            each.tofile(directory / f"{name}.documents.bin")
        meta[name] = {"start": first, "tokens": int(each[-1]), "documents": len(each) - 1 if marked else None}
    return {**meta, "origin": {"files": ", ".join(option.files)}}


def _scan(files: Sequence[ArrayFile], separator: int | None, progress: Progress | None, total: int) -> _Scan:
    smallest, largest, position, done = 0, 0, 0, 0
    ends: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    for chunk in _chunks(files):
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        if separator is not None:
            ends.append(np.flatnonzero(chunk == separator).astype(np.int64) + position + 1)
        position += len(chunk)
        done += chunk.nbytes
        if progress is not None:
            progress(done, total)
    if position and ends[-1][-1:].tolist() != [position]:
        ends.append(np.array([position], np.int64))
    return _Scan(smallest, largest, np.concatenate(ends))


def _chunks(files: Sequence[ArrayFile]) -> Iterator[NDArray[np.int64]]:
    for file in files:
        for start in range(0, file.length, _CHUNK):
            yield file.array[start : start + _CHUNK]


def _border(borders: NDArray[np.int64], option: TokensSettings) -> int:
    """Where evaluation starts: the document border next to the wanted place, if there is one inside."""
    total = int(borders[-1])
    wanted = total - max(1, round(total * option.eval_fraction))
    if wanted <= 0:
        raise DataError(
            f"data.eval_fraction: {option.eval_fraction} of {total} tokens leaves nothing to train on; lower it"
        )
    inside = borders[1:-1]
    return int(inside[np.abs(inside - wanted).argmin()]) if len(inside) else wanted


def _cut(borders: NDArray[np.int64], at: int) -> list[NDArray[np.int64]]:
    before, after = borders[borders < at], borders[borders > at]
    return [np.append(before, at), np.insert(after - at, 0, 0)]


def _check_range(meta: Meta, vocab_size: int) -> None:
    for id_ in (meta["smallest"], meta["largest"]):
        if not 0 <= id_ < vocab_size:
            raise DataError(
                f"data.files: token id {id_} is outside the vocabulary of data.tokenizer ({vocab_size} ids); "
                f"name the tokenizer that made them, or set data.token_dtype"
            )

"""Pre-tokenized memory maps (``data=tokens``): checked and indexed once, then read in place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forgather_cli.config.schema import TokensSettings
from forgather_cli.data.cache import Cache, Meta, Meter, Progress, digest
from forgather_cli.data.text.corpus import content_hash, find_files
from forgather_cli.data.text.read import SourceFile
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.data.tokens import ArrayFile, Tokenized, Tokens, TokenSplit
from forgather_cli.errors import DataError

_VERSION = 1  # of the index
_CHUNK = 1 << 23  # tokens scanned at once
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Scan:
    smallest: int
    largest: int
    borders: NDArray[np.int64]
    """(documents + 1,); without a separator the whole is one document."""


def open_token_files(option: TokensSettings, tokenizer: Tokenizer, cache: Cache) -> Tokenized:
    """The token files of an option, with their document borders where ``document_separator`` is set.

    The first use reads every file whole: for its hash, the range of its ids and its documents. Raises DataError for
    files that are no tokens, and for ids outside the vocabulary.
    """
    train = _array_files("data.files", option.files, option.token_dtype)
    evaluation = [] if not option.eval_files else _array_files("data.eval_files", option.eval_files, option.token_dtype)
    content = content_hash(cache, [SourceFile(file.path, file.path.suffix) for file in (*train, *evaluation)])
    rules = [_VERSION, len(train), option.token_dtype or "uint16", option.document_separator, option.eval_fraction]
    key = digest([content, rules])
    directory, meta = cache.build_once(
        "indexes", key, lambda path: _write(path, option, train, evaluation, cache.progress)
    )
    for id_ in (meta["smallest"], meta["largest"]):
        if not 0 <= id_ < tokenizer.vocab_size:
            raise DataError(
                f"data.files: token id {id_} is outside the vocabulary of data.tokenizer ({tokenizer.vocab_size} ids); "
                f"name the tokenizer that made them, or set data.token_dtype"
            )
    prefix = list(tokenizer.prefix_tokens)
    if train[0].array[: len(prefix)].tolist() != prefix:
        _log.warning(
            "data.add_bos: the tokenizer writes %s before a text, and %s begins without; a model that was pretrained "
            "with it misses it: write it before each document, or set data.add_bos=false",
            tokenizer.decode(prefix),
            train[0].path,
        )
    splits = [_open(directory, name, files, meta) for name, files in (("train", train), ("eval", evaluation or train))]
    return Tokenized(splits[0], splits[1] if meta["eval"]["tokens"] else None, key, meta | {"content": content})


def _array_files(setting: str, patterns: Sequence[str], token_dtype: str | None) -> list[ArrayFile]:
    """Raises DataError for files that are no tokens."""
    found: list[ArrayFile] = []
    dtype = token_dtype or "uint16"
    itemsize = np.dtype(dtype).itemsize
    for path in find_files(setting, patterns):
        if path.suffix == ".npy":
            try:
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: cannot be read as a .npy file ({error})") from error
            if array.dtype.kind not in "iu" or not array.flags.c_contiguous:
                raise DataError(f"{path}: expected a C-ordered array of integers, got {array.dtype}")
            found.append(ArrayFile(path, array.dtype.str, array.size, array.offset))
        elif path.suffix == ".bin":
            length, rest = divmod(path.stat().st_size, itemsize)
            if rest:
                raise DataError(
                    f"{path}: {path.stat().st_size} bytes are no multiple of {itemsize}; set data.token_dtype"
                )
            found.append(ArrayFile(path, dtype, length))
            if token_dtype is None and length % 2 == 0:
                _check_width(found[-1])
        else:
            raise DataError(f"{path}: token files are .bin or .npy; use data=text for text")
    return found


def _check_width(file: ArrayFile) -> None:
    """Raise DataError for what looks like wider ids: every second number is 0, of large ids little, of negative ones
    0xffff. The file is looked at in 64 places."""
    places = range(0, max(file.length, 1), max(file.length >> 6, 1024) // 4 * 4)
    low, high = np.concatenate([file.array[start : start + 1024] for start in places]).reshape(-1, 2).T
    # fewer may be the ids of a small vocabulary
    differ = len(np.unique(low)) > 64 if high.any() else len(low) >= 8 and low.any()
    if differ and ((high < 16) | (high == 0xFFFF)).all():
        is_long = file.length % 4 == 0 and np.isin([low[1::2], high[1::2]], (0, 0xFFFF)).all()
        dtype = "int64" if is_long else "int32" if (high == 0xFFFF).any() else "uint32"
        why = f"every second number of 16 bits is next to nothing, as of {dtype} ids"
        raise DataError(f"{file.path}: {why}; set data.token_dtype={dtype}, or uint16 if these are the ids")


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
    meter = Meter(progress, sum(file.array.nbytes for file in [*train, *evaluation]))
    scan = _scan(train, option.document_separator, meter)
    if scan.borders[-1] == 0:
        raise DataError(f"data.files: no tokens in {len(train)} files ({train[0].path}); they are empty")
    borders, scans, start = [scan.borders], [scan], 0
    if evaluation:
        scans.append(_scan(evaluation, option.document_separator, meter))
        borders.append(scans[1].borders)
    elif option.eval_fraction:
        start = _border(scan.borders, option)
        before, after = scan.borders[scan.borders < start], scan.borders[scan.borders > start]
        borders = [np.append(before, start), np.insert(after - start, 0, 0)]
    else:
        borders.append(np.zeros(1, np.int64))
    meter.end()
    meta: Meta = {"smallest": min(s.smallest for s in scans), "largest": max(s.largest for s in scans)}
    for name, first, each in zip(("train", "eval"), (0, start), borders, strict=True):
        marked = option.document_separator is not None
        if marked:
            each.tofile(directory / f"{name}.documents.bin")
        meta[name] = {"start": first, "tokens": int(each[-1]), "documents": len(each) - 1 if marked else None}
    return {**meta, "origin": {"files": ", ".join(option.files)}}


def _scan(files: Sequence[ArrayFile], separator: int | None, meter: Meter) -> _Scan:
    smallest, largest, position = 0, 0, 0
    ends: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    chunks = (file.array[start : start + _CHUNK] for file in files for start in range(0, file.length, _CHUNK))
    for chunk in chunks:
        smallest, largest = min(smallest, int(chunk.min())), max(largest, int(chunk.max()))
        if separator is not None:
            ends.append(np.flatnonzero(chunk == separator).astype(np.int64) + position + 1)
        position += len(chunk)
        meter.add(chunk.nbytes)
    if position and ends[-1][-1:].tolist() != [position]:
        ends.append(np.array([position], np.int64))
    return _Scan(smallest, largest, np.concatenate(ends))


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

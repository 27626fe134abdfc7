"""``data=seq2seq``: pairs of a source and a target from files of records, as rows.

In the cache the tokens of a pair lie one after the other, and its first target says where the second side begins.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forgather_cli.config.schema import Seq2SeqSettings
from forgather_cli.data.cache import Cache, Meta, Meter, digest
from forgather_cli.data.paired.denoise import Example
from forgather_cli.data.paired.rows import Shape, batch_of_rows, best_fit_in_two
from forgather_cli.data.samples import one_of
from forgather_cli.data.text.corpus import content_hash, find_records, with_splits
from forgather_cli.data.text.read import (
    BadRow,
    Damage,
    FilePart,
    SourceFile,
    chunks,
    encodable,
    read_records,
    sound_rows,
)
from forgather_cli.data.text.tokenizer import Tokenizer, end_of
from forgather_cli.data.tokens import SPLITS, Split, TargetsWriter, Tokenized, TokenSplit, cached_tokens, dtype_of
from forgather_cli.errors import DataError

Ints = NDArray[np.int64]
_VERSION = 1  # of the files and of the rules that make tokens of a record
_TOGETHER = 2048  # pairs that are packed into rows together
_log = logging.getLogger(__name__)


@dataclass
class _Pair:
    key: str
    """What decides its split."""
    text: str
    """Source and target, for the size of a chunk."""
    source: str
    target: str
    num_bytes: int
    """Of the file, for progress."""
    line: int
    """Of its file."""
    file: int = 0
    """Its number, files of evaluation after those of training."""
    split: Split = "train"


def tokenize_pairs(option: Seq2SeqSettings, tokenizer: Tokenizer, cache: Cache) -> Tokenized:
    """The tokens of the pairs, from the cache or made now. Raises DataError, with file and line, for bad records."""
    train, held_out = find_records(option)
    eval_fraction = 0.0 if held_out else option.eval_fraction
    content = content_hash(cache, (*train, *held_out))
    rules = [_VERSION, len(train), eval_fraction, option.input_key, option.target_key, option.on_bad_row]
    end = end_of(tokenizer)

    def write(directory: Path) -> Meta:
        damage, dtype = Damage(), dtype_of(tokenizer.vocab_size)
        tokenizer.prepare(())
        meter = Meter(cache.progress, sum(source.path.stat().st_size for source in (*train, *held_out)))
        of_eval = _read(option, held_out, damage, len(train))
        pairs = with_splits(_read(option, train, damage, 0), of_eval, eval_fraction)
        with contextlib.ExitStack() as files:
            writers = {split: TargetsWriter(directory / split, dtype, files) for split in SPLITS}
            for chunk in chunks(pairs, meter.add):
                sources = tokenizer.encode_arrays([pair.source for pair in chunk])
                targets = tokenizer.encode_arrays([pair.target for pair in chunk])
                for pair, source, target in zip(chunk, sources, targets, strict=True):
                    ids = np.concatenate([source, target, [end]])
                    writers[pair.split].add(ids, np.arange(len(ids)) >= len(source), (pair.file, pair.line))
            counts: dict[str, Any] = {name: writer.finish() for name, writer in writers.items()}
        meter.end()
        if not counts["train"]["documents"]:
            names = ", ".join(str(source.path) for source in train[:3])
            raise DataError(f"data.files: no pair to train on in {len(train)} files ({names}); give more")
        for line in damage.lines().values():
            _log.warning("%s", line)
        origin = {"files": ", ".join(option.files)}
        return {"dtype": dtype, **counts, "origin": origin, **damage.lines(), "content": content}

    key = digest(["pairs", content, rules, tokenizer.fingerprint])
    return cached_tokens(*cache.build_once("tokens", key, write), has_targets=True)


def _read(option: Seq2SeqSettings, files: Sequence[SourceFile], damage: Damage, first: int) -> Iterator[_Pair]:
    """``first``: the number of the first file."""
    for number, source in enumerate(files, first):

        def rows(part: FilePart, path: Path = source.path) -> Iterator[_Pair | BadRow]:
            for record in read_records(path, damage):
                yield record if isinstance(record, BadRow) else _pair(option, record)

        for pair in sound_rows(source.path, rows, damage, skip_bad=option.on_bad_row == "skip"):
            pair.file = number
            yield pair


def _pair(option: Seq2SeqSettings, record: Any) -> _Pair | BadRow:
    texts: list[str] = []
    for setting in ("input_key", "target_key"):
        key = getattr(option, setting)
        text = record.value.get(key)
        if key not in record.value:
            keys = ", ".join(map(str, record.value)) or "none"
            return BadRow(record.line, f"no key {key!r} (its keys: {keys}); set data.{setting}")
        if not isinstance(text, str):
            return BadRow(record.line, f"{key!r} is {type(text).__name__}, not text")
        if not text:
            return BadRow(record.line, f"{key!r} is empty, so there is nothing to {'read' if not texts else 'learn'}")
        texts.append(encodable(text))
    source, target = texts
    return _Pair(json.dumps(texts), source + target, source, target, record.num_bytes, record.line)


class PairRows:
    """Rows of a split's pairs: row i is the same in every epoch."""

    def __init__(self, split: TokenSplit, option: Seq2SeqSettings, shape: Shape) -> None:
        assert split.documents is not None
        assert split.first_targets is not None
        borders, sources = split.documents.array, split.first_targets.array
        targets = np.diff(borders) - sources
        most = np.array([[option.max_encoder_length], [option.max_decoder_length]])
        sizes = np.minimum(np.stack([sources, targets]), most)
        is_long = (np.stack([sources, targets]) > most).any(0)
        keep = np.flatnonzero(~is_long) if option.too_long == "drop" else np.arange(len(sources))
        self.num_long = int(is_long.sum())
        self.num_dropped = len(sources) - len(keep)
        self.num_cut = self.num_long - self.num_dropped
        self._tokens, self._borders, self._firsts, self._sizes = split.tokens, borders, sources, sizes
        self._cut = np.stack([sources, targets]) - sizes
        self.shape = shape
        self.rows: list[list[int]] = [[int(pair)] for pair in keep]
        if shape.packing == "best_fit":
            self.rows = []
            for start in range(0, len(keep), _TOGETHER):
                some = keep[start : start + _TOGETHER]
                packed = best_fit_in_two(sizes[0, some], sizes[1, some], shape.encoder, shape.decoder)
                self.rows += [some[row].tolist() for row in packed]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return one_of(self, index)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return batch_of_rows([[self._example(pair) for pair in self.rows[index]] for index in indices], self.shape)

    def pairs(self, index: int) -> list[tuple[int, int, int]]:
        """Of each pair in a row: its number, the tokens of its target, and those of both sides that were cut off."""
        return [(pair, int(self._sizes[1, pair]), int(self._cut[:, pair].sum())) for pair in self.rows[index]]

    def _example(self, pair: int) -> Example:
        sides, begin = [], int(self._borders[pair])
        for size, start in zip(self._sizes[:, pair], (begin, begin + int(self._firsts[pair])), strict=True):
            ids = np.empty(int(size), np.int64)
            self._tokens.read(start, ids)
            sides.append(ids)
        return Example(sides[0], sides[1], task=0)

"""Documents that come in order, tokenized and packed on the fly, and a position from which reading resumes exactly.

Documents are read by blocks, and a block is encoded and packed by chunks. The position is the source's state before the
present block, how far in it the present chunk begins, the tokens that earlier chunks have left over (fewer than a
sample), and the number of samples returned from the chunk. To resume, the block is read again and up to one chunk
encoded again; nothing before the block is read again.

A shuffled stream draws the order within each block by (seed, epoch, block): a buffer is filled, emptied in random
order, and filled again. The sliding buffer of ``datasets`` mixes a little further, but an exact resume would have to
store it or refill it from the start; its own resume loses its content (datasets 5.2, ``shuffle``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from forgather_cli.config.schema import DatasetSettings, HfSettings
from forgather_cli.data.packing import PackingTable, best_fit, in_turn, pieces_of
from forgather_cli.data.samples import Batched, ConcatDataset, PackedDataset
from forgather_cli.data.text.encode import joined
from forgather_cli.data.text.tokenizer import Tokenizer, around_documents
from forgather_cli.data.tokens import ArrayFile, Tokens
from forgather_cli.errors import DataError, TrainingError
from forgather_cli.labels import LENGTHS

_CHUNK = 1 << 20  # characters of documents that are encoded and packed together
_MANY = 1024  # documents, at most as many
_log = logging.getLogger(__name__)
Ints = NDArray[np.int64]
Sample = dict[str, Tensor]


@dataclass
class _Position:
    source: dict[str, Any]
    """Before the block."""
    block: int = 0
    documents: int = 0
    """Of the block, before the chunk."""
    left: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens before the chunk that are in no sample yet."""
    starts: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Where documents start in them."""
    targets: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of chats: 1 for each of them that is a target."""
    emitted: int = 0
    """Samples handed out of the chunk."""


class StreamDocuments(Protocol):
    """What a stream's rows are to the model."""

    def read(self, rows: Iterator[dict[str, Any]]) -> Iterator[Any]:
        """The documents of rows, in order. Raises DataError for a row that has none."""

    def size(self, document: Any) -> int:
        """Characters."""

    def encoded(self, documents: Sequence[Any]) -> tuple[Ints, Ints, Ints | None]:
        """Tokens one after the other, how many each document has of them, and of each whether it is a target; None:
        all are, and documents may be cut anywhere."""


class TextDocuments:
    """Rows with a column of text, which is learned whole."""

    def __init__(self, option: HfSettings, tokenizer: Tokenizer) -> None:
        self._option, self._tokenizer, self._around = option, tokenizer, around_documents(tokenizer)

    def read(self, rows: Iterator[dict[str, Any]]) -> Iterator[str]:
        key, skipped = self._option.text_key, 0
        for row in rows:
            text = row.get(key)
            if text is not None and not isinstance(text, str):
                raise DataError(f"data.text_key: column {key!r} holds {type(text).__name__}, not text")
            if text is None and key not in row:
                raise DataError(f"data.text_key: no column {key!r}, the dataset has {', '.join(row)}")
            if text is None and self._option.on_bad_row != "skip":
                raise DataError(
                    f"data.text_key: {key!r} of a row is null; leave such rows out with data.on_bad_row=skip"
                )
            if text is None:
                skipped += 1
                if is_told(skipped):
                    _log.warning(
                        "data.on_bad_row=skip: %d rows of the stream left out, %r is null in them", skipped, key
                    )
            if text:
                yield text

    def size(self, document: str) -> int:
        return len(document)

    def encoded(self, documents: Sequence[str]) -> tuple[Ints, Ints, None]:
        found = self._tokenizer.encode_arrays(documents) if documents else []
        return *joined(found, self._around, "int64"), None


def is_told(count: int) -> bool:
    """Whether the ``count``-th of many like things is said: the first ones, and seldom then."""
    return count in (1, 10, 100) or count % 1000 == 0


class TokenStream(IterableDataset[Sample]):
    """Samples of an ``IterableDataset`` of the ``datasets`` library, whose rows are ``documents``.

    A position is of the same data, settings and epoch. Ranks and workers divide the files of the source among them.
    The documents of training are shuffled by ``seed``; evaluation, and chats, leave out no token, so that the last
    sample is padded.
    """

    def __init__(
        self,
        source: Any,
        option: DatasetSettings,
        tokenizer: Tokenizer,
        documents: StreamDocuments,
        *,
        seed: int,
        is_eval: bool,
    ) -> None:
        self._source, self._option, self._tokenizer, self._documents = source, option, tokenizer, documents
        self._seed, self._is_eval = seed, is_eval
        self._beginning: dict[str, Any] = source.state_dict()
        self._epoch = 0
        self._next: _Position | None = None  # where the next pass begins
        self._position = _Position(self._beginning)
        self._has_begun = False

    @property
    def num_shards(self) -> int:
        return int(self._source.num_shards)

    def shard(self, num_shards: int, index: int) -> TokenStream:
        """A part of the source's files."""
        source = self._source.shard(num_shards=num_shards, index=index)
        given = self._option, self._tokenizer, self._documents
        return TokenStream(source, *given, seed=self._seed, is_eval=self._is_eval)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    # -------------------------------------------------------------------------------------------------------- position

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands; arrays as bytes, which loaders with workers can compare."""
        at = self._position
        arrays = {"left": at.left.tobytes(), "starts": at.starts.tobytes()}
        if len(at.targets):
            arrays["targets"] = at.targets.tobytes()
        return {"source": at.source, "block": at.block, "documents": at.documents, "emitted": at.emitted, **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = [name for name in ("left", "starts", "targets") if name in state]
        arrays: dict[str, Any] = {name: np.frombuffer(state[name], np.int64) for name in names}
        self._next = self._position = _Position(**{**state, **arrays})

    # --------------------------------------------------------------------------------------------------------- reading

    def __iter__(self) -> Iterator[Sample]:
        at = self._position = self._next or _Position(self._beginning)
        self._next = None
        self._source.set_epoch(self._epoch)
        self._source.load_state_dict({**at.source, "epoch": self._epoch})  # otherwise it continues the last pass
        documents = self._read()
        while block := self._block(documents, at.block):
            while at.documents < len(block):
                chunk = self._chunk(block[at.documents :])
                yield from self._samples(at, chunk, is_end=False)
                at.documents += len(chunk)
            at.source, at.block, at.documents = self._source.state_dict(), at.block + 1, 0
        yield from self._samples(at, [], is_end=True)
        self._position = _Position(self._beginning)

    def _rows(self) -> Iterator[dict[str, Any]]:
        rows = iter(self._source)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # of the library, of file formats and of whatever brings the bytes
                first = (str(error).splitlines() or [type(error).__name__])[0]
                kind = TrainingError if self._has_begun else DataError
                what = f"data={self._option.type}: the stream cannot be read on ({first})"
                raise kind(f"{what}; mend it, and resume") from error
            yield row

    def _read(self) -> Iterator[Any]:
        try:
            yield from self._documents.read(self._rows())
        except DataError as error:
            if self._has_begun:
                raise TrainingError(str(error)) from error
            raise

    def _block(self, documents: Iterator[Any], number: int) -> list[Any]:
        size = self._option.shuffle_buffer
        if not size or self._is_eval:
            return self._chunk(documents)
        found = list(islice(documents, size))
        order = np.random.default_rng([self._seed, self._epoch, number]).permutation(len(found))
        return [found[each] for each in order]

    def _chunk(self, documents: Iterator[Any] | list[Any]) -> list[Any]:
        """The first ones: up to a million characters and some, or 1024."""
        found: list[Any] = []
        size = 0
        for document in islice(documents, _MANY):
            found.append(document)
            size += self._documents.size(document)
            if size >= _CHUNK:
                break
        return found

    def _samples(self, at: _Position, chunk: Sequence[Any], *, is_end: bool) -> Iterator[Sample]:
        """Samples of a chunk that were not handed out yet; then ``at`` has the tokens that are left over."""
        ids, lengths, targets = self._documents.encoded(chunk)
        starts = np.concatenate([at.starts, np.cumsum(lengths) - lengths + len(at.left)])
        ids = np.concatenate([at.left, ids])
        if targets is None:
            packed, used = self._packed(ids, starts, keep_tail=is_end and self._is_eval)
        else:
            targets = np.concatenate([at.targets, targets])
            packed, used = self._packed_chats(ids, starts, targets, keep_tail=is_end)
        for number in range(at.emitted, len(packed)):
            at.emitted, self._has_begun = number + 1, True
            sample = packed[number]
            if self._is_eval:  # of all or none in a batch, which may end with the split's padded one
                sample.setdefault(LENGTHS, torch.tensor(self._option.seq_len))
            yield sample
        at.left, at.starts, at.emitted = ids[used:], starts[starts >= used] - used, 0
        if targets is not None:
            at.targets = targets[used:]

    def _packed(self, ids: Ints, starts: Ints, *, keep_tail: bool) -> tuple[Batched, int]:
        """Samples of documents that may be cut anywhere, and how many of the tokens are in them."""
        length, packing, isolate = self._option.seq_len, self._option.packing, self._option.isolate_documents
        tokens, pad = Tokens([ArrayFile.of(ids)]), self._tokenizer.pad_token_id
        prefix = self._tokenizer.prefix_tokens
        if packing == "concat":
            documents = ArrayFile.of(starts)
            rows = ConcatDataset(
                tokens, length, pad, keep_tail=keep_tail, documents=documents, isolate=isolate, prefix=prefix
            )
            return rows, len(rows) * length
        table = _table(np.append(starts, len(ids)), length, packing)
        return PackedDataset(tokens, table, length, pad, isolate=isolate, prefix=prefix), len(ids)

    def _packed_chats(self, ids: Ints, starts: Ints, targets: Ints, *, keep_tail: bool) -> tuple[Batched, int]:
        """As ``_packed``, of conversations of at most ``seq_len`` tokens."""
        length, is_padded = self._option.seq_len, self._option.packing == "pad"
        isolate = self._option.isolate_documents and not is_padded  # alone in a row nothing sees it
        # what is left over begins a row, mostly in the middle of a conversation
        starts = starts if is_padded or not len(ids) else np.union1d([0], starts)
        lengths, rows, used = np.diff(starts, append=len(ids)), np.arange(len(starts) + 1), len(ids)
        if not is_padded:
            starts, lengths, rows = in_turn(starts, lengths, length)
            used = used if keep_tail else used // length * length
            rows = rows[: -(-used // length) + 1]
        table = PackingTable(ArrayFile.of(rows), ArrayFile.of(starts), ArrayFile.of(lengths), {})
        tokens, learned = (Tokens([ArrayFile.of(each)]) for each in (ids, targets))
        pad = self._tokenizer.pad_token_id
        return PackedDataset(tokens, table, length, pad, isolate=isolate, targets=learned, restart=isolate), used


def _table(borders: Ints, seq_len: int, packing: str) -> PackingTable:
    """Rows of a chunk, in the order of the first document in each: best fit puts the longest first."""
    starts, lengths = pieces_of(borders, seq_len)
    rows = np.arange(len(starts) + 1)
    if packing == "best_fit":
        order, rows = best_fit(lengths, seq_len)
        groups = sorted(np.split(order, rows[1:-1]), key=lambda row: int(row.min())) if len(order) else []
        order = np.concatenate(groups) if groups else order
        rows = np.append(0, np.cumsum([len(row) for row in groups])).astype(np.int64)
        starts, lengths = starts[order], lengths[order]
    counts = {"rows": len(rows) - 1, "pieces": len(starts)}
    return PackingTable(ArrayFile.of(rows), ArrayFile.of(starts), ArrayFile.of(lengths), counts)

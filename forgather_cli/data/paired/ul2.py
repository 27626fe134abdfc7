"""``data=ul2``: a corpus or a stream, cut into windows, denoised, and packed into rows.

Windows are read by blocks, and the examples of a block are packed together. The position is the block, with the
source's state before it where that is a stream, and the number of rows handed out of it: to resume, the block is made
again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from forgather_cli.data.order import Order
from forgather_cli.data.paired.denoise import Denoising, Example
from forgather_cli.data.paired.rows import Shape, batch_of_rows, best_fit_in_two, padded_batch
from forgather_cli.data.text.token_stream import TokenStream
from forgather_cli.data.tokens import Tokens

Ints = NDArray[np.int64]
Window = tuple[list[int], Ints]
"""What the draws for it follow from, beside seed and epoch; and its tokens."""


class Windows(Protocol):
    """Windows of tokens by blocks, from a position on."""

    def blocks(self, epoch: int, first: int, state: Any, size: int) -> Iterator[tuple[list[Window], Any]]:
        """Blocks of ``size`` windows from number ``first`` on, each with the source's state before the block after it;
        ``state`` is that before the first."""

    def shard(self, num_shards: int, index: int) -> Windows: ...


class CorpusWindows:
    """Windows of ``length`` tokens of a split, those of training in an order that follows from (seed, epoch)."""

    def __init__(
        self, tokens: Tokens, length: int, *, seed: int, is_eval: bool, part: tuple[int, int] = (0, 1)
    ) -> None:
        self._tokens, self._length, self._seed, self._is_eval, self._part = tokens, length, seed, is_eval, part

    def shard(self, num_shards: int, index: int) -> CorpusWindows:
        """Every ``num_shards``-th block."""
        first, step = self._part
        part = (first + step * index, step * num_shards)
        return CorpusWindows(self._tokens, self._length, seed=self._seed, is_eval=self._is_eval, part=part)

    def blocks(self, epoch: int, first: int, state: Any, size: int) -> Iterator[tuple[list[Window], Any]]:
        count = -(-len(self._tokens) // self._length)
        order = Order(count, self._seed, epoch, shuffle=not self._is_eval)
        begin, step = self._part
        for block in range(begin + first * step, -(-count // size), step):
            yield [([number], self._read(number)) for number in order[block * size : (block + 1) * size]], None

    def _read(self, number: int) -> Ints:
        start = number * self._length
        window = np.empty(min(self._length, len(self._tokens) - start), np.int64)
        self._tokens.read(start, window)
        return window


class StreamWindows:
    """The samples of a stream of text, in its order."""

    def __init__(self, stream: TokenStream, reader: int = 0) -> None:
        self._stream, self._reader = stream, reader
        self._beginning = copy.deepcopy(stream.state_dict())

    @property
    def num_shards(self) -> int:
        return self._stream.num_shards

    def shard(self, num_shards: int, index: int) -> StreamWindows:
        """Some of the source's files."""
        return StreamWindows(self._stream.shard(num_shards, index), self._reader * num_shards + index)

    def blocks(self, epoch: int, first: int, state: Any, size: int) -> Iterator[tuple[list[Window], Any]]:
        worker = get_worker_info()  # the library gives each worker files of its own
        reader = [self._reader, 0 if worker is None else worker.id]
        self._stream.set_epoch(epoch)
        self._stream.load_state_dict(self._beginning if state is None else state)
        samples, number = iter(self._stream), first * size
        while block := list(islice(samples, size)):
            # a last sample may be padded, without targets there
            found = [each["input_ids"][each["labels"] >= 0].numpy() for each in block]
            yield (
                [([*reader, number + at], window) for at, window in enumerate(found)],
                copy.deepcopy(self._stream.state_dict()),
            )
            number += len(block)


class DenoisedRows(IterableDataset[dict[str, Tensor]]):
    """Rows of denoised windows.

    What becomes of a window follows from (seed, epoch, its number), in evaluation from (seed, its number). The rows of
    a block come in an order drawn from (seed, epoch, block).
    """

    def __init__(
        self, windows: Windows, denoising: Denoising, shape: Shape, *, block: int, seed: int, is_eval: bool
    ) -> None:
        self.task_names = denoising.names
        """Of the denoisers, by the numbers in ``task_ids``."""
        self._windows, self._denoising, self._shape = windows, denoising, shape
        self._block, self._seed, self._is_eval = block, seed, is_eval
        self._epoch = 0
        self._at: dict[str, Any] = {"block": 0, "row": 0, "source": None}
        self._resumes = False

    @property
    def num_shards(self) -> int:
        return getattr(self._windows, "num_shards", 1 << 30)

    def shard(self, num_shards: int, index: int) -> DenoisedRows:
        """A part of the blocks, or of the stream's files."""
        windows = self._windows.shard(num_shards, index)
        options: Any = {"block": self._block, "seed": self._seed, "is_eval": self._is_eval}
        return DenoisedRows(windows, self._denoising, self._shape, **options)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Rows as a batch."""
        return padded_batch(samples, self._shape.pad_token_id)

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands: rows handed out of a block, and the source's state before it."""
        return dict(self._at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at, self._resumes = dict(state), True

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self._resumes:
            self._at = {"block": 0, "row": 0, "source": None}
        self._resumes = False
        at, windows, worker = self._at, self._windows, get_worker_info()
        if worker is not None and isinstance(windows, CorpusWindows):
            windows = windows.shard(worker.num_workers, worker.id)
        for block, after in windows.blocks(self._epoch, at["block"], at["source"], self._block):
            rows = self.rows(block, at["block"])
            for number in range(at["row"], len(rows)):
                at["row"] = number + 1
                yield {name: value[0] for name, value in batch_of_rows([rows[number]], self._shape).items()}
            at.update(block=at["block"] + 1, row=0, source=after)
        at.update(block=0, row=0, source=None)

    def rows(self, block: list[Window], number: int) -> list[list[Example]]:
        """The rows of a block, with the block's number in this reader."""
        when = [] if self._is_eval else [self._epoch]
        found = [
            example
            for key, window in block
            for example in self._denoising.examples(window, np.random.default_rng([self._seed, *when, *key]))
        ]
        if self._shape.packing == "pad":
            return [[example] for example in found]
        sources = np.array([len(each.source) for each in found], np.int64)
        targets = np.array([len(each.target) for each in found], np.int64)
        rows = best_fit_in_two(sources, targets, self._shape.encoder, self._shape.decoder)
        order = np.random.default_rng([self._seed, *when, number, 1 << 20]).permutation(len(rows))
        return [[found[each] for each in rows[row]] for row in order]

"""Data whose samples have numbers: each rank reads its slice of every global batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from forgather_cli.data.collate import Batch, Step, step_of
from forgather_cli.data.fetch import Fetcher
from forgather_cli.data.order import Order
from forgather_cli.data.rounds import Position, Share
from forgather_cli.data.stream import batches_of
from forgather_cli.errors import DataError


class MapSteps:
    """Steps of map-style data."""

    def __init__(self, length: int, share: Share, fetcher: Fetcher, seed: int, *, shuffle: bool) -> None:
        self._length, self._share, self._fetcher, self._seed, self._shuffle = length, share, fetcher, seed, shuffle
        if length == 0:
            raise DataError("train_dataset: has no samples")
        if length < share.global_batch and share.drop_last:
            raise DataError(
                f"global_batch_size: {share.global_batch} sequences per step, but the training data has {length}; "
                f"lower it, or set dataloader_drop_last=false"
            )

    def __len__(self) -> int:
        return self._share.num_rounds(self._length, self._share.global_batch)

    def num_microbatches(self) -> int:
        shares = (self._share.of(stop - start) for start, stop in self._global_batches(0))
        return sum(-(-(last - first) // self._share.micro_batch) for first, last in shares)

    def check(self, state: Position) -> None:
        if state["sample"] > self._length:
            raise DataError(
                f"resume_from_checkpoint: the data position is sample {state['sample']}, but the training data has "
                f"{self._length}; resume on the same data or with ignore_data_skip=true"
            )

    def read(self, position: Position) -> Iterator[tuple[Step, Position]]:
        epoch, start = position["epoch"], position["sample"]
        order = Order(self._length, self._seed, epoch, shuffle=self._shuffle)
        plan = (indices for span in self._global_batches(start) for indices in self._microbatches(order, *span))
        batches = self._fetcher.fetch(epoch, plan)
        for begin, stop in self._global_batches(start):
            first, last = self._share.of(stop - begin)
            count = -(-(last - first) // self._share.micro_batch)
            yield step_of(list(islice(batches, count))), {"epoch": epoch, "sample": stop}

    def between(self, start: Position, stop: Position) -> list[int]:
        """Samples that steps from one position to a later one are made of, in order; epochs between as whole ones."""
        found: list[int] = []
        for epoch in range(start["epoch"], stop["epoch"] + 1):
            begin = start["sample"] if epoch == start["epoch"] else 0
            end = stop["sample"] if epoch == stop["epoch"] else begin + self._used_of(self._length - begin)
            found += Order(self._length, self._seed, epoch, shuffle=self._shuffle)[begin:end]
        return found

    def _used_of(self, left: int) -> int:
        """Samples that still fill steps, of those left of an epoch."""
        return left - left % self._share.global_batch if self._share.drop_last else left

    def _global_batches(self, start: int) -> Iterator[tuple[int, int]]:
        size = self._share.global_batch
        while start < self._length and (start + size <= self._length or not self._share.drop_last):
            yield start, min(start + size, self._length)
            start += size

    def _microbatches(self, order: Order, start: int, stop: int) -> list[list[int]]:
        first, last = self._share.of(stop - start)
        return batches_of(order[start + first : start + last], self._share.micro_batch)

    def close(self) -> None:
        self._fetcher.close()


class MapBatches:
    """Batches of the samples [start, stop) of a map-style dataset."""

    def __init__(self, fetcher: Fetcher, span: tuple[int, int], batch_size: int) -> None:
        self.fetcher, self._span, self._batch_size = fetcher, span, batch_size

    def __len__(self) -> int:
        return -(-(self._span[1] - self._span[0]) // self._batch_size)

    def read(self) -> Iterator[Batch]:
        return self.fetcher.fetch(0, batches_of(list(range(*self._span)), self._batch_size))

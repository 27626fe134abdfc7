"""Data whose samples have numbers: each rank reads its slice of every global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.loaders.collate import Batch, Step, step_of
from forgather_cli.data.loaders.iterable import Position, Share
from forgather_cli.data.loaders.stream import batches_of
from forgather_cli.data.loaders.workers import Fetcher
from forgather_cli.data.order import LengthGroupedOrder, Order
from forgather_cli.errors import DataError


def lengths_of(dataset: Any, column: str) -> NDArray[np.int64]:
    """Each sample's length: that column's value where the dataset has such a column, else the number of its
    ``input_ids``, for which every sample is read once. Raises DataError.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        try:
            return np.array([int(length) for length in dataset[column][:]])
        except (TypeError, ValueError) as error:
            raise DataError(
                f"length_column_name: the training data's column {column!r} must hold numbers ({error}); name another"
            ) from error
    lengths = np.empty(len(dataset), dtype=np.int64)
    many = getattr(dataset, "__getitems__", None)
    for numbers in batches_of(list(range(len(dataset))), 1024):
        samples = many(numbers) if many else None  # a quarter of the time with Hugging Face's datasets
        if not isinstance(samples, list):
            samples = [dataset[number] for number in numbers]
        for number, sample in zip(numbers, samples, strict=True):
            if not isinstance(sample, Mapping) or "input_ids" not in sample:
                raise DataError(
                    f"train_sampling_strategy: group_by_length needs input_ids, and sample {number} has none; give the "
                    "data a column of lengths and its name as length_column_name, or choose random"
                )
            lengths[number] = len(sample["input_ids"])
    return lengths


class MapSteps:
    """Steps of map-style data; ``lengths`` (samples,) group it."""

    def __init__(
        self,
        length: int,
        share: Share,
        fetcher: Fetcher,
        seed: int,
        *,
        shuffle: bool,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self._length, self._share, self._fetcher, self._seed, self._shuffle = length, share, fetcher, seed, shuffle
        self._lengths = lengths
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
        order = self._order(epoch)
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
            found += self._order(epoch)[begin:end]
        return found

    def _order(self, epoch: int) -> Order | LengthGroupedOrder:
        if self._lengths is not None:
            return LengthGroupedOrder(self._lengths, self._seed, epoch)
        return Order(self._length, self._seed, epoch, shuffle=self._shuffle)

    def _used_of(self, left: int) -> int:
        """Samples that still fill steps, of those left of an epoch."""
        return left - left % self._share.global_batch if self._share.drop_last else left

    def _global_batches(self, start: int) -> Iterator[tuple[int, int]]:
        size = self._share.global_batch
        while start < self._length and (start + size <= self._length or not self._share.drop_last):
            yield start, min(start + size, self._length)
            start += size

    def _microbatches(self, order: Order | LengthGroupedOrder, start: int, stop: int) -> list[list[int]]:
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

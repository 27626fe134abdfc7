"""Map-style data, whose samples have numbers: each rank reads its slice of every global batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, tee
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from forgather_cli.data.loaders.collate import (
    Batch,
    CollateFn,
    Position,
    Share,
    TrainingSteps,
    as_batch,
    default_collate,
    is_batch,
    microbatches,
)
from forgather_cli.data.loaders.workers import Workers, start_workers, worker_loader
from forgather_cli.data.order import LengthGroupedOrder, Order
from forgather_cli.errors import DataError

Request = tuple[int, list[int]]
"""(epoch, numbers of the samples of a batch)."""


def check_dataset(dataset: Any, name: str) -> None:
    """Raise DataError for what holds several datasets, or names one; ``name`` is the argument's."""
    if isinstance(dataset, Mapping | str):
        got = f"of {', '.join(map(str, dataset))}" if isinstance(dataset, Mapping) else repr(dataset)
        others = "" if name == "train_dataset" else ", and others to evaluate(dataset, metric_key_prefix=...)"
        raise DataError(
            f"{name}: got a {type(dataset).__name__} {got}; give one dataset of dicts with input_ids and labels{others}"
        )


def is_map_style(dataset: Any) -> bool:
    """True if samples can be read by number."""
    if isinstance(dataset, DataLoader | IterableDataset) or has_batches(dataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def has_batches(dataset: Any) -> bool:
    """True if it is known without reading that the items are batches, not samples."""
    return isinstance(dataset, DataLoader) or (
        isinstance(dataset, list | tuple) and bool(dataset) and is_batch(dataset[0])
    )


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call the dataset's ``set_epoch``, if it has one."""
    method = getattr(dataset, "set_epoch", None)
    if callable(method):
        method(epoch)


class _BatchReader:
    """Reads the batch of a request from a dataset, in this process or in a worker.

    A request has the epoch beside the numbers, for workers that outlive an epoch.
    """

    def __init__(self, dataset: Any, collate_fn: CollateFn | None, *, tell_epoch: bool) -> None:
        self._dataset, self._collate, self._tell_epoch = dataset, collate_fn or default_collate, tell_epoch
        self._many = getattr(dataset, "__getitems__", None)
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: Request) -> Batch:
        epoch, numbers = request
        if epoch != self._epoch:
            self._epoch = epoch
            if self._tell_epoch:
                set_epoch(self._dataset, epoch)
        samples = self._many(numbers) if self._many else [self._dataset[number] for number in numbers]
        return as_batch(self._collate(samples) if isinstance(samples, list) else samples)


class Batches:
    """Batches of a map-style dataset by the numbers of their samples, read in this process or in workers.

    A dataset's ``__getitems__(numbers)`` may return a batch, or samples to collate.
    """

    def __init__(
        self, dataset: Any, collate_fn: CollateFn | None, workers: Workers, seed: int, *, tell_epoch: bool = True
    ) -> None:
        self._reader = _BatchReader(dataset, collate_fn, tell_epoch=tell_epoch)
        self._workers, self._seed = workers, seed
        self._sampler = _Requests()
        self._loader: Any = None

    def read(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """One batch for each request, in order."""
        if self._workers.num == 0:
            return map(self._reader.__getitems__, requests)
        self._sampler.requests = requests
        loader = self._loader
        if loader is None:
            options = {"batch_sampler": self._sampler, "snapshot_every_n_steps": sys.maxsize}  # the position is ours
            loader = worker_loader(self._reader, self._workers, self._seed, **options)
        self._loader = loader if self._workers.persistent else None
        return start_workers(loader)

    def close(self) -> None:
        """End persistent workers."""
        self._loader = None


class _Requests:
    """The batch sampler of a DataLoader that is used for several passes: each sets ``requests`` anew."""

    requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class MapStyleSteps(TrainingSteps):
    """Map-style data, a global batch for each training step. ``lengths`` (samples,) groups samples of like length."""

    is_sharded = False

    def __init__(
        self,
        length: int,
        share: Share,
        batches: Batches,
        seed: int,
        *,
        shuffle: bool,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        self._length, self._share, self._batches, self._seed, self._shuffle = length, share, batches, seed, shuffle
        self._lengths = lengths
        self._newest_order: tuple[int, Order | LengthGroupedOrder] | None = None
        if length == 0:
            raise DataError("train_dataset: has no samples")
        if length < share.global_batch and share.drop_last:
            raise DataError(
                f"global_batch_size: {share.global_batch} sequences per step, but the training data has {length}; "
                f"lower it, or set dataloader_drop_last=false"
            )

    def __len__(self) -> int:
        return self._share.num_steps(self._length, self._share.global_batch)

    def num_microbatches(self) -> int:
        """This rank's micro-batches in a whole epoch."""
        share = self._share
        steps, rest = divmod(self._length, share.global_batch)
        whole, last = (-(-len(share.of(size)) // share.micro_batch) for size in (share.global_batch, rest))
        return steps * whole + (0 if share.drop_last else last)

    def check(self, state: Position) -> None:
        """Raise DataError for a position that this data cannot resume from."""
        if "ranges" not in state and state["sample"] > self._length:
            raise DataError(
                f"resume_from_checkpoint: the data position is sample {state['sample']}, but the training data has "
                f"{self._length}; resume on the same data or with ignore_data_skip=true"
            )

    def read(self, position: Position) -> Iterator[tuple[list[Batch], Position]]:
        """This rank's batches of each step from a position to the end of the epoch, and the position after each."""
        ranges = position.get("ranges")
        found = self._requests(position) if ranges is None else self._requests_of(ranges)
        # two iterators over the steps' requests: workers consume the second one further, for batches of later steps
        steps, steps_ahead = tee(found)
        batches = self._batches.read(request for requests, _ in steps_ahead for request in requests)
        for requests, after in steps:
            yield list(islice(batches, len(requests))), after

    def _requests_of(self, ranges: Sequence[Sequence[int]]) -> Iterator[tuple[list[Request], Position]]:
        """As ``_requests`` for samples by their numbers in the endless sequence of epochs, in ranges [start, stop):
        what is left of them is the position. The last step may be smaller.
        """
        share, left = self._share, [[start, stop] for start, stop in ranges if start < stop]
        while left:
            taken: list[tuple[int, int]] = []  # (epoch, sample)
            while left and len(taken) < share.global_batch:
                epoch, begin = divmod(left[0][0], self._length)
                count = min(left[0][1] - left[0][0], self._length - begin, share.global_batch - len(taken))
                taken += [(epoch, sample) for sample in self._samples(epoch, begin, begin + count)]
                left[0][0] += count
                done = left[0][0]
                if done == left[0][1]:
                    del left[0]
            part = share.of(len(taken))
            mine = microbatches(taken[part.start : part.stop], share.micro_batch)
            requests = [(samples[0][0], [number for _, number in samples]) for samples in mine]
            epoch, sample = divmod(left[0][0] if left else done, self._length)
            yield requests, {"epoch": epoch, "sample": sample, "ranges": [list(each) for each in left]}

    def _requests(self, position: Position) -> Iterator[tuple[list[Request], Position]]:
        """For each step the requests of this rank's micro-batches, and the position after it."""
        epoch, start = position["epoch"], position["sample"]
        order, share, size = self._order(epoch), self._share, self._share.micro_batch
        part = share.of(share.global_batch)  # of all steps but a smaller last one
        while start < self._length:
            stop = min(start + share.global_batch, self._length)
            if stop - start < share.global_batch:
                if share.drop_last:
                    return
                part = share.of(stop - start)
            numbers = order[start + part.start : start + part.stop]
            requests = [(epoch, numbers[at : at + size]) for at in range(0, len(numbers), size)]
            yield requests, {"epoch": epoch, "sample": stop}
            start = stop

    def _samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """Those at positions [start, stop) of an epoch."""
        return self._order(epoch)[start:stop]

    def _order(self, epoch: int) -> Order | LengthGroupedOrder:
        if self._newest_order is None or self._newest_order[0] != epoch:
            if self._lengths is not None:
                order: Order | LengthGroupedOrder = LengthGroupedOrder(self._lengths, self._seed, epoch)
            else:
                order = Order(self._length, self._seed, epoch, shuffle=self._shuffle)
            self._newest_order = epoch, order
        return self._newest_order[1]

    def between(self, start: Position, stop: Position) -> list[int] | None:
        """The samples of the steps from one position to a later one, in order; epochs in between are whole. None where
        samples are given out in ranges.
        """
        if "ranges" in start or "ranges" in stop:
            return None
        found: list[int] = []
        for epoch in range(start["epoch"], stop["epoch"] + 1):
            begin = start["sample"] if epoch == start["epoch"] else 0
            left = self._length - begin
            unused = left % self._share.global_batch if self._share.drop_last else 0  # too few for a step
            end = stop["sample"] if epoch == stop["epoch"] else begin + left - unused
            found += self._order(epoch)[begin:end]
        return found

    def close(self) -> None:
        self._batches.close()


def lengths_of(dataset: Any, column: str) -> NDArray[np.int64]:
    """(samples,): each sample's length: that column's value where the dataset has such a column, else the number of its
    ``input_ids``, for which every sample is read once. Raises DataError.
    """
    if hasattr(dataset, "make_training_steps"):
        raise DataError(
            "train_sampling_strategy: group_by_length would move the samples of data=mixture, got it; choose random or "
            "sequential"
        )
    if column in (getattr(dataset, "column_names", None) or ()):
        try:
            return np.array([int(length) for length in dataset[column][:]])
        except (TypeError, ValueError) as error:
            raise DataError(
                f"length_column_name: the training data's column {column!r} must hold numbers ({error}); name another"
            ) from error
    lengths = np.empty(len(dataset), dtype=np.int64)
    many = getattr(dataset, "__getitems__", None)
    for numbers in microbatches(list(range(len(dataset))), 1024):
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

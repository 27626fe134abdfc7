"""Loaders: one optimizer step at a time for training, one batch at a time for evaluation.

The order of map-style data is a function of (seed, epoch), each rank reads its own slice of each global batch, and the
position is the number of samples behind: another world size or batch size goes on with exactly the next samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from forgather_cli.data.collate import (
    Batch,
    CollateFn,
    Step,
    as_batch,
    default_collate,
    is_batch,
    num_samples,
    rank_slice,
    step_of,
)
from forgather_cli.data.fetch import Fetcher, Workers
from forgather_cli.data.order import Order
from forgather_cli.data.prefetch import to_device
from forgather_cli.data.stream import Stream, batches_of, has_batches, is_map_style, stepwise, tell_epoch
from forgather_cli.errors import DataError

Position = dict[str, Any]
"""``epoch``, ``sample`` (samples consumed in it by all ranks) and for data without numbers ``stream``."""


class TrainLoader:
    """Iterating yields this rank's ``Step`` of each optimizer step, from the position to the end of the epoch.

    ``dataset`` is map-style (with or without ``__getitems__``), iterable, or a ready dataloader, whose batches are the
    micro-batches. A slice is cut into micro-batches of ``micro_batch_size``; it may be empty. After the last step the
    position is the start of the next epoch. Raises DataError for data that cannot fill a step.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        rank: int = 0,
        size: int = 1,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        drop_last: bool = True,
        shuffle: bool = True,
        set_dataset_epoch: bool = True,
        collate_fn: CollateFn | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self._device, self._pin_memory = torch.device(device), pin_memory
        workers = Workers(num_workers, prefetch_factor, persistent_workers and num_workers > 0)
        share = _Share(global_batch_size, micro_batch_size, rank, size, drop_last)
        self._steps: _MapSteps | _StreamSteps
        if is_map_style(dataset):
            fetcher = Fetcher(dataset, collate_fn, workers, seed, tell_epoch=set_dataset_epoch)
            self._steps = _MapSteps(len(dataset), share, fetcher, seed, shuffle=shuffle)
        else:
            self._steps = _StreamSteps(dataset, share, collate_fn, workers, seed, set_dataset_epoch=set_dataset_epoch)
        self._position: Position = _start(0)

    @property
    def epoch(self) -> int:
        """The epoch that iterating reads."""
        return int(self._position["epoch"])

    @property
    def state_is_per_rank(self) -> bool:
        """True if each rank's position is its own."""
        return False

    def __len__(self) -> int:
        """Steps of a whole epoch. Raises TypeError for data without a length."""
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        epoch = self.epoch
        for step, position in to_device(self._steps.read(self._position), self._device, self._pin_memory):
            self._position = position
            yield step
        self._position = _start(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the present one keeps its position."""
        if epoch != self.epoch:
            self._position = _start(epoch)

    def state_dict(self) -> Position:
        """The position after the last step handed out; what was read ahead does not count."""
        return dict(self._position)

    def load_state_dict(self, state: Position) -> None:
        self._steps.check(state)
        self._position = dict(state)

    def close(self) -> None:
        """End persistent workers."""
        self._steps.close()


def _start(epoch: int) -> Position:
    return {"epoch": epoch, "sample": 0}


class _Share:
    """How global batches are divided."""

    def __init__(self, global_batch: int, micro_batch: int, rank: int, size: int, drop_last: bool) -> None:
        self.global_batch, self.micro_batch, self.drop_last = global_batch, micro_batch, drop_last
        self.rank, self.size = rank, size

    def of(self, length: int) -> tuple[int, int]:
        return rank_slice(length, self.rank, self.size)

    def num_steps(self, length: int, per_step: int) -> int:
        return length // per_step if self.drop_last else -(-length // per_step)

    def batches_per_step(self) -> int:
        """Ready batches of a step over all ranks: one for each micro-step."""
        return max(1, self.global_batch // (self.micro_batch * self.size)) * self.size


class _MapSteps:
    """Steps of map-style data."""

    def __init__(self, length: int, share: _Share, fetcher: Fetcher, seed: int, *, shuffle: bool) -> None:
        self._length, self._share, self._fetcher, self._seed, self._shuffle = length, share, fetcher, seed, shuffle
        if length == 0:
            raise DataError("train_dataset: has no samples")
        if length < share.global_batch and share.drop_last:
            raise DataError(
                f"global_batch_size: {share.global_batch} sequences per step, but the training data has {length}; "
                f"lower it, or set dataloader_drop_last=false"
            )

    def __len__(self) -> int:
        return self._share.num_steps(self._length, self._share.global_batch)

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


class _StreamSteps:
    """Steps of data that comes in order. Every rank reads all of it and keeps its slice of each global batch."""

    def __init__(
        self,
        dataset: Any,
        share: _Share,
        collate_fn: CollateFn | None,
        workers: Workers,
        seed: int,
        *,
        set_dataset_epoch: bool,
    ) -> None:
        self._dataset, self._share, self._workers, self._seed = dataset, share, workers, seed
        self._collate = collate_fn or default_collate
        self._set_epoch = set_dataset_epoch

    def __len__(self) -> int:
        per_step = self._share.batches_per_step() if has_batches(self._dataset) else self._share.global_batch
        return self._share.num_steps(len(self._dataset), per_step)

    def check(self, state: Position) -> None:
        if state["sample"] and "stream" not in state:
            raise DataError(
                "train_dataset: the data position is that of a map-style dataset; set ignore_data_skip=true"
            )

    def read(self, position: Position) -> Iterator[tuple[Step, Position]]:
        epoch, sample = position["epoch"], position["sample"]
        if self._set_epoch:
            tell_epoch(self._dataset, epoch)
        state = position.get("stream")
        stream = Stream(self._dataset, self._workers, self._seed + epoch, self._share.micro_batch, state)
        ready = is_batch(stream.peek())
        per_step = self._share.batches_per_step() if ready else self._share.global_batch
        num_steps = 0
        for items in stepwise(stream, per_step, drop_last=self._share.drop_last):
            num_steps += 1
            sample += sum(map(num_samples, items)) if ready else len(items)
            first, last = self._share.of(len(items))
            step = step_of(self._batches(items[first:last], ready=ready))
            yield step, {"epoch": epoch, "sample": sample, "stream": stream.state()}
        if not num_steps and state is None:
            raise DataError(
                f"train_dataset: ended before the first step of {per_step} {'batches' if ready else 'samples'}; "
                f"lower global_batch_size or set dataloader_drop_last=false"
            )

    def _batches(self, items: list[Any], *, ready: bool) -> list[Batch]:
        if ready:
            return [as_batch(item) for item in items]
        return [as_batch(self._collate(part)) for part in batches_of(items, self._share.micro_batch)]

    def close(self) -> None:
        """Workers of a stream end with its pass."""


class EvalLoader:
    """Iterating yields this rank's batches of a whole split in order; the ranks together yield every sample once.

    ``max_samples`` keeps the first so many of the global order, ``max_steps`` (-1: all) so many batches of each rank.
    ``dataset`` is what TrainLoader takes. Raises DataError for a split without a sample for every rank.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        max_samples: int | None = None,
        max_steps: int = -1,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = False,
        collate_fn: CollateFn | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dataset, self.batch_size, self._rank, self._size = dataset, batch_size, rank, size
        self._max_samples = max_samples
        self._max_steps = max_steps if max_steps >= 0 else None
        self._device, self._pin_memory = torch.device(device), pin_memory
        self._workers = Workers(num_workers, prefetch_factor, persistent_workers and num_workers > 0)
        self._collate = collate_fn or default_collate
        self._fetcher: Fetcher | None = None
        if is_map_style(dataset):
            self._fetcher = Fetcher(dataset, collate_fn, self._workers, 0, tell_epoch=False)
            self._check(len(dataset))

    def _check(self, length: int) -> None:
        length = self._limited(length)
        if length < self._size:
            raise DataError(
                f"eval_dataset: {length} samples for {self._size} ranks leaves ranks {list(range(length, self._size))} "
                f"without any; raise data.eval_fraction or max_eval_samples, or use fewer ranks"
            )

    def _limited(self, length: int) -> int:
        return length if self._max_samples is None else min(length, self._max_samples)

    def __len__(self) -> int:
        """Batches of this rank. Raises TypeError for data without a length."""
        length = len(self.dataset)
        if has_batches(self.dataset):
            rounds, rest = divmod(length, self._size)
            first, last = rank_slice(rest, self._rank, self._size)
            count = rounds + last - first
        else:
            first, last = rank_slice(self._limited(length), self._rank, self._size)
            count = -(-(last - first) // self.batch_size)
        return count if self._max_steps is None else min(count, self._max_steps)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._from_map(self._fetcher) if self._fetcher else self._from_stream()
        pairs = ((batch, None) for batch in islice(batches, self._max_steps))
        for batch, _ in to_device(pairs, self._device, self._pin_memory):
            yield batch

    def _from_map(self, fetcher: Fetcher) -> Iterator[Batch]:
        first, last = rank_slice(self._limited(len(self.dataset)), self._rank, self._size)
        return fetcher.fetch(0, batches_of(list(range(first, last)), self.batch_size))

    def _from_stream(self) -> Iterator[Batch]:
        stream = Stream(self.dataset, self._workers, 0, self.batch_size, None)
        ready = is_batch(stream.peek())
        left = self._max_samples
        per_round = self._size if ready else self.batch_size * self._size
        while left is None or left > 0:
            items = stream.take(per_round if ready or left is None else min(left, per_round))
            if not items:
                return
            if ready:
                items = _first_samples(items, left)
            if left is not None:
                left -= sum(map(num_samples, items)) if ready else len(items)
            first, last = rank_slice(len(items), self._rank, self._size)
            if first < last:
                yield as_batch(items[first] if ready else self._collate(items[first:last]))

    def close(self) -> None:
        """End persistent workers."""
        if self._fetcher:
            self._fetcher.close()


def _first_samples(items: list[Any], count: int | None) -> list[Batch]:
    """Ready batches without the samples after the first ``count``."""
    kept: list[Batch] = []
    for batch in map(as_batch, items):
        if count is None or count > 0:
            kept.append({key: value[:count] for key, value in batch.items()})
            count = None if count is None else count - num_samples(batch)
    return kept

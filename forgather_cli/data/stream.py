"""Data that can only be read in order: iterable datasets, and ready dataloaders, whose batches stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from forgather_cli.data.collate import is_batch
from forgather_cli.data.fetch import Workers, set_epoch, start_workers, worker_loader
from forgather_cli.errors import DataError

State = dict[str, Any]


def is_map_style(dataset: Any) -> bool:
    """True if samples can be asked for by number."""
    if isinstance(dataset, DataLoader | IterableDataset) or has_batches(dataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def has_batches(dataset: Any) -> bool:
    """True if it is known without reading that the items are batches, not samples."""
    return isinstance(dataset, DataLoader) or (
        isinstance(dataset, list | tuple) and bool(dataset) and is_batch(dataset[0])
    )


def tell_epoch(dataset: Any, epoch: int) -> None:
    """``set_epoch`` on the dataset, and on what a dataloader reads from."""
    for part in (dataset, *(getattr(dataset, name, None) for name in ("dataset", "sampler", "batch_sampler"))):
        set_epoch(part, epoch)


class Stream:
    """One pass over the items of a dataset, from a state on.

    Where the dataset, its iterator or the dataloader has ``state_dict`` and ``load_state_dict``, a pass goes on exactly
    from a state; else the items before it are read again. Raises DataError if that cannot be done.
    """

    def __init__(self, dataset: Any, workers: Workers, seed: int, chunk: int, state: State | None) -> None:
        iterable = isinstance(dataset, IterableDataset)  # only these can tell in which worker they run
        self._workers = Workers(workers.num, workers.prefetch_factor) if iterable else Workers()
        self._stateful = _is_stateful(dataset) or (iterable and _is_stateful(iter(dataset)))
        in_lists = iterable and (self._stateful or self._workers.num > 0)
        self._holder = worker_loader(dataset, self._workers, seed, batch_size=chunk) if in_lists else dataset
        self._buffer: list[Any] = []
        self._used = 0  # items handed out since _before
        self._num_items = 0
        self._before: State | None = None
        skip = self._restore(state)
        items = start_workers(self._holder)
        self._lists = items if in_lists else ([item] for item in items)
        self.take(skip)
        self._num_items = state["items"] if state else 0

    def _restore(self, state: State | None) -> int:
        """Bring the source to a state; the number of items to read and drop after that."""
        if state is None:
            return 0
        if self._stateful != (state["source"] is not None):
            raise DataError(
                "train_dataset: the checkpoint's data position is of another kind of dataset; set ignore_data_skip=true"
            )
        if not self._stateful:
            return int(state["items"])
        if state["num_workers"] != self._workers.num:
            raise DataError(
                f"dataloader_num_workers: the data position was saved with {state['num_workers']} workers, got "
                f"{self._workers.num}; a stream goes on only with the same number (or ignore_data_skip=true)"
            )
        self._holder.load_state_dict(copy.deepcopy(state["source"]))
        return int(state["used"])

    def peek(self) -> Any | None:
        """The next item, without taking it; None at the end."""
        if not self._buffer:
            self._fill()
        return self._buffer[0] if self._buffer else None

    def take(self, count: int) -> list[Any]:
        """The next items, fewer at the end."""
        taken: list[Any] = []
        while len(taken) < count and self.peek() is not None:
            part = self._buffer[: count - len(taken)]
            del self._buffer[: len(part)]
            self._used += len(part)
            taken += part
        self._num_items += len(taken)
        return taken

    def state(self) -> State:
        """Where ``take`` stands. Workers may have read further."""
        return {
            "items": self._num_items,
            "num_workers": self._workers.num,
            "used": self._used,
            "source": self._before,
        }

    def _fill(self) -> None:
        self._remember()
        self._buffer = next(self._lists, [])

    def _remember(self) -> None:
        if self._stateful:
            self._before = copy.deepcopy(self._holder.state_dict())
        self._used = 0


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def batches_of(items: list[Any], size: int) -> list[list[Any]]:
    """Lists of at most ``size`` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def stepwise(stream: Stream, count: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """The items of each step, ``count`` of them; the last may have fewer without ``drop_last``."""
    while items := stream.take(count):
        if len(items) < count and drop_last:
            return
        yield items

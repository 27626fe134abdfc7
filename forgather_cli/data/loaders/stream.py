"""Data that can only be read in order: iterable datasets, and ready dataloaders, whose batches stay as they are."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from forgather_cli.data.loaders.workers import Workers, start_workers, worker_loader
from forgather_cli.errors import DataError

State = dict[str, Any]


class Stream:
    """One pass over the items of a dataset, from a state on.

    Where the dataset, its iterator or the dataloader has ``state_dict`` and ``load_state_dict``, a pass goes on exactly
    from a state; else the items before it are read again. Raises DataError if that cannot be done.

    ``chunk`` samples are read at once; their order depends on it where there are workers, who take turns by chunks.
    """

    def __init__(self, dataset: Any, workers: Workers, seed: int, chunk: int, state: State | None) -> None:
        iterable = isinstance(dataset, IterableDataset)  # only these can tell in which worker they run
        self._workers = Workers(workers.num, workers.prefetch_factor) if iterable else Workers()
        self._stateful = _is_stateful(dataset) or (iterable and _is_stateful(iter(dataset)))
        in_lists = iterable and (self._stateful or self._workers.num > 0)
        self._chunk = chunk if state is None else int(state.get("chunk", chunk))
        self._holder = worker_loader(dataset, self._workers, seed, batch_size=self._chunk) if in_lists else dataset
        self._chunks: deque[_Chunk] = deque()  # read and not used up, or the last one read
        self._used = 0  # items handed out of the first chunk
        self._num_items = 0
        self._ended = False
        skip = self._restore(state)
        items = start_workers(self._holder)
        self._lists = items if in_lists else ([item] for item in items)
        while skip > 0 and (dropped := len(self.take(min(skip, 1024)))):
            skip -= dropped
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

    def peek(self, count: int) -> list[Any]:
        """The next items without taking them, fewer at the end."""
        items = [item for chunk in self._chunks for item in chunk.items][self._used :]
        while len(items) < count and not self._ended:
            before = copy.deepcopy(self._holder.state_dict()) if self._stateful else None
            chunk = _Chunk(before, next(self._lists, []))
            self._ended = not chunk.items
            if chunk.items:
                self._chunks.append(chunk)
                items += chunk.items
        return items[:count]

    def take(self, count: int) -> list[Any]:
        """The next items, fewer at the end."""
        items = self.peek(count)
        self._used += len(items)
        self._num_items += len(items)
        while len(self._chunks) > 1 and self._used >= len(self._chunks[0].items):
            self._used -= len(self._chunks.popleft().items)
        return items

    def state(self) -> State:
        """Where ``take`` stands. Workers may have read further."""
        return {
            "items": self._num_items,
            "num_workers": self._workers.num,
            "chunk": self._chunk,
            "used": self._used,
            "source": self._chunks[0].before if self._chunks else None,
        }


@dataclass(frozen=True)
class _Chunk:
    """Items that were read at once, and the source's state before."""

    before: State | None
    items: list[Any]


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))

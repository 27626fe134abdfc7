"""Iterable data, which can only be read in order: read in rounds, from a position on.

A *round* is what all ranks take together: a global batch for training, a batch for each rank in evaluation. On several
ranks rank 0 reads and sends (*dispatched*), or each rank reads by itself (*sharded*): its own shard, if the ranks turn
out to see different data, else everything, of which it keeps its part of each round.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

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
    num_samples,
    rank_part,
)
from forgather_cli.data.loaders.data_ranks import DataRanks, own_shard, reads_own_shard, samples_by_rank
from forgather_cli.data.loaders.map_style import has_batches, set_epoch
from forgather_cli.data.loaders.workers import Workers, start_workers, worker_loader
from forgather_cli.errors import DataError

State = dict[str, Any]


@dataclass(frozen=True)
class FirstRound:
    """What the first round of a pass has."""

    have: list[int]
    """Items of each data rank."""
    wanted: list[int]
    unit: str
    """Of the items: samples or batches."""
    own_shards: bool

    def lacking(self) -> list[int]:
        """Data ranks without any."""
        return [rank for rank, count in enumerate(self.have) if not count]


class IterableRounds(TrainingSteps):
    """Iterable data in rounds; making one is collective where there are several ``ranks``.

    ``name``: of the dataset, for messages; ``check`` raises DataError for a first round that is too small; ``chunk``:
    samples that a worker reads at once, the same in every layout; ``limit``: only the first so many samples are used.
    Without ``collate_fn`` the dataset's own ``collate`` makes batches, where it has one.
    """

    def __init__(
        self,
        name: str,
        dataset: Any,
        share: Share,
        collate_fn: CollateFn | None,
        workers: Workers,
        seed: int,
        *,
        chunk: int,
        check: Callable[[FirstRound], None],
        tell_epoch: bool = False,
        limit: int | None = None,
        ranks: DataRanks | None = None,
        dispatch: bool = True,
    ) -> None:
        self._name, self._share, self._workers, self._seed = name, share, workers, seed
        own_collate: CollateFn = getattr(dataset, "collate", default_collate)
        self._collate = collate_fn or own_collate
        self._check = check
        self._chunk, self._tell_epoch, self._limit = chunk, tell_epoch, limit
        self._ranks = ranks
        self._dispatched = ranks is not None and dispatch
        self.is_sharded = ranks is not None and not dispatch
        own = own_shard(dataset, share.rank, share.size) if self.is_sharded and limit is None else None
        self._dataset, self._declared = (dataset, False) if own is None else (own, True)
        if self._dispatched and samples_by_rank(dataset):
            raise DataError(
                f"{name}: its sampler picks the samples of one rank, but rank 0 reads for all; "
                "set dispatch_batches=false, or leave the sampler out"
            )
        self._length = self._num_rounds()

    def __len__(self) -> int:
        """Raises TypeError for data without a length."""
        if self._length is None:
            raise TypeError(f"{self._name} has no length")
        return self._length

    def _num_rounds(self) -> int | None:
        """Collective. Rounds of a pass by the dataset's length: rank 0's where it reads for all, else the shortest, if
        it is known whose length it is; None without a length."""
        share, by_rank = self._share, samples_by_rank(self._dataset)
        count: int | None = None
        try:
            length, ready = len(self._dataset), has_batches(self._dataset)
        except TypeError:
            pass
        else:
            if self._limit is not None and not ready:
                length = min(length, self._limit)
            per_round = share.batches_per_step() if ready else share.global_batch
            count = share.num_steps(length, per_round // share.size if by_rank else per_round)
        if self._ranks is None:
            return count
        counts: list[int | None] = self._ranks.gather(count)
        if self._dispatched:
            return counts[0]
        known = [each for each in counts if each is not None]
        return min(known) if (share.size == 1 or by_rank) and len(known) == len(counts) else None

    def num_microbatches(self) -> int:
        """This rank's, of a whole pass."""
        return len(self) * (self._share.batches_per_step() // self._share.size)

    def check(self, state: Position) -> None:
        """Raise DataError for a position that this data cannot resume from."""
        if state["sample"] and "stream" not in state:
            raise DataError(
                f"{self._name}: the data position is that of a map-style dataset; set ignore_data_skip=true"
            )
        shards, size = state.get("shards"), self._share.size
        if shards is not None and not (self.is_sharded and shards == size):
            now = f"{size} ranks do" if self.is_sharded else "rank 0 reads for all"
            raise DataError(
                f"{self._name}: the checkpoint is of {shards} ranks that read a shard each (dispatch_batches=false), "
                f"now {now}; resume as it was, or set ignore_data_skip=true; only runs with data.dispatch_batches=true "
                "from the start can be resumed with another number of ranks"
            )

    # --------------------------------------------------------------------------------------------------------- reading

    def read(self, position: Position) -> Iterator[tuple[list[Batch], Position]]:
        """Collective where there are several ranks. This rank's batches of each round, from a position to the end of
        the pass, each with the position behind it."""
        if self._ranks is None or not self._dispatched:
            for items, after, _ in self._rounds(position):
                yield self._batches(items), after
        elif self._ranks.rank == 0:
            yield from self._send(self._ranks, position)
        else:
            more = True
            while more:
                (after, more), batches = self._ranks.receive()
                if after is not None:
                    yield batches, after

    def _send(self, ranks: DataRanks, position: Position) -> Iterator[tuple[list[Batch], Position]]:
        """On rank 0: read every round and send each data rank its part; an error is sent to all."""
        rounds, size = self._rounds(position), self._share.size
        more = True
        while more:
            try:
                items, after, more = next(rounds, ([], None, False))
                shares = [rank_part(len(items), rank, size) for rank in range(size)]
                parts = [self._batches(items[share.start : share.stop]) for share in shares]
            except Exception as error:
                ranks.send_failure(error, self._name)
                raise
            ranks.send([after and {**after, "stream": None}, more], parts)
            if after is not None:
                yield parts[self._share.rank], after

    def _rounds(self, position: Position) -> Iterator[tuple[list[Any], Position, bool]]:
        """For each round the items of which this process makes batches: those of all ranks where rank 0 reads for
        them, else this rank's; the position after it; and False if the data ended within it. (True does not promise
        another round: the data may end exactly with this one.)"""
        share, epoch, sample, left = self._share, position["epoch"], position["sample"], self._limit
        if self._tell_epoch:  # the dataset, and what a dataloader reads from
            parts = [getattr(self._dataset, name, None) for name in ("dataset", "sampler", "batch_sampler")]
            for part in (self._dataset, *parts):
                set_epoch(part, epoch)
        stream = Stream(self._dataset, self._workers, self._seed + epoch, self._chunk, position.get("stream"))
        ready = is_batch(next(iter(stream.peek(1)), None))
        whole = share.batches_per_step() if ready else share.global_batch
        own = self._begin(stream, whole, position, ready=ready)
        per_round = len(share.of(whole)) if own else whole
        while left is None or left > 0:
            if ready:
                items = _first_samples(stream.take(per_round), left)
                taken = sum(map(num_samples, items))
            else:
                items = stream.take(per_round if left is None else min(per_round, left))
                taken = len(items)
            is_last = len(items) < per_round
            if not items or (is_last and share.drop_last):
                return
            left = None if left is None else left - taken
            sample += share.global_batch if own else taken  # the same number on all ranks
            after = {"epoch": epoch, "sample": sample, "stream": stream.state()}
            if own:
                after["shards"] = share.size
            elif not self._dispatched:
                part = share.of(len(items))
                items = items[part.start : part.stop]
            yield items, after, not is_last

    def _begin(self, stream: Stream, whole: int, position: Position, *, ready: bool) -> bool:
        """Collective where sharded. True if this rank reads a shard of its own. Checks the first round of a pass."""
        items, share, fresh = stream.peek(whole), self._share, position.get("stream") is None
        own = False
        if self.is_sharded and self._ranks is not None:
            own = reads_own_shard(items, self._ranks, self._name) or self._declared
            if own and self._limit is not None:
                raise DataError(
                    f"max_eval_samples: {self._limit} are the first of the whole split, but each rank reads a shard of "
                    "its own; set max_eval_steps instead, or dispatch_eval_batches=true"
                )
            if own and not fresh and "shards" not in position:
                raise DataError(
                    f"{self._name}: the data position counts the samples of all ranks, but now each rank reads a shard "
                    "of its own; set dispatch_batches=true or ignore_data_skip=true"
                )
            own = own if fresh else "shards" in position
        if not fresh:
            return own
        wanted = [len(rank_part(whole, rank, share.size)) for rank in range(share.size)]
        if own and self._ranks is not None:
            counts = dict(zip(self._ranks.of_rank, self._ranks.gather(len(items)), strict=True))
            have = [min(counts[rank], count) for rank, count in enumerate(wanted)]
        else:
            found = len(_first_samples(items, self._limit) if ready else items[: self._limit])
            have = [len(rank_part(found, rank, share.size)) for rank in range(share.size)]
        self._check(FirstRound(have, wanted, "batches" if ready else "samples", own))
        return own

    def _batches(self, items: list[Any]) -> list[Batch]:
        if items and is_batch(items[0]):
            return [as_batch(item) for item in items]
        return [as_batch(self._collate(part)) for part in microbatches(items, self._share.micro_batch)]

    def between(self, start: Position, stop: Position) -> None:
        """Samples have no numbers here."""

    def close(self) -> None:
        """Workers end with their pass."""


def _first_samples(items: list[Any], count: int | None) -> list[Any]:
    """Ready batches without the samples after the first ``count``."""
    if count is None:
        return items
    kept: list[Batch] = []
    for batch in map(as_batch, items):
        if count > 0:
            kept.append({key: value[:count] for key, value in batch.items()})
            count -= num_samples(batch)
    return kept


# --------------------------------------------------------------------------------------------------- one dataset's pass


class Stream:
    """One pass over the items of a dataset, from a state on.

    Where the dataset, its iterator or the dataloader has ``state_dict`` and ``load_state_dict``, a pass continues
    exactly from a state; else the items before it are read again and dropped. Raises DataError if neither is possible.

    ``chunk`` samples are read at once; with workers, which take turns by chunks, their order depends on it.
    """

    def __init__(self, dataset: Any, workers: Workers, seed: int, chunk: int, state: State | None) -> None:
        iterable = isinstance(dataset, IterableDataset)  # only these can tell in which worker they run
        self._workers = Workers(workers.num, workers.prefetch_factor) if iterable else Workers()
        self._stateful = _is_stateful(dataset) or (iterable and _is_stateful(iter(dataset)))
        in_lists = iterable and (self._stateful or self._workers.num > 0)
        self._chunk = chunk if state is None else int(state.get("chunk", chunk))
        self._holder = worker_loader(dataset, self._workers, seed, batch_size=self._chunk) if in_lists else dataset
        # items that were read at once, each list with the source's state before; not used up, or the last ones read
        self._chunks: deque[tuple[State | None, list[Any]]] = deque()
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
                f"{self._workers.num}; a stream resumes only with the same number (or ignore_data_skip=true)"
            )
        self._holder.load_state_dict(copy.deepcopy(state["source"]))
        return int(state["used"])

    def peek(self, count: int) -> list[Any]:
        """The next items without taking them, fewer at the end."""
        items = [item for _, chunk in self._chunks for item in chunk][self._used :]
        while len(items) < count and not self._ended:
            before = copy.deepcopy(self._holder.state_dict()) if self._stateful else None
            chunk: list[Any] = next(self._lists, [])
            self._ended = not chunk
            if chunk:
                self._chunks.append((before, chunk))
                items += chunk
        return items[:count]

    def take(self, count: int) -> list[Any]:
        """The next items, fewer at the end."""
        items = self.peek(count)
        self._used += len(items)
        self._num_items += len(items)
        while len(self._chunks) > 1 and self._used >= len(self._chunks[0][1]):
            self._used -= len(self._chunks.popleft()[1])
        return items

    def state(self) -> State:
        """Where ``take`` stands. Workers may have read further."""
        return {
            "items": self._num_items,
            "num_workers": self._workers.num,
            "chunk": self._chunk,
            "used": self._used,
            "source": self._chunks[0][0] if self._chunks else None,
        }


def is_empty(dataset: Any) -> bool:
    """There is no dataset, or no sample in it, as far as can be told without changing what a pass over it reads."""
    if dataset is None:
        return True
    with suppress(TypeError):
        return not len(dataset)
    if not isinstance(dataset, IterableDataset):  # a generator, say, or a dataloader, which may start workers
        return False
    if _is_stateful(dataset):
        if not callable(shard := getattr(dataset, "shard", None)):
            return False
        dataset = shard(num_shards=1, index=0)  # whose position is its own
    found = iter(dataset)
    return found is not dataset and not _is_stateful(found) and next(found, None) is None


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))

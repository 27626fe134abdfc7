"""Iterable data: steps of what can only be read in order, and rounds of its evaluation.

A *round* is what all ranks take together: a global batch for training, a batch for each rank in evaluation. On several
ranks rank 0 reads and sends (*dispatched*), or each rank reads by itself (*sharded*): its own shard, if the ranks turn
out to see different data, else everything, of which it keeps its part of each round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from forgather_cli.data.loaders.collate import (
    Batch,
    CollateFn,
    Position,
    Share,
    Step,
    as_batch,
    default_collate,
    is_batch,
    microbatches,
    num_samples,
    rank_slice,
    step_of,
)
from forgather_cli.data.loaders.data_ranks import DataRanks, Failure, own_shard, reads_own_shard, samples_by_rank
from forgather_cli.data.loaders.map_style import has_batches, set_epoch
from forgather_cli.data.loaders.stream import Stream
from forgather_cli.data.loaders.workers import Workers
from forgather_cli.errors import DataError

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Portion:
    """What one data rank gets of a round."""

    batches: list[Batch]
    position: Position
    """After the round."""
    is_last: bool
    """Nothing follows: the data ended within this round. A round that came out even may be the last one too."""


@dataclass(frozen=True)
class _Round:
    items: list[Any]
    own: bool
    """They all belong to this rank."""
    position: Position
    is_last: bool


class IterableRounds:
    """Iterable data in rounds; making one is collective where there are several ``ranks``.

    ``name`` is that of the dataset in messages; ``check`` raises DataError for a first round that will not do;
    ``chunk`` samples are what a worker reads at once, the same number in every layout; ``limit`` keeps the first so
    many samples.
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
        self._collate, self._check = collate_fn or default_collate, check
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

    def check(self, state: Position) -> None:
        """Raise DataError for a position that this data cannot go on from."""
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
                "from the start can go on with another number of ranks"
            )

    # --------------------------------------------------------------------------------------------------------- reading

    def read(self, position: Position) -> Iterator[Portion]:
        """Collective where there are several ranks. This rank's portions from a position to the end of the pass."""
        if self._ranks is None or not self._dispatched:
            return (self._portion(each, self._share.rank) for each in self._rounds(position))
        return self._send(self._ranks, position) if self._ranks.rank == 0 else self._receive(self._ranks)

    def _send(self, ranks: DataRanks, position: Position) -> Iterator[Portion]:
        """On rank 0: read every round and send each data rank its portion; an error is sent to all."""
        rounds = self._rounds(position)
        while True:
            try:
                found = next(rounds, None)
                portions = [] if found is None else [self._portion(found, rank) for rank in range(self._share.size)]
            except Exception as error:
                ranks.send({"failure": asdict(Failure.of(error, self._name))})
                raise
            if found is None:
                ranks.send(None)
                return
            there = {**found.position, "stream": None}
            ranks.send({"position": there, "is_last": found.is_last}, [portion.batches for portion in portions])
            yield portions[self._share.rank]
            if found.is_last:
                return

    def _receive(self, ranks: DataRanks) -> Iterator[Portion]:
        while True:
            note, batches = ranks.receive()
            if note is None:
                return
            if "failure" in note:
                raise Failure(**note["failure"]).error()
            yield Portion(batches, note["position"], note["is_last"])
            if note["is_last"]:
                return

    def _rounds(self, position: Position) -> Iterator[_Round]:
        """What this process reads: of all ranks, or where ``own`` of this one."""
        share, epoch, sample, left = self._share, position["epoch"], position["sample"], self._limit
        if self._tell_epoch:  # the dataset, and what a dataloader reads from
            parts = [getattr(self._dataset, name, None) for name in ("dataset", "sampler", "batch_sampler")]
            for part in (self._dataset, *parts):
                set_epoch(part, epoch)
        stream = Stream(self._dataset, self._workers, self._seed + epoch, self._chunk, position.get("stream"))
        ready = is_batch(next(iter(stream.peek(1)), None))
        whole = share.batches_per_step() if ready else share.global_batch
        own = self._begin(stream, whole, position, ready=ready)
        per_round = _length(share.of(whole)) if own else whole
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
            yield _Round(items, own, {**after, "shards": share.size} if own else after, is_last)

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
        wanted = [_length(rank_slice(whole, rank, share.size)) for rank in range(share.size)]
        if own and self._ranks is not None:
            counts = dict(zip(self._ranks.of_rank, self._ranks.gather(len(items)), strict=True))
            have = [min(counts[rank], count) for rank, count in enumerate(wanted)]
        else:
            found = len(_first_samples(items, self._limit) if ready else items[: self._limit])
            have = [_length(rank_slice(found, rank, share.size)) for rank in range(share.size)]
        self._check(FirstRound(have, wanted, "batches" if ready else "samples", own))
        return own

    def _portion(self, found: _Round, rank: int) -> Portion:
        share, items = self._share, found.items
        if not found.own:
            first, last = rank_slice(len(items), rank, share.size)
            items = items[first:last]
        if items and is_batch(items[0]):
            batches = [as_batch(item) for item in items]
        else:
            batches = [as_batch(self._collate(part)) for part in microbatches(items, share.micro_batch)]
        return Portion(batches, found.position, found.is_last)


class IterableSteps:
    """Training steps of iterable data: a round is a step. The arguments are those of ``IterableRounds``."""

    def __init__(
        self, dataset: Any, share: Share, collate_fn: CollateFn | None, workers: Workers, seed: int, **kwargs: Any
    ) -> None:
        self._share = share
        self.rounds = IterableRounds(
            "train_dataset",
            dataset,
            share,
            collate_fn,
            workers,
            seed,
            chunk=share.global_batch,
            check=self._check_first,
            **kwargs,
        )

    def _check_first(self, first: FirstRound) -> None:
        """Raise DataError for data that has not one step."""
        if first.own_shards:
            _log.info("train_dataset: each rank reads a shard of its own")
        if self._share.drop_last:
            pairs = enumerate(zip(first.have, first.wanted, strict=True))
            lacking = [rank for rank, (have, wanted) in pairs if have < wanted]
        else:
            lacking = first.lacking() if first.own_shards or not any(first.have) else []
        if lacking:
            where = f" on ranks {lacking}" if first.own_shards else ""
            raise DataError(
                f"train_dataset: ended before the first step of {sum(first.wanted)} {first.unit}{where}; "
                "lower global_batch_size or set dataloader_drop_last=false"
            )

    def __len__(self) -> int:
        return len(self.rounds)

    def num_microbatches(self) -> int:
        """This rank's, of a whole epoch."""
        return len(self.rounds) * (self._share.batches_per_step() // self._share.size)

    def check(self, state: Position) -> None:
        """Raise DataError for a position that this data cannot go on from."""
        self.rounds.check(state)

    def read(self, position: Position) -> Iterator[tuple[Step, Position]]:
        """This rank's steps from a position to the end of the epoch, each with the position behind it."""
        return ((step_of(portion.batches), portion.position) for portion in self.rounds.read(position))

    def close(self) -> None:
        """Workers of a stream end with its pass."""


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


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

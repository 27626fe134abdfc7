"""Data that comes in order, by rounds: what all ranks take together for one training step, or for one batch of
evaluation each.

On several ranks rank 0 reads and sends (*dispatched*), or each rank reads by itself (*sharded*): its own shard, if the
ranks turn out to see different data, else everything, of which it keeps its part of each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from forgather_cli.data.loaders.collate import (
    Batch,
    CollateFn,
    as_batch,
    default_collate,
    is_batch,
    num_samples,
    rank_slice,
)
from forgather_cli.data.loaders.data_ranks import Failure, Peers
from forgather_cli.data.loaders.shards import own_shard, reads_own_shard, samples_by_rank
from forgather_cli.data.loaders.stream import Stream, batches_of, has_batches, tell_epoch
from forgather_cli.data.loaders.workers import Workers
from forgather_cli.errors import DataError

Position = dict[str, Any]
"""``epoch``, ``sample`` (samples consumed in it by all ranks); for data without numbers ``stream``, which is None on
ranks that rank 0 reads for, and ``shards``, how many there are, where ranks read shards of their own."""


def start_of(epoch: int) -> Position:
    """The position at the start of an epoch."""
    return {"epoch": epoch, "sample": 0}


@dataclass(frozen=True)
class Share:
    """How the samples of a round, ``global_batch``, are divided among ``size`` data ranks."""

    global_batch: int
    micro_batch: int
    rank: int
    size: int
    drop_last: bool

    def of(self, length: int) -> tuple[int, int]:
        """This rank's part [start, stop) of a round."""
        return rank_slice(length, self.rank, self.size)

    def num_rounds(self, length: int, per_round: int) -> int:
        return length // per_round if self.drop_last else -(-length // per_round)

    def batches_per_round(self) -> int:
        """Ready batches over all ranks: one for each micro-step."""
        return max(1, self.global_batch // (self.micro_batch * self.size)) * self.size


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


class Rounds:
    """Iterable data in rounds; making one is collective where there are ``peers``.

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
        set_epoch: bool = False,
        limit: int | None = None,
        peers: Peers | None = None,
        dispatch: bool = True,
    ) -> None:
        self._name, self._share, self._workers, self._seed = name, share, workers, seed
        self._collate, self._check = collate_fn or default_collate, check
        self._chunk, self._set_epoch, self._limit = chunk, set_epoch, limit
        self._peers = peers
        self._dispatched = peers is not None and dispatch
        self.is_sharded = peers is not None and not dispatch
        own = own_shard(dataset, share.rank, share.size) if self.is_sharded and limit is None else None
        self._dataset, self._declared = (dataset, False) if own is None else (own, True)
        if self._dispatched and samples_by_rank(dataset):
            raise DataError(
                f"{name}: its sampler picks the samples of one rank, but rank 0 reads for all; "
                "set dispatch_batches=false, or leave the sampler out"
            )
        self._length = self._count() if peers is None else self._agreed_length(peers)

    # ---------------------------------------------------------------------------------------------------------- length

    def __len__(self) -> int:
        """Raises TypeError for data without a length."""
        if self._length is None:
            raise TypeError(f"{self._name} has no length")
        return self._length

    def _agreed_length(self, peers: Peers) -> int | None:
        """Collective. Rank 0's where it reads for all, else the shortest, where it is known whose length it is."""
        lengths: list[int | None] = peers.gather(self._count())
        if self._dispatched:
            return lengths[0]
        whose = self._share.size == 1 or samples_by_rank(self._dataset)
        known = [length for length in lengths if length is not None]
        return min(known) if whose and len(known) == len(lengths) else None

    def _count(self) -> int | None:
        """Rounds of a pass by the dataset's length."""
        try:
            length = len(self._dataset)
        except TypeError:
            return None
        share, ready = self._share, has_batches(self._dataset)
        per_round = share.batches_per_round() if ready else share.global_batch
        if samples_by_rank(self._dataset):
            per_round //= share.size
        return share.num_rounds(length if self._limit is None or ready else min(length, self._limit), per_round)

    # --------------------------------------------------------------------------------------------------------- reading

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

    def read(self, position: Position) -> Iterator[Portion]:
        """Collective where there are peers. This rank's portions from a position to the end of the pass."""
        if self._peers is None or not self._dispatched:
            return (self._portion(each, self._share.rank) for each in self._rounds(position))
        return self._send(self._peers, position) if self._peers.rank == 0 else self._receive(self._peers)

    def _send(self, peers: Peers, position: Position) -> Iterator[Portion]:
        """On rank 0: read every round and send each data rank its portion; an error is told to all."""
        rounds = self._rounds(position)
        while True:
            try:
                found = next(rounds, None)
                portions = [] if found is None else [self._portion(found, rank) for rank in range(self._share.size)]
            except Exception as error:
                peers.send({"failure": asdict(Failure.of(error, self._name))})
                raise
            if found is None:
                peers.send(None)
                return
            there = {**found.position, "stream": None}
            peers.send({"position": there, "is_last": found.is_last}, [portion.batches for portion in portions])
            yield portions[self._share.rank]
            if found.is_last:
                return

    def _receive(self, peers: Peers) -> Iterator[Portion]:
        while True:
            note, batches = peers.receive()
            if note is None:
                return
            if "failure" in note:
                raise Failure(**note["failure"]).error()
            yield Portion(batches, note["position"], note["is_last"])
            if note["is_last"]:
                return

    def _rounds(self, position: Position) -> Iterator[_Round]:
        share, epoch, sample, left = self._share, position["epoch"], position["sample"], self._limit
        if self._set_epoch:
            tell_epoch(self._dataset, epoch)
        state = position.get("stream")
        stream = Stream(self._dataset, self._workers, self._seed + epoch, self._chunk, state)
        ready = is_batch(next(iter(stream.peek(1)), None))
        whole = share.batches_per_round() if ready else share.global_batch
        own = self._begin(stream, whole, position, ready=ready)
        per_round = _length(share.of(whole)) if own else whole
        while items := self._take(stream, per_round, left, ready=ready):
            is_last = len(items) < per_round
            if is_last and share.drop_last:
                return
            taken = sum(map(num_samples, items)) if ready else len(items)
            left = None if left is None else left - taken
            sample += share.global_batch if own else taken  # the same number on all ranks
            after = {"epoch": epoch, "sample": sample, "stream": stream.state()}
            yield _Round(items, own, {**after, "shards": share.size} if own else after, is_last)

    def _begin(self, stream: Stream, whole: int, position: Position, *, ready: bool) -> bool:
        """Collective where sharded. True if this rank reads a shard of its own. Checks the first round of a pass."""
        items, share, fresh = stream.peek(whole), self._share, position.get("stream") is None
        own = False
        if self.is_sharded and self._peers is not None:
            own = reads_own_shard(items, self._peers, self._name) or self._declared
            own = self._agreed(own, position)
        if not fresh:
            return own
        wanted = [_length(rank_slice(whole, rank, share.size)) for rank in range(share.size)]
        if own and self._peers is not None:
            counts = dict(zip(self._peers.data_ranks, self._peers.gather(len(items)), strict=True))
            have = [min(counts[rank], count) for rank, count in enumerate(wanted)]
        else:
            found = len(_first_samples(items, self._limit) if ready else items[: self._limit])
            have = [_length(rank_slice(found, rank, share.size)) for rank in range(share.size)]
        self._check(FirstRound(have, wanted, "batches" if ready else "samples", own))
        return own

    def _agreed(self, own: bool, position: Position) -> bool:
        """Whether ranks read shards of their own, seen now and by a position. Raises DataError where that fails."""
        if own and self._limit is not None:
            raise DataError(
                f"max_eval_samples: {self._limit} are the first of the whole split, but each rank reads a shard of its "
                "own; set max_eval_steps instead, or dispatch_eval_batches=true"
            )
        if position.get("stream") is None:
            return own
        if own and "shards" not in position:
            raise DataError(
                f"{self._name}: the data position counts the samples of all ranks, but now each rank reads a shard of "
                "its own; set dispatch_batches=true or ignore_data_skip=true"
            )
        return "shards" in position

    def _take(self, stream: Stream, count: int, left: int | None, *, ready: bool) -> list[Any]:
        if left is not None and left <= 0:
            return []
        if ready:
            return _first_samples(stream.take(count), left)
        return stream.take(count if left is None else min(count, left))

    def _portion(self, found: _Round, rank: int) -> Portion:
        share, items = self._share, found.items
        if not found.own:
            first, last = rank_slice(len(items), rank, share.size)
            items = items[first:last]
        if items and is_batch(items[0]):
            batches = [as_batch(item) for item in items]
        else:
            batches = [as_batch(self._collate(part)) for part in batches_of(items, share.micro_batch)]
        return Portion(batches, found.position, found.is_last)


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

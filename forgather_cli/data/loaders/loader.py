"""Loaders: one optimizer step at a time for training, one batch at a time for evaluation.

The order of map-style data is a function of (seed, epoch), and of the samples' lengths where these group it; each rank
reads its own slice of each global batch, and the position is the number of samples behind: another world size or batch
size goes on with exactly the next samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from forgather_cli.data.loaders.collate import Batch, CollateFn, Step, rank_slice, step_of
from forgather_cli.data.loaders.data_ranks import Peers
from forgather_cli.data.loaders.iterable import FirstRound, Position, Rounds, Share, start_of
from forgather_cli.data.loaders.map_style import MapBatches, MapSteps, lengths_of
from forgather_cli.data.loaders.prefetch import to_device
from forgather_cli.data.loaders.stream import is_map_style
from forgather_cli.data.loaders.workers import Fetcher, Workers
from forgather_cli.errors import DataError

log = logging.getLogger(__name__)
_CHECKED_STEPS = 2


class TrainLoader:
    """Iterating yields this rank's ``Step`` of each optimizer step, from the position to the end of the epoch.

    ``dataset`` is map-style (with or without ``__getitems__``), iterable, or a ready dataloader, whose batches are the
    micro-batches. A slice is cut into micro-batches of ``micro_batch_size``; it may be empty. After the last step the
    position is the start of the next epoch. Raises DataError for data that cannot fill a step.

    ``rank`` and ``size``: of the slices. With ``peers`` data without numbers is read by rank 0 for all ranks, or with
    ``dispatch=False`` by each for itself, which may end at different steps (``Rounds``); making a loader and every step
    are then collective. With ``vocab_size`` the ids of the first steps are compared with it. With
    ``group_by_length`` samples of about one length come together; it names the column of lengths (``lengths_of``).
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
        group_by_length: str | None = None,
        set_dataset_epoch: bool = True,
        collate_fn: CollateFn | None = None,
        device: torch.device | str = "cpu",
        peers: Peers | None = None,
        dispatch: bool | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.dataset, self._vocab_size = dataset, vocab_size
        self.global_batch_size = global_batch_size
        self._device, self._pin_memory = torch.device(device), pin_memory
        workers = Workers(num_workers, prefetch_factor, persistent_workers and num_workers > 0)
        share = Share(global_batch_size, micro_batch_size, rank, size, drop_last)
        self._steps: MapSteps | _StreamSteps
        if is_map_style(dataset):
            fetcher = Fetcher(dataset, collate_fn, workers, seed, tell_epoch=set_dataset_epoch)
            lengths = None if group_by_length is None else lengths_of(dataset, group_by_length)
            self._steps = MapSteps(len(dataset), share, fetcher, seed, shuffle=shuffle, lengths=lengths)
        elif group_by_length is not None:
            raise DataError(
                "train_sampling_strategy: group_by_length needs data with __getitem__ and __len__, got a "
                f"{type(dataset).__name__}; choose random, which leaves such data in their own order"
            )
        else:
            rounds = Rounds(
                "train_dataset",
                dataset,
                share,
                collate_fn,
                workers,
                seed,
                chunk=global_batch_size,
                check=lambda first: _check_training(first, drop_last=drop_last),
                set_epoch=set_dataset_epoch,
                peers=peers,
                dispatch=dispatch is not False,
            )
            self._steps = _StreamSteps(rounds, share)
        self._position = start_of(0)

    @property
    def epoch(self) -> int:
        """The epoch that iterating reads."""
        return int(self._position["epoch"])

    @property
    def state_is_per_rank(self) -> bool:
        """True if each rank's position is its own, and can be gone on from by as many ranks only."""
        return isinstance(self._steps, _StreamSteps) and self._steps.rounds.is_sharded

    def __len__(self) -> int:
        """Steps of a whole epoch. Raises TypeError for data without a length."""
        return len(self._steps)

    def num_microbatches(self) -> int:
        """This rank's, of a whole epoch. Raises TypeError for data without a length."""
        return self._steps.num_microbatches()

    def __iter__(self) -> Iterator[Step]:
        epoch = self.epoch
        steps = self._steps.read(self._position)
        if self._vocab_size is not None:
            steps = _checked(steps, self._vocab_size)
        for step, position in to_device(steps, self._device, self._pin_memory):
            self._position = position
            yield step
        self._position = start_of(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the present one keeps its position."""
        if epoch != self.epoch:
            self._position = start_of(epoch)

    def state_dict(self) -> Position:
        """The position after the last step handed out; what was read ahead does not count."""
        return dict(self._position)

    def load_state_dict(self, state: Position) -> None:
        self._steps.check(state)
        self._position = dict(state)

    def samples_between(self, start: Position, stop: Position) -> list[int] | None:
        """Numbers of the samples from one position to a later one, in order; None for data without numbers."""
        return self._steps.between(start, stop) if isinstance(self._steps, MapSteps) else None

    def close(self) -> None:
        """End persistent workers."""
        self._steps.close()


def _checked(steps: Iterator[tuple[Step, Position]], vocab_size: int) -> Iterator[tuple[Step, Position]]:
    """The steps, the first of which hold ids that the model knows.

    Raises DataError: an embedding would end the process, on a GPU without a word of why.
    """
    for number, (step, position) in enumerate(steps):
        for batch in step.microbatches if number < _CHECKED_STEPS else []:
            ids = batch.get("input_ids")
            if ids is None or not ids.numel():
                continue
            least, most = ids.numpy().min(), ids.numpy().max()
            if least < 0 or most >= vocab_size:
                wrong = least if least < 0 else most
                raise DataError(
                    f"train_dataset: token id {wrong} is outside of the model's vocabulary of {vocab_size} tokens; "
                    "give the data the model's tokenizer, or the model the data's vocabulary size"
                )
        yield step, position


class Microbatched:
    """A TrainLoader's epoch as one micro-batch after another."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        """Raises TypeError for data without a length."""
        return self.loader.num_microbatches()

    def __iter__(self) -> Iterator[Batch]:
        self.loader.set_epoch(0)
        return (batch for step in self.loader for batch in step.microbatches)


class _StreamSteps:
    """Steps of data that comes in order."""

    def __init__(self, rounds: Rounds, share: Share) -> None:
        self.rounds, self._share = rounds, share

    def __len__(self) -> int:
        return len(self.rounds)

    def num_microbatches(self) -> int:
        return len(self.rounds) * (self._share.batches_per_round() // self._share.size)

    def check(self, state: Position) -> None:
        self.rounds.check(state)

    def read(self, position: Position) -> Iterator[tuple[Step, Position]]:
        return ((step_of(portion.batches), portion.position) for portion in self.rounds.read(position))

    def close(self) -> None:
        """Workers of a stream end with its pass."""


def _check_training(first: FirstRound, *, drop_last: bool) -> None:
    """Raise DataError for data that has not one step."""
    if first.own_shards:
        log.info("train_dataset: each rank reads a shard of its own")
    lacking = first.lacking() if first.own_shards or not any(first.have) else []
    if drop_last:
        pairs = enumerate(zip(first.have, first.wanted, strict=True))
        lacking = [rank for rank, (have, wanted) in pairs if have < wanted]
    if lacking:
        where = f" on ranks {lacking}" if first.own_shards else ""
        raise DataError(
            f"train_dataset: ended before the first step of {sum(first.wanted)} {first.unit}{where}; "
            "lower global_batch_size or set dataloader_drop_last=false"
        )


class EvalLoader:
    """Iterating yields this rank's batches of a whole split in order; the ranks together yield every sample once.

    ``max_samples`` keeps the first so many of the global order, ``max_steps`` (-1: all) so many batches of each rank.
    ``dataset``, ``peers`` and ``dispatch`` are what TrainLoader takes. Raises DataError, on every rank, for a split
    without a sample for each of them.
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
        peers: Peers | None = None,
        dispatch: bool | None = None,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self._max_samples = max_samples
        self._max_steps = max_steps if max_steps >= 0 else None
        self._device, self._pin_memory = torch.device(device), pin_memory
        self._settings = {"per_device_eval_batch_size": batch_size, "max_eval_samples": max_samples}
        workers = Workers(num_workers, prefetch_factor, persistent_workers and num_workers > 0)
        self._source: MapBatches | Rounds
        if is_map_style(dataset):
            span = rank_slice(self._num_samples(len(dataset), size), rank, size)
            self._source = MapBatches(Fetcher(dataset, collate_fn, workers, 0, tell_epoch=False), span, batch_size)
        else:
            self._settings |= {} if peers is None else {"dispatch_eval_batches": dispatch is not False}
            share = Share(batch_size * size, batch_size, rank, size, drop_last=False)
            self._source = Rounds(
                "eval_dataset",
                dataset,
                share,
                collate_fn,
                workers,
                0,
                chunk=batch_size,
                check=self._check,
                limit=max_samples,
                peers=peers,
                dispatch=dispatch is not False,
            )

    def _num_samples(self, length: int, size: int) -> int:
        """Of a map-style split."""
        used = length if self._max_samples is None else min(length, self._max_samples)
        parts = [rank_slice(used, rank, size) for rank in range(size)]
        have = [stop - start for start, stop in parts]
        self._check(FirstRound(have, [self.batch_size] * size, "samples", own_shards=False))
        return used

    def _check(self, first: FirstRound) -> None:
        """Raise DataError if a rank has nothing."""
        size, total, lacking = len(first.have), sum(first.have), first.lacking()
        if not lacking:
            return
        given = ", ".join(f"{name}={_typed(value)}" for name, value in self._settings.items())
        if size == 1:
            raise DataError(f"eval_dataset: has no samples ({given}); give it some, or set eval_strategy=no")
        if self._max_samples is not None and self._max_samples < size:
            remedy = f"raise max_eval_samples to {size} or more"
        elif first.own_shards:
            remedy = "give every shard some, set dispatch_eval_batches=true"
        elif first.unit == "batches":
            remedy = f"make its batches smaller, {size} or more"
        else:
            remedy = f"give it {size} or more (data.eval_fraction, data.num_eval_samples, data.eval_files)"
        at_least = "at least " if first.own_shards else ""
        raise DataError(
            f"eval_dataset: {at_least}{total} {first.unit} for {size} ranks leaves ranks {lacking} without any "
            f"({given}); {remedy}, or use fewer ranks"
        )

    def __len__(self) -> int:
        """Batches of this rank. Raises TypeError for data without a length."""
        count = len(self._source)
        return count if self._max_steps is None else min(count, self._max_steps)

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self._source, Rounds):
            portions = self._source.read(start_of(0))
            batches: Iterator[Batch] = (batch for portion in portions for batch in portion.batches)
        else:
            batches = self._source.read()
        pairs = ((batch, None) for batch in islice(batches, self._max_steps))
        for batch, _ in to_device(pairs, self._device, self._pin_memory):
            yield batch

    def close(self) -> None:
        """End persistent workers."""
        if isinstance(self._source, MapBatches):
            self._source.fetcher.close()


def _typed(value: Any) -> str:
    """A setting's value as it is typed."""
    return "null" if value is None else str(value).lower()

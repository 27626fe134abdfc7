"""Loaders: one optimizer step at a time for training, one batch at a time for evaluation.

The order of map-style data is a function of (seed, epoch), with ``group_by_length`` of the samples' lengths too. Each
rank reads its own slice of each global batch. The position is the number of samples consumed, so a run resumed with
another world size or batch size continues with exactly the next sample.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather_cli.data.loaders.collate import (
    Batch,
    CollateFn,
    Counts,
    Position,
    Share,
    Step,
    check_labels,
    microbatches,
    rank_part,
    start_of,
)
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.iterable import FirstRound, IterableRounds
from forgather_cli.data.loaders.map_style import Batches, MapStyleSteps, check_dataset, is_map_style, lengths_of
from forgather_cli.data.loaders.prefetch import to_device
from forgather_cli.data.loaders.workers import Workers
from forgather_cli.documents.fields import ANYTHING, COUNT, check_fields, list_of, object_of, optional, several
from forgather_cli.errors import DataError
from forgather_cli.labels import IGNORED

_CHECKED_STEPS = 2
_log = logging.getLogger(__name__)


class TrainLoader:
    """Iterating yields this rank's ``Step`` of each optimizer step, from the position to the end of the epoch.

    ``dataset`` is map-style (with or without ``__getitems__``), iterable, or a ready dataloader, whose batches are the
    micro-batches. A slice is cut into micro-batches of ``micro_batch_size``; it may be empty. After the last step the
    position is the start of the next epoch. Raises DataError for data that cannot fill a step.

    This rank reads slice ``rank`` of ``size``. With ``data_ranks`` iterable data is read by rank 0 for all ranks, or
    with ``dispatch=False`` by each for itself, which may end at different steps (``IterableRounds``); making a loader
    and every step are then collective. With ``vocab_size`` the ids of the first steps are checked against it, and where
    ``labels_are_ids`` the labels. With ``token_bytes`` (V,) a step's counts tell the bytes of its targets. With
    ``group_by_length``, the name of the column of lengths (``lengths_of``), samples of like length come together.
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
        document_starts: bool = False,
        persistent_workers: bool = False,
        drop_last: bool = True,
        shuffle: bool = True,
        group_by_length: str | None = None,
        set_dataset_epoch: bool = True,
        collate_fn: CollateFn | None = None,
        device: torch.device | str = "cpu",
        data_ranks: DataRanks | None = None,
        dispatch: bool | None = None,
        vocab_size: int | None = None,
        labels_are_ids: bool = False,
        token_bytes: Tensor | None = None,
    ) -> None:
        check_dataset(dataset, "train_dataset")
        self._token_bytes = token_bytes
        self.dataset, self._vocab_size, self._labels_are_ids = dataset, vocab_size, labels_are_ids
        self.global_batch_size = global_batch_size
        self._device, self._pin_memory, self._starts = torch.device(device), pin_memory, document_starts
        workers = Workers(num_workers, prefetch_factor, persistent_workers)
        share = Share(global_batch_size, micro_batch_size, rank, size, drop_last)
        self.data: MapStyleSteps | IterableRounds
        if is_map_style(dataset):
            batches = Batches(dataset, collate_fn, workers, seed, tell_epoch=set_dataset_epoch)
            lengths = None if group_by_length is None else lengths_of(dataset, group_by_length)
            usual = partial(MapStyleSteps, len(dataset), lengths=lengths)
            make = getattr(dataset, "make_training_steps", usual)  # of one that says itself what stands where
            self.data = make(share, batches, seed, shuffle=shuffle)
        elif group_by_length is not None:
            raise DataError(
                "train_sampling_strategy: group_by_length needs data with __getitem__ and __len__, got a "
                f"{type(dataset).__name__}; choose random, which leaves such data in their own order"
            )
        else:
            self.data = IterableRounds(
                "train_dataset",
                dataset,
                share,
                collate_fn,
                workers,
                seed,
                chunk=global_batch_size,
                check=partial(_check_first_step, drop_last=drop_last),
                tell_epoch=set_dataset_epoch,
                ranks=data_ranks,
                dispatch=dispatch is not False,
            )
        self._position = start_of(0)

    @property
    def epoch(self) -> int:
        """The epoch that iterating reads."""
        return int(self._position["epoch"])

    @property
    def state_is_per_rank(self) -> bool:
        """True if each rank has a position of its own; then only the same number of ranks can resume."""
        return self.data.is_sharded

    def __len__(self) -> int:
        """Steps of a whole epoch. Raises TypeError for data without a length."""
        return len(self.data)

    def num_microbatches(self) -> int:
        """This rank's micro-batches in a whole epoch. Raises TypeError for data without a length."""
        return self.data.num_microbatches()

    def __iter__(self) -> Iterator[Step]:
        epoch = self.epoch
        for batches, (counts, position) in to_device(self._counted(), self._device, self._pin_memory, self._starts):
            self._position = position
            yield Step(batches, counts)
        self._position = self.data.start_of(epoch + 1, self._position)

    def _counted(self) -> Iterator[tuple[list[Batch], tuple[Counts, Position]]]:
        for number, (batches, position) in enumerate(self.data.read(self._position)):
            if number < _CHECKED_STEPS and self._vocab_size is not None:
                _check_ids(batches, self._vocab_size, labels_too=self._labels_are_ids)
            counts = Counts.of(batches, self._token_bytes)._replace(by_source=self.data.tokens)
            yield batches, (counts, position)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; if it is the present one, keep the position."""
        if epoch != self.epoch:
            self._position = start_of(epoch)

    def state_dict(self) -> Position:
        """The position after the last step that was yielded; data read ahead do not count."""
        return dict(self._position)

    def load_state_dict(self, state: Position) -> None:
        """Raises FieldError for what is no position, DataError for one that this data cannot resume from."""
        more = {"ranges": [], "shards": 1, "stream": None}
        kinds = {"ranges": list_of(several(COUNT, COUNT)), "shards": COUNT, "stream": optional(object_of(ANYTHING))}
        check_fields({**more, **state}, {"epoch": COUNT, "sample": COUNT, **kinds})
        if (stream := state.get("stream")) is not None:
            check_fields(
                {"chunk": 0, **stream},
                {**dict.fromkeys(("items", "num_workers", "used", "chunk"), COUNT), "source": ANYTHING},
                "stream",
            )
        self.data.check(state)
        self._position = dict(state)

    def samples_between(self, start: Position, stop: Position) -> list[int] | None:
        """Numbers of the samples from one position to a later one, in order; None for data without numbers."""
        return self.data.between(start, stop)

    def close(self) -> None:
        """End persistent workers."""
        self.data.close()


def _check_first_step(first: FirstRound, *, drop_last: bool) -> None:
    """Raise DataError for iterable data without a single step."""
    if first.own_shards:
        _log.info("train_dataset: each rank reads a shard of its own")
    if drop_last:
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


def _check_ids(batches: list[Batch], vocab_size: int, *, labels_too: bool) -> None:
    """Raise DataError for ids outside the vocabulary, at which an embedding fails, on a GPU with an error that does not
    say why; ``labels_too``: of targets as well."""
    for batch in batches:
        for key in ("input_ids", "labels") if labels_too else ("input_ids",):
            ids = batch.get(key)
            if ids is None or not ids.numel():
                continue
            if key == "input_ids" and ids.is_floating_point():
                kind = str(ids.dtype).removeprefix("torch.")
                raise DataError(f"train_dataset: token ids are {kind}; give whole numbers (torch.int64)")
            found = ids.numpy()
            found = np.where(found == IGNORED, 0, found) if key == "labels" else found
            least, most = found.min(), found.max()
            if least < 0 or most >= vocab_size:
                what, wrong = "label" if key == "labels" else "token id", least if least < 0 else most
                raise DataError(
                    f"train_dataset: {what} {wrong} is outside of the model's vocabulary of {vocab_size} tokens; "
                    "give the data the model's tokenizer, or the model the data's vocabulary size"
                )


class MicrobatchLoader:
    """A TrainLoader's epoch as one micro-batch after another."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        """Raises TypeError for data without a length."""
        return self.loader.num_microbatches()

    def __iter__(self) -> Iterator[Batch]:
        self.loader.set_epoch(0)
        return (batch for step in self.loader for batch in step.microbatches)


class EvalLoader:
    """Iterating yields this rank's batches of a whole split in order; the ranks together yield every sample once.

    ``max_samples`` keeps the first so many of the global order, of each source of a mixture, ``max_steps`` (-1: all) so
    many batches of each rank. No batch holds samples of two sources.
    ``dataset``, ``data_ranks`` and ``dispatch`` are what TrainLoader takes. Raises DataError, on every rank, for a
    split without a sample for each of them.
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
        document_starts: bool = False,
        persistent_workers: bool = False,
        collate_fn: CollateFn | None = None,
        device: torch.device | str = "cpu",
        data_ranks: DataRanks | None = None,
        dispatch: bool | None = None,
    ) -> None:
        check_dataset(dataset, "eval_dataset")
        self.dataset, self.batch_size = dataset, batch_size
        self._max_samples = max_samples
        self._max_steps = max_steps if max_steps >= 0 else None
        self._device, self._pin_memory, self._starts = torch.device(device), pin_memory, document_starts
        self._settings = {"per_device_eval_batch_size": batch_size, "max_eval_samples": max_samples}
        workers = Workers(num_workers, prefetch_factor, persistent_workers)
        self._rounds: IterableRounds | None = None
        if is_map_style(dataset):
            sources = getattr(dataset, "parts_by_source", {"": range(len(dataset))}).values()
            used = [number for source in sources for number in source[:max_samples]]
            parts = [rank_part(len(used), rank, size) for rank in range(size)]
            self._check(FirstRound(list(map(len, parts)), [batch_size] * size, "samples", own_shards=False))
            self._batches = Batches(dataset, collate_fn, workers, 0, tell_epoch=False)
            own = [used[place] for place in parts[rank]]
            of_sources = [[number for number in own if number in source] for source in sources]
            self._numbers = [batch for each in of_sources for batch in microbatches(each, batch_size)]
        else:
            self._settings |= {} if data_ranks is None else {"dispatch_eval_batches": dispatch is not False}
            self._rounds = IterableRounds(
                "eval_dataset",
                dataset,
                Share(batch_size * size, batch_size, rank, size, drop_last=False),
                collate_fn,
                workers,
                0,
                chunk=batch_size,
                check=self._check,
                limit=max_samples,
                ranks=data_ranks,
                dispatch=dispatch is not False,
            )

    def _check(self, first: FirstRound) -> None:
        """Raise DataError if a rank has nothing."""
        size, total, lacking = len(first.have), sum(first.have), first.lacking()
        if not lacking:
            return
        typed = {name: "null" if value is None else str(value).lower() for name, value in self._settings.items()}
        given = ", ".join(f"{name}={value}" for name, value in typed.items())
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
        count = len(self._numbers) if self._rounds is None else len(self._rounds)
        return count if self._max_steps is None else min(count, self._max_steps)

    def __iter__(self) -> Iterator[Batch]:
        if self._rounds is None:
            batches = self._batches.read((0, each) for each in self._numbers)
        else:
            batches = (batch for batches, _ in self._rounds.read(start_of(0)) for batch in batches)
        alone = (([batch], None) for batch in islice(batches, self._max_steps))
        for (batch,), _ in to_device(alone, self._device, self._pin_memory, self._starts):
            if "labels" in batch:
                check_labels(batch, "eval_dataset")
            yield batch

    def close(self) -> None:
        """End persistent workers."""
        if self._rounds is None:
            self._batches.close()

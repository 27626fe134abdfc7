"""Sequences of several sources as one dataset, whose batches may hold those of all, and their order in training.

A sample's number is its source's first number plus its index there; B samples, T = seq_len.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather_cli.data.loaders.collate import Batch, Position, Share, default_collate
from forgather_cli.data.loaders.map_style import Batches, MapStyleSteps, Request
from forgather_cli.data.mixture.audit import Tally, tally, write
from forgather_cli.data.mixture.settings import MixtureSettings, steps_of
from forgather_cli.data.mixture.stretches import Ints, Mixture, Stretch, Supply, exact
from forgather_cli.data.samples import one_of
from forgather_cli.data.splits import SourceUse
from forgather_cli.distributed import gather
from forgather_cli.documents.fields import ANYTHING, COUNT, FieldError, check_fields, list_of, object_of
from forgather_cli.errors import DataError
from forgather_cli.labels import LENGTHS, SOURCES

_TOGETHER = 4096  # positions that are dealt at once
_AHEAD = 16  # steps whose tallies are kept: more than are read before one is trained on
_MANY_PASSES = 4  # beyond which data teach ever less (Muennighoff et al. 2023, arXiv:2305.16264)
_log = logging.getLogger(__name__)


class JoinedDataset:
    """The samples of several datasets, one's behind another's. A batch has the keys that any of them has."""

    def __init__(self, sources: Mapping[str, Any], seq_len: int) -> None:
        self.seq_len = seq_len
        self.sizes = {name: len(source) for name, source in sources.items()}
        self.firsts = [0, *accumulate(self.sizes.values())]
        places = zip(self.sizes, self.firsts, self.firsts[1:], strict=False)
        self.parts_by_source = {name: range(first, behind) for name, first, behind in places}
        """The numbers of each source's samples, for evaluation."""
        self._sources = list(sources.values())
        self._pairs = [0, *accumulate(getattr(source, "num_pairs", 0) for source in self._sources)]
        self.num_pairs = self._pairs[-1]
        self.max_pairs = max((getattr(source, "max_pairs", 0) for source in self._sources), default=0)
        self._like: Batch = {LENGTHS: torch.tensor([seq_len])}
        """One row of each key."""
        for number in reversed(range(len(sources))):
            self._like |= self._read(number, [0])

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return one_of(self, index)

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        owners = [bisect_right(self.firsts, number) - 1 for number in numbers]
        indices = [number - self.firsts[owner] for number, owner in zip(numbers, owners, strict=True)]
        rows = sorted(range(len(owners)), key=owners.__getitem__)
        groups = groupby(rows, key=owners.__getitem__)
        parts = [self._read(owner, [indices[row] for row in own]) for owner, own in groups]
        places = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__))
        batch = {key: torch.cat([part[key] for part in parts])[places] for key in self._like}
        return {**batch, SOURCES: torch.tensor([owners, indices]).T}

    def row_pairs(self, row: int) -> range:
        """The numbers of a row's pairs, where all sources have some."""
        owner = bisect_right(self.firsts, row) - 1
        found, before = self._sources[owner].row_pairs(row - self.firsts[owner]), self._pairs[owner]
        return range(before + found.start, before + found.stop)

    def _read(self, source: int, indices: list[int]) -> Batch:
        """With all keys."""
        dataset = self._sources[source]
        many = getattr(dataset, "__getitems__", None)
        rows = many(indices) if many else [dataset[index] for index in indices]
        batch: Batch = default_collate(rows) if isinstance(rows, list) else dict(rows)
        return {**{key: self._absent(key, batch) for key in self._like.keys() - batch.keys()}, **batch}

    def _absent(self, key: str, batch: Batch) -> Tensor:
        """What a key is in rows that do not have it: one document, positions that count up, no padding but a mask's."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if key == LENGTHS and mask is not None and mask.shape == ids.shape:
            return mask.sum(1)
        if key == "position_ids":
            return torch.arange(self.seq_len).repeat(len(ids), 1)
        fill, like = {LENGTHS: self.seq_len, "attention_mask": 1}.get(key, 0), self._like[key]
        return torch.full((len(ids), *like.shape[1:]), fill, dtype=like.dtype)


def supplies_of(option: MixtureSettings, sizes: Mapping[str, int]) -> dict[str, Supply]:
    """By source, of which ``sizes`` are the numbers of samples."""
    supplies = {}
    for name, size in sizes.items():
        source = option.sources[name]
        supplies[name] = Supply(min(size, source.max_samples or size), source.max_epochs, source.on_exhausted == "stop")
    return supplies


def stretch_of(
    option: MixtureSettings, sizes: Mapping[str, int], begin: int, step: int, total: int, batch: int
) -> Stretch:
    """From a position on, at which the run is at ``step`` of ``total``, with ``batch`` sequences in each."""
    supplies, schedule = supplies_of(option, sizes), option.weight_schedule
    steps = steps_of([entry.at for entry in schedule], total)
    if steps != sorted(steps):
        raise DataError(f"data.weight_schedule: at goes back, got the steps {steps}; put them in order")
    typed = {name: source.weight for name, source in option.sources.items() if source.weight is not None}
    weights = [typed or {name: supply.samples for name, supply in supplies.items()}]
    weights += [entry.weights for entry in schedule]
    start = begin - step * batch if steps else 0  # weights that do not change hold from anywhere on
    entries = [(start + at * batch, exact(each)) for at, each in zip([0, *steps], weights, strict=True)]
    return Stretch(begin, supplies, entries)


def uses_of(mixture: Mixture, position: int, step: int, total: int, batch: int, seq_len: int) -> list[SourceUse]:
    """Of a run that is at ``step`` of ``total`` at a position, with ``batch`` sequences in each step from there on."""
    last = position + (total - step) * batch
    counts, uses = mixture.counts(last), []
    ends = {name: step - (position - at) // batch for at, name in mixture.ends if at <= last}
    for name, passes in mixture.passes(last).items():
        number = counts[name]
        share = number / max(sum(counts.values()), 1)
        uses.append(SourceUse(name, number, number * seq_len, share, passes, ends.get(name)))
        if mixture.stretches[-1].sources[name].max_epochs is None and passes > _MANY_PASSES:
            told = "data.sources.%s: is read %.1f times over the run without max_epochs; set it, or lower the weight"
            _log.warning(told, name, passes)
    return uses


class MixtureDataset(JoinedDataset):
    """What a mixture trains on."""

    def __init__(self, sources: Mapping[str, Any], option: MixtureSettings) -> None:
        super().__init__(sources, option.row_tokens)
        self.option = option

    def make_training_steps(self, share: Share, batches: Batches, seed: int, *, shuffle: bool) -> MixtureSteps:
        """For ``TrainLoader``."""
        return MixtureSteps(self, share, batches, seed, shuffle=shuffle)


class MixtureSteps(MapStyleSteps):
    """A mixture, a global batch for each training step. ``position`` of a position counts the sequences of the whole
    run; an epoch, as many as the sources hold together, begins where the one before has ended.
    """

    def __init__(self, data: MixtureDataset, share: Share, batches: Batches, seed: int, *, shuffle: bool) -> None:
        supplies = supplies_of(data.option, data.sizes).values()
        super().__init__(sum(supply.samples for supply in supplies), share, batches, seed, shuffle=shuffle)
        self._data, self.names = data, list(data.sizes)
        self._known: tuple[list[Any], Mixture] | None = None
        self._nothing = np.zeros((len(self.names), 2), np.uint64)
        self._tallies: dict[int, Tally] = {}
        """By position: of what this rank was handed from the start of the run's process to there."""

    # ------------------------------------------------------------------------------------------------------- position

    def check(self, state: Position) -> None:
        """Raise FieldError for what is no position of a mixture, DataError for one that cannot be resumed from."""
        if "position" not in state and "stretches" not in state:  # of whoever counts the samples of epochs
            return
        check_fields(state, {"position": COUNT, "stretches": list_of(object_of(ANYTHING))})
        try:
            begins = [stretch.begin for stretch in self._mixture(state["stretches"]).stretches]
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise FieldError(f"stretches are none of a mixture ({type(error).__name__}: {error})") from error
        if begins[:1] != [0] or begins != sorted(set(begins)) or begins[-1] > state["position"]:
            raise FieldError(f"stretches begin at {begins}, and position is {state['position']}")

    def start_of(self, epoch: int, behind: Position) -> Position:
        if "ranges" in behind:
            return super().start_of(epoch, behind)
        return {**behind, "epoch": epoch, "sample": 0}

    def settled(self, position: Position, step: int, total: int) -> Position:
        if "ranges" in position:  # what stands there follows from the settings alone
            return position
        at, known, batch = position.get("position", 0), position.get("stretches", []), self._share.global_batch
        new = stretch_of(self._data.option, self._data.sizes, at, step, total or len(self), batch)
        mixture = self._mixture(known) if known else Mixture([new])
        if replace(mixture.stretches[-1], begin=at) != new:
            mixture = mixture.appended(new)
        if not known and mixture.end < batch and self._share.drop_last:
            raise DataError(f"global_batch_size: {batch}, but the sources end after {mixture.end} sequences; lower it")
        if total and not self.facts:
            uses = uses_of(mixture, at, step, total, batch, self._data.seq_len)
            self.facts = {f"source {each.name}": str(each) for each in uses}
        return {**position, "position": at, "stretches": [stretch.state() for stretch in mixture.stretches]}

    def steps_left(self, position: Position) -> int:
        if "ranges" in position:
            return super().steps_left(position)
        left = self._mixture(position["stretches"]).end - position["position"]
        return self._share.num_steps(max(left, 0), self._share.global_batch)

    def passes(self, position: Position) -> dict[str, float]:
        return {} if "ranges" in position else self._mixture(position["stretches"]).passes(position["position"])

    def _mixture(self, stretches: list[Any]) -> Mixture:
        if self._known is None or (self._known[0] is not stretches and self._known[0] != stretches):
            self._known = stretches, Mixture([Stretch.from_state(each) for each in stretches])
        return self._known[1]

    # -------------------------------------------------------------------------------------------------------- samples

    def read(self, position: Position) -> Iterator[tuple[list[Batch], Position]]:
        handed = self._tallies.get(position.get("position", 0), self._nothing)
        for batches, after in super().read(position):
            tokens = torch.zeros(len(self.names), dtype=torch.int64)
            for batch in batches:
                samples = batch[SOURCES] if self.keeps_sources else batch.pop(SOURCES)
                handed = handed + tally(samples.numpy(), len(self.names))
                tokens.index_add_(0, samples[:, 0], batch[LENGTHS])
            self.tokens = tokens.tolist()
            self._tallies = dict([*self._tallies.items(), (after.get("position", 0), handed)][-_AHEAD:])
            yield batches, after

    def note(self, position: Position, step: int, path: Path | None, group: Any, *, starts: bool) -> None:
        if "ranges" in position:  # the pool's ledger tells who has read what
            return
        if starts:
            self._tallies = {}
        mine = self._tallies.get(position["position"], self._nothing)
        of_ranks = dict(gather((self._share.rank, mine.tolist()), group))  # some read the same
        if path is not None:
            total = np.array([*of_ranks.values()], np.uint64).sum(axis=0).tolist()
            sources = {name: [size, *of] for (name, size), of in zip(self._data.sizes.items(), total, strict=True)}
            line = {"starts": starts, "step": step, "order": [self._seed, self._shuffle], "sources": sources}
            write({**line, "position": position["position"], "stretches": position["stretches"]}, path)

    def _requests(self, position: Position) -> Iterator[tuple[list[Request], Position]]:
        share, size, batch = self._share, self._share.micro_batch, self._share.global_batch
        if "stretches" not in position:
            at = position["epoch"] * self._length + position["sample"]
            position = {**self.settled(position, 0, 0), "position": at}
        mixture, dealt = self._mixture(position["stretches"]), np.empty(0, np.int64)
        least = batch if share.drop_last else 1
        while position["sample"] + least <= self._length and position["position"] + least <= mixture.end:
            begin = position["position"]
            count = min(batch, mixture.end - begin)
            if len(dealt) < count:
                dealt = self._numbers(mixture, begin, min(begin + max(batch, _TOGETHER), mixture.end))
            part = share.of(count)
            numbers, dealt = dealt[part.start : part.stop].tolist(), dealt[count:]
            requests = [(position["epoch"], numbers[at : at + size]) for at in range(0, len(numbers), size)]
            position = {**position, "sample": position["sample"] + count, "position": begin + count}
            yield requests, position

    def between(self, start: Position, stop: Position) -> list[int] | None:
        """As of all data; None too where a source is gone."""
        if "ranges" in start or "ranges" in stop:
            return None
        mixture = self._mixture(stop["stretches"])
        there = set(mixture.names) <= set(self.names)
        return self._numbers(mixture, start["position"], stop["position"]).tolist() if there else None

    def _samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """Of ranges, whose numbers are positions."""
        stretch = stretch_of(self._data.option, self._data.sizes, 0, 0, len(self), self._share.global_batch)
        first = epoch * self._length
        return list(self._numbers(self._mixture([stretch.state()]), first + start, first + stop).tolist())

    def _numbers(self, mixture: Mixture, begin: int, end: int) -> Ints:
        """Of the samples at positions [begin, end)."""
        sources, indices = mixture.samples(begin, end, self._data.sizes, self._seed, shuffle=self._shuffle).T
        numbers: Ints = np.array(self._data.firsts)[sources] + indices
        return numbers

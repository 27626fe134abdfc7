"""Sequences of several sources as one dataset, whose batches may hold those of all, their order in training, and what
of them was read.

A sample's number is its source's first number plus its index there; B samples, T = seq_len.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forgather_cli.data.cache import digest
from forgather_cli.data.loaders.collate import Batch, Position, Share, default_collate
from forgather_cli.data.loaders.map_style import Batches, MapStyleSteps, Request
from forgather_cli.data.mixture.settings import MixtureSettings, steps_of
from forgather_cli.data.mixture.stretches import Mixture, Stretch, Supply, exact
from forgather_cli.data.order import Order, mix
from forgather_cli.data.samples import one_of
from forgather_cli.data.splits import SourceUse
from forgather_cli.distributed import gather
from forgather_cli.documents.fields import ANYTHING, COUNT, FieldError, check_fields, list_of, object_of
from forgather_cli.documents.regular_files import append, read_bytes, set_aside, write_whole
from forgather_cli.errors import DataError
from forgather_cli.labels import LENGTHS, NUMBERS, SOURCES

_BLOCK = 4096  # positions that are dealt at once
_AHEAD = 16  # steps whose tallies are kept: more than are read before one is trained on
_MANY = 4  # passes, beyond which data teach ever less (Muennighoff et al. 2023, arXiv:2305.16264)
_log = logging.getLogger(__name__)
Ints = NDArray[np.int64]


class JoinedDataset:
    """The samples of several datasets, one's behind another's. A batch has the keys that any of them has."""

    def __init__(self, sources: Mapping[str, Any], seq_len: int) -> None:
        self.names, self.seq_len = list(sources), seq_len
        self.sizes = [len(source) for source in sources.values()]
        self.firsts = np.cumsum([0, *self.sizes])
        places = zip(self.names, self.firsts.tolist(), self.sizes, strict=False)
        self.parts_by_source = {name: range(first, first + size) for name, first, size in places}
        """The numbers of each source's samples, for evaluation."""
        self._sources = list(sources.values())
        self._pairs = np.cumsum([0, *(getattr(source, "num_pairs", 0) for source in self._sources)]).tolist()
        self.num_pairs = self._pairs[-1]
        self.max_pairs = max((getattr(source, "max_pairs", 0) for source in self._sources), default=0)
        self._like: Batch = {}
        """One row of each key."""
        for number in range(len(self.names)):
            self._like = {**self._read(number, [0]), **self._like}

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return one_of(self, index)

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        owners = np.searchsorted(self.firsts, numbers, side="right") - 1
        batch = {key: self._absent(key, row, len(numbers)) for key, row in self._like.items()}
        for source in np.unique(owners):
            rows = np.flatnonzero(owners == source)
            read = self._read(int(source), (np.asarray(numbers)[rows] - self.firsts[source]).tolist())
            for key, value in read.items():
                batch[key][torch.from_numpy(rows)] = value
        return {**batch, SOURCES: torch.from_numpy(owners)}

    def row_pairs(self, row: int) -> range:
        """The numbers of a row's pairs, where all sources have some."""
        owner = int(np.searchsorted(self.firsts, row, side="right")) - 1
        found, before = self._sources[owner].row_pairs(row - int(self.firsts[owner])), self._pairs[owner]
        return range(before + found.start, before + found.stop)

    def _read(self, source: int, indices: list[int]) -> Batch:
        dataset = self._sources[source]
        many = getattr(dataset, "__getitems__", None)
        rows = many(indices) if many else [dataset[index] for index in indices]
        return default_collate(rows) if isinstance(rows, list) else rows

    def _absent(self, key: str, row: Tensor, count: int) -> Tensor:
        """What a key is in rows that do not have it: one document, positions that count up, no padding."""
        if key == "position_ids":
            return torch.arange(self.seq_len).repeat(count, 1)
        fill = self.seq_len if key == LENGTHS else 0
        return torch.full((count, *row.shape[1:]), fill, dtype=row.dtype)


@dataclass(frozen=True)
class Shares:
    """What the settings say of the sources, by name."""

    supplies: Mapping[str, Supply]
    weights: Mapping[str, Fraction]
    schedule: Sequence[tuple[float, Mapping[str, Fraction]]]
    """(at, weights)."""

    @classmethod
    def of(cls, option: MixtureSettings, lengths: Mapping[str, int]) -> Shares:
        """``lengths``: samples of each source."""
        supplies: dict[str, Supply] = {}
        for name, length in lengths.items():
            given = option.sources[name]
            samples = min(length, given.max_samples or length)
            supplies[name] = Supply(samples, given.max_epochs, given.on_exhausted == "stop")
        typed = {name: source.weight for name, source in option.sources.items() if source.weight is not None}
        weights = exact(typed or {name: supply.samples for name, supply in supplies.items()})
        return cls(supplies, weights, [(entry.at, exact(entry.weights)) for entry in option.weight_schedule])

    def stretch(self, begin: int, step: int, total: int, batch: int) -> Stretch:
        """From a position on, at which the run is at ``step`` of ``total``, with ``batch`` sequences in each."""
        steps = steps_of([at for at, _ in self.schedule], total)
        if steps != sorted(steps):
            raise DataError(f"data.weight_schedule: at goes back, got the steps {steps}; put them in order")
        entries = [(0, self.weights), *zip(steps, (weights for _, weights in self.schedule), strict=True)]
        return Stretch(begin, self.supplies, [(begin + (at - step) * batch, dict(each)) for at, each in entries])


def uses_of(mixture: Mixture, position: int, step: int, total: int, batch: int, seq_len: int) -> list[SourceUse]:
    """Of a run that is at ``step`` of ``total`` at a position, with ``batch`` sequences in each step from there on."""
    last = position + (total - step) * batch
    counts, places, uses = mixture.counts(last), mixture.places(last), []
    ends = {name: step - (position - at) // batch for at, name in mixture.ends if at <= last}
    for name, supply in mixture.stretches[-1].sources.items():
        number, (epoch, index) = counts[name], places[name]
        share, passes = number / max(sum(counts.values()), 1), epoch + index / supply.samples
        uses.append(SourceUse(name, number, number * seq_len, share, passes, ends.get(name)))
        if supply.max_epochs is None and passes > _MANY:
            told = "data.sources.%s: is read %.1f times over the run without max_epochs; set it, or lower the weight"
            _log.warning(told, name, passes)
    return uses


class MixtureDataset(JoinedDataset):
    """What a mixture trains on. A batch tells the numbers of its samples, which ``MixtureSteps`` takes out."""

    def __init__(self, sources: Mapping[str, Any], seq_len: int, shares: Shares) -> None:
        super().__init__(sources, seq_len)
        self.shares = shares

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        return {**super().__getitems__(numbers), NUMBERS: torch.tensor(numbers)}

    def make_training_steps(
        self, share: Share, batches: Batches, seed: int, *, shuffle: bool, group_by_length: str | None
    ) -> MixtureSteps:
        """For ``TrainLoader``."""
        if group_by_length is not None:
            raise DataError(
                "train_sampling_strategy: group_by_length would move the samples of data=mixture, got it; choose "
                "random or sequential"
            )
        return MixtureSteps(self, share, batches, seed, shuffle=shuffle)


class MixtureSteps(MapStyleSteps):
    """A mixture, a global batch for each training step. ``position`` of a position counts the sequences of the whole
    run; an epoch, as many as the sources hold together, begins where the one before has ended.
    """

    def __init__(self, data: MixtureDataset, share: Share, batches: Batches, seed: int, *, shuffle: bool) -> None:
        super().__init__(
            sum(supply.samples for supply in data.shares.supplies.values()), share, batches, seed, shuffle=shuffle
        )
        self._shares, self._seq_len = data.shares, data.seq_len
        self.names, self.keeps_sources, self.mixture = data.names, False, self
        """``keeps_sources``: batches say of which source their rows are."""
        self._places = dict(zip(data.names, zip(data.firsts.tolist(), data.sizes, strict=False), strict=True))
        """(first number, size) of each source."""
        self._known: tuple[list[Any], Mixture] | None = None
        self._newest_block: tuple[Mixture, int, Ints] | None = None
        self._firsts, self._nothing = data.firsts, np.zeros((len(data.names), 2), np.uint64)
        self._tallies: dict[int, NDArray[np.uint64]] = {}
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
        at, known = position.get("position", 0), position.get("stretches", [])
        new = self._shares.stretch(at, step, total or len(self), self._share.global_batch)
        mixture = self._mixture(known) if known else Mixture([new])
        if known:
            last = mixture.stretches[-1]
            constant = len(last.weights) == len(new.weights) == 1
            old, now = ([each for _, each in one.weights] if constant else one.weights for one in (last, new))
            if old != now or last.sources != new.sources:
                mixture = mixture.appended(new)
        elif mixture.end is not None and mixture.end < self._share.global_batch and self._share.drop_last:
            raise DataError(
                f"global_batch_size: {self._share.global_batch} sequences per step, but the sources end after "
                f"{mixture.end}; lower it, or set dataloader_drop_last=false"
            )
        if total and not self.facts:
            uses = uses_of(mixture, at, step, total, self._share.global_batch, self._seq_len)
            self.facts = {f"source {each.name}": str(each) for each in uses}
        return {**position, "position": at, "stretches": [stretch.state() for stretch in mixture.stretches]}

    def steps_left(self, position: Position) -> int | None:
        if "ranges" in position:
            return None
        end = self._mixture(position["stretches"]).end
        return (
            None if end is None else self._share.num_steps(max(end - position["position"], 0), self._share.global_batch)
        )

    def tokens_of(self, batches: list[Batch]) -> list[int]:
        """Tokens of each source."""
        counts = torch.zeros(len(self.names), dtype=torch.int64)
        for batch in batches:
            owners = batch[SOURCES] if self.keeps_sources else batch.pop(SOURCES)
            lengths = batch.get(LENGTHS, torch.tensor(batch["input_ids"].shape[1]))
            counts.index_add_(0, owners, lengths.expand(len(owners)))
        return counts.tolist()

    def passes(self, position: Position) -> dict[str, float]:
        """How often each source has been read before a position; nothing of a share of a pool."""
        if "ranges" in position:
            return {}
        mixture = self._mixture(position["stretches"])
        places, last = mixture.places(position["position"]), mixture.stretches[-1].sources
        return {name: places[name][0] + places[name][1] / last[name].samples for name in self.names}

    def _mixture(self, stretches: list[Any]) -> Mixture:
        if self._known is None or (self._known[0] is not stretches and self._known[0] != stretches):
            self._known = stretches, Mixture([Stretch.from_state(each) for each in stretches])
        return self._known[1]

    # -------------------------------------------------------------------------------------------------------- samples

    def read(self, position: Position) -> Iterator[tuple[list[Batch], Position]]:
        tally = self._tallies.get(position.get("position", 0), self._nothing)
        for batches, after in super().read(position):
            tally = sum((self.tally(batch.pop(NUMBERS).numpy()) for batch in batches), tally)
            self._tallies = dict([*self._tallies.items(), (after.get("position", 0), tally)][-_AHEAD:])
            yield batches, after

    def tally(self, numbers: Ints) -> NDArray[np.uint64]:
        """(sources, 2) of samples: how many, and the sum modulo 2^64 of the hashes of their indices in the source."""
        owners, tally = np.searchsorted(self._firsts, numbers, side="right") - 1, self._nothing.copy()
        hashes = mix((numbers - self._firsts[owners] + 1).astype(np.uint64))  # that of 0 is 0
        np.add.at(tally, owners, np.stack([np.ones_like(hashes), hashes], axis=1))
        return tally

    def note(self, position: Position, step: int, path: Path | None, group: Any, *, starts: bool) -> None:
        if "ranges" in position:  # the pool's ledger tells who has read what
            return
        if starts:
            self._tallies = {}
        mine = self._tallies.get(position["position"], self._nothing)
        of_ranks = dict(gather((self._share.rank, mine.tolist()), group))  # some read the same
        if path is not None:
            total = np.array([*of_ranks.values()], np.uint64).sum(axis=0).tolist()
            sources = {name: [size, *of] for (name, (_, size)), of in zip(self._places.items(), total, strict=True)}
            line = {"starts": starts, "step": step, "order": [self._seed, self._shuffle], "sources": sources}
            _write({**line, "position": position["position"], "stretches": position["stretches"]}, path)

    def _requests(self, position: Position) -> Iterator[tuple[list[Request], Position]]:
        share, size, batch = self._share, self._share.micro_batch, self._share.global_batch
        if "stretches" not in position:
            at = position["epoch"] * self._length + position["sample"]
            position = {**self.settled(position, 0, 0), "position": at}
        mixture = self._mixture(position["stretches"])
        while position["sample"] + (batch if share.drop_last else 1) <= self._length:
            begin = position["position"]
            end = begin + batch if mixture.end is None else min(begin + batch, mixture.end)
            if end - begin < (batch if share.drop_last else 1):
                return
            part = share.of(end - begin)
            numbers = self._numbers(mixture, begin + part.start, begin + part.stop)
            requests = [(position["epoch"], numbers[at : at + size]) for at in range(0, len(numbers), size)]
            position = {**position, "sample": position["sample"] + end - begin, "position": end}
            yield requests, position

    def between(self, start: Position, stop: Position) -> list[int] | None:
        """As of all data; None too where a source is gone."""
        if "ranges" in start or "ranges" in stop:
            return None
        mixture = self._mixture(stop["stretches"])
        there = set(mixture.names) <= self._places.keys()
        return self._numbers(mixture, start["position"], stop["position"]) if there else None

    def _samples(self, epoch: int, start: int, stop: int) -> list[int]:
        """Of ranges, whose numbers are positions."""
        stretch = self._shares.stretch(0, 0, len(self), self._share.global_batch)
        first = epoch * self._length
        return self._numbers(self._mixture([stretch.state()]), first + start, first + stop)

    def _numbers(self, mixture: Mixture, begin: int, end: int) -> list[int]:
        """Of the samples at positions [begin, end)."""
        found: list[int] = []
        while begin < end:
            number, offset = divmod(begin, _BLOCK)
            found += self._block(mixture, number)[offset : offset + end - begin].tolist()
            begin = (number + 1) * _BLOCK
        return found

    def _block(self, mixture: Mixture, number: int) -> Ints:
        if self._newest_block is None or self._newest_block[0] is not mixture or self._newest_block[1] != number:
            first = number * _BLOCK
            last = first + _BLOCK if mixture.end is None else min(first + _BLOCK, mixture.end)
            begins = [stretch.begin for stretch in mixture.stretches]
            parts = [
                self._numbers_in(stretch, mixture, max(first, begin), min(last, end))
                for stretch, begin, end in zip(mixture.stretches, begins, [*begins[1:], last], strict=True)
                if max(first, begin) < min(last, end)
            ]
            self._newest_block = mixture, number, np.concatenate(parts)
        return self._newest_block[2]

    def _numbers_in(self, stretch: Stretch, mixture: Mixture, begin: int, end: int) -> Ints:
        sources, passes, indices = mixture.deal(begin, end)
        numbers = np.full(end - begin, -1, np.int64)
        for source in np.unique(sources):
            if (place := self._places.get(name := mixture.names[source])) is None:  # it is gone, and all this behind
                continue
            samples, (first, size) = stretch.sources[name].samples, place
            seed = int(digest([self._seed, name])[:16], 16)
            for number in np.unique(passes[sources == source]):
                here = (sources == source) & (passes == number)
                at = indices[here]
                if samples < size and number:  # of the first ``samples`` of pass 0
                    at = Order(samples, seed, int(number), shuffle=self._shuffle).at(at)
                within = 0 if samples < size else int(number)
                numbers[here] = first + Order(size, seed, within, shuffle=self._shuffle).at(at).astype(np.int64)
        return numbers


# ---------------------------------------------------------------------------------------------------------- the audit
# Each start and save writes a line to RUN/mixture.jsonl, and a rollback before it goes back: step, position, stretches,
# seed and shuffling ("order"), and by source [its size, how many of its sequences the loaders of all ranks have handed
# out since the start, the sum of the hashes of their indices], which does not depend on their order. The indices have
# come with the rows.


def _write(line: Mapping[str, Any], path: Path) -> None:
    """Add a line; one of a start cuts those behind its position."""
    with suppress(OSError):  # a save that follows will say so
        try:
            if line["starts"] and path.exists():
                known = {text: json.loads(text) for text in read_bytes(path).split(b"\n")[:-1]}
                at, step = line["position"], line["step"]
                # one of this step or before is behind a position that was moved back, and tells of it
                kept = [text for text, of in known.items() if of["step"] <= step or of["position"] <= at]
                write_whole(path, b"".join(text + b"\n" for text in kept))
        except (LookupError, TypeError, ValueError) as error:
            set_aside(path, f"{path}: is damaged ({error})")
        append(path, json.dumps(line).encode() + b"\n", durable=True)


def audit(path: Path) -> dict[str, Any]:
    """{lost, repeated, sources: {NAME: {sequences, share}}} from the first line on, without a torn last one.

    Raises DataError.
    """
    try:
        return _compared([json.loads(text) for text in read_bytes(path).split(b"\n")[:-1]])
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a run on data=mixture") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DataError(f"{path}: is damaged ({error}), so what was read is not known") from error


def _compared(lines: list[Any]) -> dict[str, Any]:
    """At each line what was to be handed out, by its stretches, is compared with what was; what has come since the line
    before is lost or repeated. Where a source's number is right and its hash is not, at least one is lost and another
    one repeated.
    """
    sizes = {name: size for line in lines for name, (size, *_) in line["sources"].items()}
    shares = SimpleNamespace(supplies={name: Supply(size) for name, size in sizes.items()})
    data: Any = SimpleNamespace(names=[*sizes], sizes=[*sizes.values()], shares=shares, seq_len=0)
    data.firsts, nothing = np.cumsum([0, *data.sizes]), np.zeros((len(sizes), 2), np.uint64)
    before = handed = missing = nothing
    settings, lost, repeated = None, 0, 0
    for line in lines:
        if settings != (settings := (line["order"], line["stretches"])):
            (seed, shuffle), due, at = line["order"], nothing, lines[0]["position"]
            steps = MixtureSteps(data, Share(1, 1, 0, 1, drop_last=False), data, seed, shuffle=shuffle)
        begin, end = sorted((at, line["position"]))
        for first in range(begin, end, _BLOCK):
            last = {**line, "position": min(first + _BLOCK, end)}
            part = steps.tally(np.array(steps.between({"position": first}, last)))
            due = due + part if at == begin else due - part
        at, before = line["position"], handed if line["starts"] else before
        handed = before + np.array([line["sources"].get(name, (0, 0, 0))[1:] for name in sizes], np.uint64)
        new, missing = (due - handed - missing).view(np.int64), due - handed
        for count, hashes in new.tolist():
            unlike = int(count == 0 and hashes != 0)
            lost, repeated = lost + max(count, 0) + unlike, repeated + max(-count, 0) + unlike
    counts = dict(sorted(zip(sizes, handed[:, 0].tolist(), strict=True)))
    sources = {name: {"sequences": n, "share": n / max(sum(counts.values()), 1)} for name, n in counts.items()}
    return {"lost": lost, "repeated": repeated, "sources": sources}

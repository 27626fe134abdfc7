"""``Mixture``: the stretches of a run, each with its settings, and what stands at each position.

The state is the list of stretches. Each opens a ledger at its position: quotas begin at 0 there, so that every prefix
of the ledger is less than one sequence from its quota, and nothing that stands before it changes. Where a source
stands in its data at the beginning of a stretch follows from the stretches before it, also where it was not in the
last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.cache import digest
from forgather_cli.data.mixture.dealing import Dealing
from forgather_cli.data.mixture.quotas import Quotas
from forgather_cli.data.order import Order

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Supply:
    """What a source has to give."""

    samples: int
    """Sequences of one pass."""
    max_epochs: int | None = None
    """Passes, over the whole run; None: no end."""
    stops: bool = False
    """Training ends where it ends; else it is dropped."""


@dataclass(frozen=True)
class Stretch:
    begin: int
    """Its first position."""
    sources: Mapping[str, Supply]
    weights: Sequence[tuple[int, Mapping[str, Fraction]]]
    """(position, weights of all sources) in order: the entries of the schedule. A position may lie before ``begin``: a
    line goes on where it was. The first's weights hold up to it."""

    def state(self) -> dict[str, Any]:
        """Plain JSON; ``from_state`` is its inverse."""
        weights = [[at, {name: str(weight) for name, weight in entry.items()}] for at, entry in self.weights]
        sources = {name: asdict(source) for name, source in self.sources.items()}
        return {"begin": self.begin, "sources": sources, "weights": weights}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Stretch:
        sources = {name: Supply(**source) for name, source in state["sources"].items()}
        return cls(state["begin"], sources, [(at, exact(weights)) for at, weights in state["weights"]])


def exact(weights: Mapping[str, float | str | Fraction]) -> dict[str, Fraction]:
    """Weights as they were typed: 0.1 is 1/10, which no float is."""
    return {name: Fraction(str(weight)) for name, weight in weights.items()}


class _Ledger:
    """A stretch, and the place of each source at its beginning."""

    def __init__(self, stretch: Stretch, places: Mapping[str, tuple[int, int]], before: Mapping[str, Supply]) -> None:
        """``places``: (pass, index in it) of each source's next sample; a source that has none is new. ``before``: of
        the pass that a place lies in."""
        self.stretch = stretch
        self.names = sorted(stretch.sources)  # the first of equal deadlines does not depend on the order of settings
        sources = [stretch.sources[name] for name in self.names]
        firsts = []
        for name, source in zip(self.names, sources, strict=True):
            epoch, index = places.get(name, (0, 0))
            # of pass 0 any number of samples is the beginning, of a later one it is an order of its own
            if index >= source.samples or (epoch and index and before[name].samples != source.samples):
                epoch, index = epoch + 1, 0
            firsts.append(epoch * source.samples + index)
        holds = [
            None if source.max_epochs is None else max(source.max_epochs * source.samples - first, 0)
            for source, first in zip(sources, firsts, strict=True)
        ]
        self.samples = np.array([source.samples for source in sources], np.int64)
        self.firsts = np.array(firsts, np.int64)
        """Numbers of their next sequences: pass times samples of one, and the index."""
        entries = [(at - stretch.begin, [weights[name] for name in self.names]) for at, weights in stretch.weights]
        self.dealing = Dealing(Quotas(entries, holds, [source.stops for source in sources]))


class Mixture:
    """Which sample of which source stands at each position of a run: a function of its stretches."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        """``stretches``: in order; each holds from its ``begin`` to the next one's."""
        self.stretches = tuple(stretches)
        self._ledgers: list[_Ledger] = []
        before: dict[str, Supply] = {}
        for stretch in self.stretches:
            self._ledgers.append(_Ledger(stretch, self.places(stretch.begin) if before else {}, before))
            before |= stretch.sources
        self.names = sorted({name for stretch in self.stretches for name in stretch.sources})
        """Of all sources there ever were; ``deal`` returns indices into it."""
        self._ids = [np.array([self.names.index(name) for name in ledger.names], np.int64) for ledger in self._ledgers]

    @property
    def end(self) -> int:
        """The position at which training ends since its sources have; where it never does by these, one behind all."""
        last = self._ledgers[-1]
        return last.stretch.begin + last.dealing.quotas.end

    @property
    def ends(self) -> list[tuple[int, str]]:
        """(position, source) of those that end, by the last stretch; known before any of it is dealt."""
        last = self._ledgers[-1]
        return [(last.stretch.begin + position, last.names[source]) for position, source in last.dealing.quotas.ends]

    def appended(self, stretch: Stretch) -> Mixture:
        """With other settings from a position on, and as it was before; later stretches are gone."""
        return Mixture([*(each for each in self.stretches if each.begin < stretch.begin), stretch])

    def deal(self, begin: int, end: int) -> Ints:
        """(4, n): sources, how many samples they have in a pass, passes, and indices in the pass, at positions [begin,
        end); IndexError for those behind the end."""
        parts = [np.empty((4, 0), np.int64)]
        for (ledger, stop), ids in zip(self._ledgers_to(end), self._ids, strict=False):
            dealing, first = ledger.dealing, ledger.stretch.begin
            while begin < stop:
                start = dealing.start(begin - first)
                until = min(stop, first + dealing.stop(start))
                if until <= begin:
                    raise IndexError(f"the sources of this mixture end before position {begin}")
                sources, counts = (part[begin - first - start : until - first - start] for part in dealing.table(start))
                samples = ledger.samples[sources]
                passes, indices = np.divmod(ledger.firsts[sources] + counts, samples)
                parts.append(np.stack([ids[sources], samples, passes, indices]))
                begin = until
        return np.concatenate(parts, axis=1)

    def samples(self, begin: int, end: int, sizes: Mapping[str, int], seed: int, *, shuffle: bool) -> Ints:
        """(n, 2): the source, by its place in ``sizes``, and the index there of the sample at each position. ``sizes``:
        samples of each source, ``max_samples`` not counted."""
        dealt, names = self.deal(begin, end), list(sizes)
        found = np.empty((end - begin, 2), np.int64)
        for group in np.unique(dealt[:3], axis=1).T:
            here = (dealt[:3] == group[:, None]).all(axis=0)
            (source, samples, number), indices = group.tolist(), dealt[3, here]
            name = self.names[source]
            key = int(digest([seed, name])[:16], 16)
            if number and samples < sizes[name]:  # the first ``samples`` of pass 0, in an order of this one's
                indices, number = Order(samples, key, number, shuffle=shuffle).at(indices), 0
            found[here, 0] = names.index(name)
            found[here, 1] = Order(sizes[name], key, number, shuffle=shuffle).at(indices)
        return found

    def counts(self, position: int) -> dict[str, int]:
        """Sequences of each source before the position, of all stretches."""
        counts = dict.fromkeys(self.names, 0)
        for ledger, stop in self._ledgers_to(position):
            for name, count in zip(ledger.names, ledger.dealing.counts(stop - ledger.stretch.begin), strict=True):
                counts[name] += int(count)
        return counts

    def places(self, position: int) -> dict[str, tuple[int, int]]:
        """(pass, index in it) of each source's next sample; a source that was taken away keeps its place."""
        places: dict[str, tuple[int, int]] = {}
        for ledger, stop in self._ledgers_to(position):
            numbers = ledger.firsts + ledger.dealing.counts(stop - ledger.stretch.begin)
            places |= zip(
                ledger.names, map(tuple, np.stack(np.divmod(numbers, ledger.samples)).T.tolist()), strict=True
            )
        return places

    def passes(self, position: int) -> dict[str, float]:
        """How often each source of the last stretch has been read before the position."""
        places, last = self.places(position), self.stretches[-1].sources
        return {name: places[name][0] + places[name][1] / supply.samples for name, supply in last.items()}

    def _ledgers_to(self, position: int) -> list[tuple[_Ledger, int]]:
        """Those that begin up to the position, and where each stops, there at the latest."""
        stops = [*(ledger.stretch.begin for ledger in self._ledgers[1:]), position]
        pairs = zip(self._ledgers, stops, strict=True)
        return [(ledger, min(stop, position)) for ledger, stop in pairs if ledger.stretch.begin <= position]

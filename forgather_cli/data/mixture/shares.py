"""What the settings say of the sources, and what a run reads of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from forgather_cli.data.mixture.settings import MixtureSettings, steps_of
from forgather_cli.data.mixture.stretches import Mixture, Stretch, Supply, exact
from forgather_cli.errors import DataError

_log = logging.getLogger(__name__)
_MANY = 4  # passes; beyond them repeated data teach ever less (Muennighoff et al. 2023, arXiv:2305.16264)


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


@dataclass(frozen=True)
class SourceUse:
    """What a run reads of a source."""

    name: str
    samples: int
    """Sequences of one pass."""
    max_epochs: int | None
    sequences: int
    """Over the whole run, as all that follows."""
    tokens: int
    """With padding."""
    share: float
    """Of the sequences of all."""
    passes: float
    ends: int | None
    """The step in which it ends; None: it does not."""

    def __str__(self) -> str:
        ends = "" if self.ends is None else f", ends at step {self.ends:,}"
        return (
            f"{self.sequences:,} sequences ({self.share:.1%}), {self.tokens:,} tokens, {self.passes:.2f} passes{ends}"
        )


def uses_of(mixture: Mixture, position: int, step: int, total: int, batch: int, seq_len: int) -> list[SourceUse]:
    """Of those that a run reads which is at ``step`` of ``total`` at a position, with ``batch`` sequences in each."""
    last = position + (total - step) * batch
    last = last if mixture.end is None else min(last, mixture.end)
    counts, places = mixture.counts(last), mixture.places(last)
    ends = {name: step - (position - at) // batch for at, name in mixture.ends if at <= last}
    uses = []
    for name, supply in mixture.stretches[-1].sources.items():
        number, (epoch, index) = counts[name], places[name]
        tokens, passes = number * seq_len, epoch + index / supply.samples
        share = number / max(last, 1)
        uses.append(SourceUse(name, supply.samples, supply.max_epochs, number, tokens, share, passes, ends.get(name)))
    return uses


def warn_of_passes(uses: Sequence[SourceUse]) -> None:
    for use in uses:
        if use.passes > _MANY and use.max_epochs is None:
            _log.warning(
                "data.sources.%s: the run reads it %.1f times, and it has no max_epochs; set one, or lower its weight",
                use.name, use.passes,
            )  # fmt: skip

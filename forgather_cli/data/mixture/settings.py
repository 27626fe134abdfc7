"""Settings of a mixture: sources by name, each an option of the group ``data`` with its share."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from forgather_cli.config.schema import (
    OF_DIRECTORY,
    Count,
    DataSettings,
    DataTarget,
    Day,
    FilePath,
    NonNegative,
    OnlyIf,
    PositiveFloat,
    PositiveInt,
    SequenceSettings,
    Settings,
    Steps,
    Target,
    Void,
    by_type,
    only_where,
    settings,
)
from forgather_cli.errors import did_you_mean

_OF_CHATS = OnlyIf(
    lambda config, owner: (
        None if any(each.is_chats for each in owner.sources.values()) else Void("data", "add a source of chats")
    )
)


@settings
class SourceSettings(Settings):
    """What a source has beside the settings of its option."""

    weight: PositiveFloat | None = None  # share of the sequences among the weights; null of all: as many as each has
    # passes over it; null: any number
    max_epochs: PositiveInt | None = None
    # the first N of its sequences, the same in each pass; null: all
    max_samples: PositiveInt | None = None
    # at the end of its passes: drop (the others go on among themselves), stop (training ends)
    on_exhausted: Annotated[
        Literal["drop", "stop"], only_where(".max_epochs", lambda passes: passes is not None, "set max_epochs")
    ] = "drop"

    @staticmethod
    def members() -> list[type[Any]]:
        """The options of the group ``data`` that can be one; asked when all are found."""
        options: list[Any] = DataSettings.members
        return [as_source(option) for option in options if issubclass(option, SequenceSettings)]


@cache
def as_source(option: Any) -> type[Any]:
    """An option as a source: it has what ``SourceSettings`` has too, and takes nothing that stands above."""
    common = {field.name: field for field in dataclasses.fields(option) if field.name in COMMON}
    fixed = {name: dataclasses.field(init=False, default=field.default) for name, field in common.items()}
    body = {"__module__": __name__, "__doc__": option.__doc__, "__annotations__": dict.fromkeys(fixed, Any), **fixed}
    return settings(type(option.__name__, (option, SourceSettings), body))


@dataclasses.dataclass(frozen=True)
class TargetSource(DataTarget, SourceSettings):
    """Map-style data of the user's as a source. What stands above may be an argument of theirs."""

    dispatch_batches: Any = dataclasses.field(init=False, default=None)
    dispatch_eval_batches: Any = dataclasses.field(init=False, default=None)

    is_chats: ClassVar[bool] = False


if TYPE_CHECKING:
    Source = Any
else:
    Source = Annotated[SourceSettings | TargetSource, by_type]


@settings
class ScheduledWeights(Settings):
    """Weights at a step."""

    at: Count | Steps  # a step; below 1: a share of the run
    weights: dict[str, NonNegative]  # of every source


@settings
class MixtureSettings(DataSettings):
    """Several sources with exact shares, which may change on the way."""

    maker: ClassVar[str] = "forgather_cli.data.mixture.source:MixtureSource"

    type: Literal["mixture"] = "mixture"
    # name: {type: text, files: [...], weight: 0.5}: options of data with weight, max_epochs, max_samples, on_exhausted
    sources: dict[str, Source] = dataclasses.field(default_factory=dict)
    # list of {at, weights}: at a step, or a share of the run below 1; between two the weights change along a line
    weight_schedule: list[ScheduledWeights] = dataclasses.field(default_factory=list)
    seq_len: Annotated[int, Ge(2)] = 256
    # true: attention and targets stop at document borders; null: where a source has chats
    isolate_documents: bool | None = None
    add_bos: Annotated[bool | None, OF_DIRECTORY] = None
    chat_template: Annotated[FilePath | None, _OF_CHATS] = None
    template_date: Annotated[Day | None, _OF_CHATS] = None
    add_tokens: Annotated[Literal["auto"] | bool, _OF_CHATS] = "auto"

    @property
    def has_pairs(self) -> bool:  # type: ignore[override]
        return any(source.has_pairs for source in self.sources.values())

    @property
    def nothing_held_out(self) -> Void | None:
        nothing = {name: source.nothing_held_out for name, source in self.sources.items()}
        voids = [Void(f"data.sources.{name}.{void.because[5:]}", void.remedy) for name, void in nothing.items() if void]
        return voids[0] if len(voids) == len(nothing) and voids else None

    def option(self, name: str) -> DataSettings | DataTarget:
        """A source's option with what stands above."""
        source = self.sources[name]
        if isinstance(source, TargetSource):
            return DataTarget(source.path, source.kwargs)
        kind = type(source).__mro__[1]
        isolates = self.isolate_documents
        if isolates is None:
            isolates = any(each.is_chats for each in self.sources.values())
        every = {**vars(source), **{field: getattr(self, field) for field in COMMON}, "isolate_documents": isolates}
        made: DataSettings = kind(**{field.name: every[field.name] for field in dataclasses.fields(kind)})
        return made

    def problems(self, config: Any) -> Iterator[str]:
        names = list(self.sources)
        if not names:
            yield "data.sources: a mixture has sources, got none; add data.sources.NAME={type: text, files: [...]}"
        for name in names:
            if not re.fullmatch(r"[\w-]+", name):
                yield f"data.sources: a name has letters, digits, - and _, got {name!r}; rename it"
            elif not isinstance(self.sources[name], Target) and self.sources[name].is_stream:
                yield f"data.sources.{name}.streaming: streams as sources are not there yet, got true; leave it out"
        alone = [name for name in names if not self.sources[name].has_pairs] if self.has_pairs else []
        if alone:
            yield f"data.sources.{alone[0]}: has no pairs, and other sources have; give all type=preference, or none"
        if self.has_pairs and self.isolate_documents is False:
            yield "data.isolate_documents: the sides of pairs are kept apart, got false; leave it out"
        have = [name for name in names if self.sources[name].weight is not None]
        if have and len(have) < len(names):
            without = next(name for name in names if name not in have)
            yield (
                f"data.sources.{without}.weight: is left out, but {have[0]} has one; give each source a weight, or none"
            )
        if config.callbacks.diloco is not None:
            if self.weight_schedule:
                yield "data.weight_schedule: is not there yet under callbacks.diloco, got one; leave it out"
            sources = self.sources.values()
            if all(each.max_epochs for each in sources) or any(each.on_exhausted == "stop" for each in sources):
                yield (
                    "data.sources: an end of all is not there yet under callbacks.diloco, got max_epochs; leave it out "
                    "of one source, and on_exhausted=stop out of all"
                )
        ats = [entry.at for entry in self.weight_schedule]
        if config.max_steps > 0 and (steps := steps_of(ats, config.max_steps)) != sorted(steps):
            yield f"data.weight_schedule: at goes back, got {', '.join(f'{at:g}' for at in ats)}; put them in order"
        for number, entry in enumerate(self.weight_schedule):
            where = f"data.weight_schedule.{number}"
            for name in entry.weights.keys() - self.sources.keys():
                yield f"{where}.weights.{name}: no such source;{did_you_mean(name, names) or ' leave it out'}"
            if missing := [name for name in names if name not in entry.weights]:
                yield f"{where}.weights: names every source, got none for {missing[0]}; add {missing[0]}: 0"
            elif not any(entry.weights.values()):
                yield f"{where}.weights: are all 0, so that nothing is left to read; give a source more"


_OWN = ("type", "sources", "weight_schedule")
COMMON = [field.name for field in dataclasses.fields(MixtureSettings) if field.name not in _OWN]
"""What stands above the sources."""


def steps_of(ats: Sequence[float], total: int) -> list[int]:
    """The steps of a schedule's entries in a run of ``total``."""
    return [math.ceil(at * total) if at < 1 else int(at) for at in ats]

"""Settings of a mixture: sources by name, each an option of the group ``data`` with its share."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from copy import copy
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

_OF_CHATS = OnlyIf(lambda config, owner: None if owner.has_chats else Void("data", "add a source of chats"))


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
    @cache
    def members() -> list[Any]:
        """The options of the group ``data`` that can be one, each with these fields too; asked when all are found."""
        by_number = [option for option in DataSettings.members if issubclass(option, SequenceSettings)]
        return [_as_source(option) for option in (*by_number, DataTarget)]


if TYPE_CHECKING:
    Source = Any
else:
    Source = Annotated[SourceSettings, by_type]


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
    def has_chats(self) -> bool:
        return any(source.is_chats for source in self.sources.values())

    @property
    def has_pairs(self) -> bool:  # type: ignore[override]
        return any(source.has_pairs for source in self.sources.values())

    @property
    def nothing_held_out(self) -> Void | None:
        has_some = any(source.nothing_held_out is None for source in self.sources.values())
        return None if has_some else Void("data.sources", "set eval_fraction=0.05 in one of them")

    def option(self, name: str, **found: Any) -> Any:
        """A source with what stands above. ``found``: what follows for it from others."""
        source = copy(self.sources[name])
        if not isinstance(source, Target):
            isolates = self.has_chats if self.isolate_documents is None else self.isolate_documents
            vars(source).update({field: getattr(self, field) for field in COMMON}, isolate_documents=isolates, **found)
        return source

    def problems(self, config: Any) -> Iterator[str]:
        names, sources = list(self.sources), self.sources.values()
        if not names:
            yield "data.sources: a mixture has sources, got none; add data.sources.NAME={type: text, files: [...]}"
        for name, source in self.sources.items():
            if not re.fullmatch(r"[\w-]+", name):
                yield f"data.sources: a name has letters, digits, - and _, got {name!r}; rename it"
            elif source.is_stream and not isinstance(source, Target):
                yield f"data.sources.{name}.streaming: streams as sources are not there yet, got true; leave it out"
        alone = [name for name in names if not self.sources[name].has_pairs] if self.has_pairs else []
        if alone:
            yield f"data.sources.{alone[0]}: has no pairs, and other sources have; give all type=preference, or none"
        if self.has_pairs and self.isolate_documents is False:
            yield "data.isolate_documents: the sides of pairs are kept apart, got false; leave it out"
        without = [name for name in names if self.sources[name].weight is None]
        if 0 < len(without) < len(names):
            yield f"data.sources.{without[0]}.weight: is left out, but others have one; give each source one, or none"
        if config.callbacks.diloco is not None:
            if self.weight_schedule:
                yield "data.weight_schedule: is not there yet under callbacks.diloco, got one; leave it out"
            if all(each.max_epochs for each in sources) or any(each.on_exhausted == "stop" for each in sources):
                yield "data.sources: an end of all is not there yet under callbacks.diloco; leave max_epochs out"
        ats = [entry.at for entry in self.weight_schedule]
        rows = [[at for at in ats if at < 1], [at for at in ats if at >= 1]]  # all that is known without max_steps
        if any(row != sorted(row) for row in ([steps_of(ats, config.max_steps)] if config.max_steps > 0 else rows)):
            yield f"data.weight_schedule: at goes back, got {', '.join(f'{at:g}' for at in ats)}; put them in order"
        for number, entry in enumerate(self.weight_schedule):
            where = f"data.weight_schedule.{number}.weights"
            for name in entry.weights.keys() - self.sources.keys():
                yield f"{where}.{name}: no such source;{did_you_mean(name, names) or ' leave it out'}"
            if missing := [name for name in names if name not in entry.weights]:
                yield f"{where}: names every source, got none for {missing[0]}; add {missing[0]}: 0"
            elif not any(entry.weights.values()):
                yield f"{where}: are all 0, so that nothing is left to read; give a source more"


COMMON = {field.name for field in dataclasses.fields(MixtureSettings)} - {"type", "sources", "weight_schedule"}
"""What stands above the sources."""


def _as_source(option: Any) -> Any:
    """An option with what ``SourceSettings`` has, that takes nothing which stands above."""
    common = COMMON
    if issubclass(option, Target):  # all else may be an argument of the user's function
        common = COMMON & {field.name for field in dataclasses.fields(option)}
    fixed = {name: dataclasses.field(init=False, default=None) for name in sorted(common)}
    body = {"__module__": __name__, "__doc__": option.__doc__, "__annotations__": dict.fromkeys(fixed, Any), **fixed}
    return settings(type(option.__name__, (option, SourceSettings), body))


def steps_of(ats: Sequence[float], total: int) -> list[int]:
    """The steps of a schedule's entries in a run of ``total``."""
    return [math.ceil(at * total) if at < 1 else int(at) for at in ats]

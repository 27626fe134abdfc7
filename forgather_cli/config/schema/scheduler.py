"""Options of the group ``lr_scheduler``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

from forgather_cli.config.schema.base import (
    Count,
    Fraction,
    NonNegative,
    OnlyIf,
    PositiveInt,
    Settings,
    Target,
    Void,
    by_type,
    only_where,
    settings,
)


def _never_warm(config: Any, owner: _Scheduler) -> Void | None:
    """A warmup that is longer than the run. Of a recipe that is made shorter to try it, training says so in a line."""
    warmup, steps = owner.warmup_steps, config.max_steps
    if not 0 < steps < warmup:
        return None
    what = f"{warmup:g} steps are more than the run has, so learning_rate={config.learning_rate:g} is never reached"
    return Void("max_steps", f"set warmup_steps={steps} or less, or to a fraction such as 0.05,", what)


@settings
class _Scheduler(Settings):
    warmup_steps: Annotated[NonNegative, OnlyIf(_never_warm)] = 0  # optimizer steps; below 1: a fraction of all steps

    def problems(self, config: Any) -> Iterator[str]:
        for name in ("warmup_steps", "decay_steps"):
            if (value := getattr(self, name, 0)) >= 1 and value != int(value):
                yield f"lr_scheduler.{name}: must be whole steps, or below 1 a fraction of all, got {value:g}; round it"


_ANNEALS = only_where(
    ".anneal_start_step",
    lambda step: step is not None,
    "set anneal_start_step to the step at which the anneal begins",
)


@settings
class CosineSettings(_Scheduler):
    type: Literal["cosine"] = "cosine"
    min_lr_ratio: Fraction = 0.1


@settings
class LinearSettings(_Scheduler):
    type: Literal["linear"] = "linear"
    min_lr_ratio: Fraction = 0.0


@settings
class ConstantSettings(_Scheduler):
    type: Literal["constant"] = "constant"


@settings
class WSDSettings(_Scheduler):
    """Warmup, stable, decay."""

    type: Literal["wsd"] = "wsd"
    decay_steps: NonNegative = 0.2  # optimizer steps; below 1: a fraction of all steps
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    min_lr_ratio: Fraction = 0.0


@settings
class InverseSqrtSettings(_Scheduler):
    type: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: PositiveInt | None = None  # steps; null: warmup_steps, at least 1


@settings
class InfiniteSettings(_Scheduler):
    """Warmup, cosine cooldown to a constant, then an anneal when asked for."""

    type: Literal["infinite"] = "infinite"
    cooldown_steps: Count = 1000
    constant_lr_ratio: Fraction = 0.3
    anneal_start_step: Count | None = None  # null: never
    anneal_steps: Annotated[PositiveInt, _ANNEALS] = 1000
    min_lr_ratio: Annotated[Fraction, _ANNEALS] = 0.0


@settings
class TransformersScheduleSettings(_Scheduler):
    """A schedule of transformers' ``get_scheduler``, warmup from 0 included: what TrainingArguments select."""

    type: Literal["transformers"] = "transformers"
    name: str = "linear"
    kwargs: dict[str, Any] = field(default_factory=dict)  # lr_scheduler_kwargs
    reference_lr: NonNegative = 1.0  # what min_lr and lr_end are shares of


SchedulerOption = Annotated[
    CosineSettings
    | LinearSettings
    | ConstantSettings
    | WSDSettings
    | InverseSqrtSettings
    | InfiniteSettings
    | TransformersScheduleSettings
    | Target,
    by_type,
]

"""Options of the group ``lr_scheduler``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from forgather_cli.config.schema.base import (
    Count,
    Fraction,
    NonNegative,
    OnlyIf,
    Option,
    PositiveInt,
    Target,
    Void,
    by_type,
    only_where,
    settings,
)


def _never_warm(config: Any, owner: SchedulerSettings) -> Void | None:
    """A warmup that is longer than the run. Of a recipe that is made shorter to try it, training says so in a line."""
    warmup, steps = owner.warmup_steps, config.max_steps
    if not 0 < steps < warmup:
        return None
    what = f"{warmup:g} steps are more than the run has, so learning_rate={config.learning_rate:g} is never reached"
    return Void("max_steps", f"set warmup_steps={steps} or less, or to a fraction such as 0.05,", what)


@settings
class SchedulerSettings(Option):
    """A learning-rate schedule, by the number of optimizer steps done.

    ``maker`` is a function of ``warmup`` (steps), ``total`` and ``arguments()``, by keyword. It returns the factor of
    the learning rate as a function of the steps done, from ``warmup`` on: before that the rate rises along a line, and
    from the last step on the factor should stay as it is. ``total()`` is the number of the run's steps: call it only
    where the shape depends on it, for it raises where the data has no known length. Parts to make it of are in
    ``optim/schedules.py``.
    """

    warms_up: ClassVar[bool] = False
    """The factor has the warmup in it, from step 0 on."""

    # optimizer steps of linear warmup; below 1: a fraction of all steps
    warmup_steps: Annotated[NonNegative, OnlyIf(_never_warm)] = 0

    def problems(self, config: Any) -> Iterator[str]:
        for name, value in vars(self).items():
            if name.endswith("_steps") and isinstance(value, float) and value >= 1 and value != int(value):
                yield f"lr_scheduler.{name}: must be whole steps, or below 1 a fraction of all, got {value:g}; round it"


_ANNEALS = only_where(
    ".anneal_start_step", lambda step: step is not None, "set anneal_start_step to the step at which the anneal begins"
)


@settings
class CosineSettings(SchedulerSettings):
    """Linear warmup, then half a cosine down to min_lr_ratio."""

    maker: ClassVar[str] = "forgather_cli.optim.schedules:cosine"

    type: Literal["cosine"] = "cosine"
    min_lr_ratio: Fraction = 0.1  # final learning rate as a fraction of learning_rate


@settings
class LinearSettings(SchedulerSettings):
    """Linear warmup, then a line down to min_lr_ratio."""

    maker: ClassVar[str] = "forgather_cli.optim.schedules:linear"

    type: Literal["linear"] = "linear"
    min_lr_ratio: Fraction = 0.0


@settings
class ConstantSettings(SchedulerSettings):
    """Linear warmup, then constant."""

    maker: ClassVar[str] = "forgather_cli.optim.schedules:constant"

    type: Literal["constant"] = "constant"


@settings
class WSDSettings(SchedulerSettings):
    """Linear warmup, stable, then a decay at the end."""

    maker: ClassVar[str] = "forgather_cli.optim.schedules:wsd"

    type: Literal["wsd"] = "wsd"
    decay_steps: NonNegative = 0.2  # optimizer steps of the final decay; below 1: a fraction of all steps
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"  # linear, cosine, sqrt
    min_lr_ratio: Fraction = 0.0


@settings
class InverseSqrtSettings(SchedulerSettings):
    """Linear warmup, then the inverse square root of the step; needs no length."""

    maker: ClassVar[str] = "forgather_cli.optim.schedules:inverse_sqrt"

    type: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: PositiveInt | None = None  # steps after which the decay sets in; null: warmup_steps, at least 1


@settings
class InfiniteSettings(SchedulerSettings):
    """Linear warmup, cosine cooldown to a constant, and an anneal when asked for: training of open length."""

    maker: ClassVar[str] = "forgather_cli.optim.schedules:infinite"

    type: Literal["infinite"] = "infinite"
    cooldown_steps: Count = 1000  # optimizer steps from the peak down to the constant
    constant_lr_ratio: Fraction = 0.3  # the constant as a fraction of learning_rate
    anneal_start_step: Count | None = None  # optimizer step at which the final anneal begins; null: never
    anneal_steps: Annotated[PositiveInt, _ANNEALS] = 1000  # optimizer steps of the final anneal
    min_lr_ratio: Annotated[Fraction, _ANNEALS] = 0.0


@settings
class TransformersScheduleSettings(SchedulerSettings):
    """A schedule of transformers by its name, with that library's values: warmup from 0, polynomial, restarts."""

    maker: ClassVar[str] = "forgather_cli.optim.transformers_schedules:factor"
    warms_up: ClassVar[bool] = True

    type: Literal["transformers"] = "transformers"
    name: str = "linear"  # linear, cosine, cosine_with_restarts, polynomial, constant_with_warmup, inverse_sqrt, ...
    kwargs: dict[str, Any] = field(default_factory=dict)  # its arguments, as lr_scheduler_kwargs of TrainingArguments
    # learning rate that min_lr and lr_end among them are shares of
    reference_lr: NonNegative = field(default=1.0, metadata={"file": "${learning_rate}"})


SchedulerOption = Annotated[SchedulerSettings | Target, by_type]

"""Learning-rate schedules: pure functions of the number of optimizer steps done, and what applies them.

The learning rate of step k (0-based) is ``initial_lr * factor(k)``. Every schedule warms up linearly,
``(k + 1) / warmup_steps``, so that the first step is not wasted on a rate of zero; from step ``warmup_steps`` on it
follows its shape, and after the last step it keeps its final value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Protocol

from forgather_cli.config.schema import (
    ConstantSettings,
    CosineSettings,
    InfiniteSettings,
    InverseSqrtSettings,
    LinearSettings,
    SchedulerOption,
    Target,
    TransformersScheduleSettings,
    WSDSettings,
)
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.optim import transformers_schedules
from forgather_cli.optim.torch_schedule import TorchSchedule
from forgather_cli.targets import call, import_target

log = logging.getLogger(__name__)

Factor = Callable[[int], float]
"""Optimizer steps done -> multiple of the initial learning rate."""


class HasGroups(Protocol):
    """A torch optimizer, or our ``Optimizers``."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class HasOptimizers(HasGroups, Protocol):
    @property
    def optimizers(self) -> list[Any]: ...


# ----------------------------------------------------------------------------------------------------------- shapes


def schedule_factor(option: SchedulerOption, *, total_steps: int | None) -> Factor:
    """The factor of a shipped schedule over a run of ``total_steps`` optimizer steps.

    Raises SetupError naming ``max_steps`` if the shape depends on a length that is unknown (None).
    """
    assert not isinstance(option, Target)
    warmup = _steps(option.warmup_steps, "warmup_steps", total_steps)
    if isinstance(option, TransformersScheduleSettings):
        return transformers_schedules.factor(option, warmup, lambda: _known(total_steps, option.name))
    after = _shape(option, warmup, total_steps)
    return (lambda step: (step + 1) / warmup if step < warmup else after(step)) if warmup else after


def _shape(option: Any, warmup: int, total_steps: int | None) -> Factor:
    match option:
        case ConstantSettings():
            return lambda step: 1.0
        case CosineSettings():
            return cosine(warmup, _known(total_steps, "cosine"), option.min_lr_ratio)
        case LinearSettings():
            return linear(warmup, _known(total_steps, "linear"), option.min_lr_ratio)
        case InverseSqrtSettings():
            return inverse_sqrt(warmup, option.timescale or max(1, warmup))
        case WSDSettings():
            total = _known(total_steps, "wsd")
            decay = _steps(option.decay_steps, "decay_steps", total)
            return wsd(warmup, total, decay, option.decay_shape, option.min_lr_ratio)
        case InfiniteSettings():
            return infinite(warmup, option)
    raise AssertionError(f"no schedule for {type(option).__name__}")


def _known(total_steps: int | None, name: str) -> int:
    if total_steps is None:
        raise SetupError(
            f"lr_scheduler: {name} needs the number of optimizer steps, and the data has no known length; set "
            "max_steps, or choose lr_scheduler=constant, inverse_sqrt or infinite"
        )
    return total_steps


def _steps(value: float, setting: str, total_steps: int | None) -> int:
    """A number of steps; below 1 a fraction of all, rounded up (transformers, ``get_warmup_steps``)."""
    if value >= 1 or value == 0:
        if value != int(value):
            raise ConfigError(f"lr_scheduler.{setting}: must be whole steps, or a fraction below 1, got {value}")
        return int(value)
    if total_steps is None:
        raise SetupError(
            f"lr_scheduler.{setting}: {value} is a fraction of all optimizer steps, and the data has no known length; "
            "set max_steps, or give whole steps"
        )
    return math.ceil(value * total_steps - 1e-9)


def _progress(step: int, start: int, length: int) -> float:
    """How much of ``length`` steps from ``start`` lies behind, between 0 and 1."""
    return min(1.0, max(0.0, (step - start) / max(1, length)))


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def cosine(warmup: int, total: int, min_ratio: float) -> Factor:
    """Half a cosine from 1 to ``min_ratio``; Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5."""
    return lambda step: min_ratio + (1 - min_ratio) * _half_cosine(_progress(step, warmup, total - warmup))


def linear(warmup: int, total: int, min_ratio: float) -> Factor:
    """A line from 1 to ``min_ratio``; transformers, ``get_linear_schedule_with_warmup``."""
    return lambda step: 1.0 - (1 - min_ratio) * _progress(step, warmup, total - warmup)


_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": _half_cosine,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def wsd(warmup: int, total: int, decay: int, shape: str, min_ratio: float) -> Factor:
    """Constant, then a decay over the last ``decay`` steps, or as many as the warmup leaves.

    Warmup-stable-decay: Hu et al. 2024, arXiv 2404.06395; ``sqrt`` is the 1-sqrt of Hägele et al. 2024,
    arXiv 2405.18392.
    """
    start = max(warmup, total - decay)
    curve = _DECAYS[shape]
    return lambda step: min_ratio + (1 - min_ratio) * curve(_progress(step, start, total - start))


def inverse_sqrt(warmup: int, timescale: int) -> Factor:
    """``1 / sqrt((k - warmup + timescale) / timescale)``; transformers, ``get_inverse_sqrt_schedule``."""
    return lambda step: math.sqrt(timescale / (max(0, step - warmup) + timescale))


def infinite(warmup: int, option: InfiniteSettings) -> Factor:
    """Half a cosine down to a constant that may go on for ever, and a final anneal where one is asked for.

    Ibrahim et al. 2024, arXiv 2403.08763. The anneal is a line from the rate at ``anneal_start_step``
    rather than the paper's exponential, which cannot reach 0.
    """
    floor, length = option.constant_lr_ratio, option.cooldown_steps

    def before(step: int) -> float:
        if length == 0:
            return floor
        return floor + (1 - floor) * _half_cosine(_progress(step, warmup, length))

    start = option.anneal_start_step
    if start is None:
        return before
    start, end = max(start, warmup), option.min_lr_ratio
    top = before(start)
    return lambda step: (
        before(step) if step < start else top + (end - top) * _progress(step, start, option.anneal_steps)
    )


# --------------------------------------------------------------------------------------------------------- applying


class Schedule:
    """Sets every group's ``lr`` to ``initial_lr * factor(steps done)``, at construction and after each ``step()``."""

    schedulers: tuple[Any, ...] = ()
    """The schedulers of the user's behind this one: none."""

    def __init__(self, optimizers: HasGroups, factor: Factor, last_step: int = 0) -> None:
        self._optimizers = optimizers
        self._factor = factor
        self.last_step = last_step
        """Optimizer steps done."""
        for group in optimizers.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._apply()

    def _apply(self) -> None:
        factor = self._factor(self.last_step)
        for group in self._optimizers.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def step(self) -> None:
        """Call after the optimizer's step."""
        self.last_step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group, for the next step."""
        return [float(group["lr"]) for group in self._optimizers.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the saved step, with this run's factor and initial learning rates."""
        self.last_step = int(state["step"])
        self._apply()

    @staticmethod
    def wrap(scheduler: Any) -> TorchSchedule:
        """A scheduler made elsewhere (torch's or one with its methods), or several, behind the same surface."""
        return TorchSchedule(scheduler if isinstance(scheduler, (list, tuple)) else [scheduler])


# --------------------------------------------------------------------------------------------------------- building


def build_schedule(
    option: SchedulerOption, optimizers: HasOptimizers, *, total_steps: int | None
) -> Schedule | TorchSchedule:
    """The schedule of a config option over ``optimizers``, at step 0.

    A ``_target_`` is called as ``cls(torch_optimizer, **kwargs)``, once per torch optimizer. Raises SetupError if
    ``total_steps`` is None and the shape depends on it.
    """
    if not isinstance(option, Target):
        if total_steps is not None and option.warmup_steps > total_steps > 0:  # of a recipe that was made shorter
            log.warning(
                "lr_scheduler.warmup_steps: %g steps are more than the %d of this run, which never reaches its "
                "learning_rate; set warmup_steps, or a fraction such as 0.05",
                option.warmup_steps,
                total_steps,
            )
        return Schedule(optimizers, schedule_factor(option, total_steps=total_steps))
    factory = import_target(option.path, "lr_scheduler")
    made = [call(factory, "lr_scheduler", optimizer, **option.kwargs) for optimizer in optimizers.optimizers]
    return TorchSchedule(made)

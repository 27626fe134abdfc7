"""Learning-rate schedules: pure functions of the number of optimizer steps done, and what applies them.

The learning rate of step k (0-based) is ``initial_lr * factor(k)``. Every schedule warms up linearly,
``(k + 1) / warmup_steps``, so that the first step is not wasted on a rate of zero; from step ``warmup_steps`` on it
follows its shape, and after the last step it keeps its final value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from forgather_cli.config.schema import DEFAULT_GROUP, SchedulerOption, SchedulerSettings, Target
from forgather_cli.documents.fields import AMOUNT, ANYTHING, COUNT, FieldKind, check_fields, list_of, object_of
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.optim.state import ParameterOptimizer, in_schedule
from forgather_cli.targets import import_target, make

log = logging.getLogger(__name__)

Factor = Callable[[int], float]
"""Optimizer steps done -> multiple of the initial learning rate."""
Total = Callable[[], int]
"""The number of the run's optimizer steps; raises SetupError where it is unknown."""


# ----------------------------------------------------------------------------------------------------------- shapes


def schedule_factor(option: SchedulerSettings, *, total_steps: int | None) -> Factor:
    """The factor of a schedule over a run of ``total_steps`` optimizer steps.

    Raises SetupError naming ``max_steps`` if the shape depends on a length that is unknown (None).
    """
    warmup = whole_steps(option.warmup_steps, "warmup_steps", total_steps)

    def total() -> int:
        if total_steps is None:
            name = option.arguments().get("name", option.type)  # transformers' are told by theirs
            raise SetupError(
                f"lr_scheduler: {name} needs the number of optimizer steps, and the data has no known length; "
                "set max_steps, or choose lr_scheduler=constant, inverse_sqrt or infinite"
            )
        return total_steps

    after: Factor = option.load_maker()(warmup=warmup, total=total, **option.arguments())
    if option.warms_up or not warmup:
        return after
    return lambda step: (step + 1) / warmup if step < warmup else after(step)


def constant(*, warmup: int, total: Total) -> Factor:
    """1."""
    return lambda step: 1.0


def cosine(*, warmup: int, total: Total, min_lr_ratio: float) -> Factor:
    """Half a cosine from 1 to ``min_lr_ratio``; Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5."""
    length = total() - warmup
    return lambda step: min_lr_ratio + (1 - min_lr_ratio) * half_cosine(progress(step, warmup, length))


def linear(*, warmup: int, total: Total, min_lr_ratio: float) -> Factor:
    """A line from 1 to ``min_lr_ratio``; transformers, ``get_linear_schedule_with_warmup``."""
    length = total() - warmup
    return lambda step: 1.0 - (1 - min_lr_ratio) * progress(step, warmup, length)


def inverse_sqrt(*, warmup: int, total: Total, timescale: int | None) -> Factor:
    """1 / sqrt((k - warmup + timescale) / timescale); transformers, ``get_inverse_sqrt_schedule``."""
    scale = timescale or max(1, warmup)
    return lambda step: math.sqrt(scale / (step - warmup + scale))


def wsd(*, warmup: int, total: Total, decay_steps: float, decay_shape: str, min_lr_ratio: float) -> Factor:
    """Constant, then a decay over the last ``decay_steps``, or as many as the warmup leaves; Hu et al. 2024, arXiv
    2404.06395. sqrt is the 1-sqrt of Hägele et al. 2024, arXiv 2405.18392.
    """
    curve = _DECAYS[decay_shape]
    start = max(warmup, total() - whole_steps(decay_steps, "decay_steps", total()))
    length = total() - start
    return lambda step: min_lr_ratio + (1 - min_lr_ratio) * curve(progress(step, start, length))


def infinite(
    *, warmup: int, total: Total, cooldown_steps: int, constant_lr_ratio: float, anneal_start_step: int | None,
    anneal_steps: int, min_lr_ratio: float,
) -> Factor:  # fmt: skip
    """Half a cosine down to a constant that may go on for ever, and a final anneal where one is asked for; Ibrahim et
    al. 2024, arXiv 2403.08763. The anneal is a line from the rate at ``anneal_start_step`` rather than the paper's
    exponential, which cannot reach 0.
    """
    floor = constant_lr_ratio

    def before(step: int) -> float:
        cooled = progress(step, warmup, cooldown_steps)
        return floor if cooldown_steps == 0 else floor + (1 - floor) * half_cosine(cooled)

    if anneal_start_step is None:
        return before
    begin = max(anneal_start_step, warmup)

    def annealed(step: int) -> float:
        top = before(min(step, begin))
        return top + (min_lr_ratio - top) * progress(step, begin, anneal_steps)

    return annealed


def whole_steps(value: float, setting: str, total_steps: int | None) -> int:
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


def progress(step: int, start: int, length: int) -> float:
    """How much of ``length`` steps from ``start`` lies behind, between 0 and 1."""
    return min(1.0, max(0.0, (step - start) / max(1, length)))


def half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": half_cosine,
    "sqrt": lambda done: 1.0 - math.sqrt(done),
}


# --------------------------------------------------------------------------------------------------------- applying


class Schedule:
    """Sets every group's ``lr`` to ``initial_lr * factor(steps done)``, at construction and after each ``step()``."""

    schedulers: tuple[Any, ...] = ()
    """The schedulers of the user's behind this one: none."""

    def __init__(self, optimizers: Optimizer | ParameterOptimizer, factor: Factor, last_step: int = 0) -> None:
        self._optimizers = optimizers
        self._each = optimizers.optimizers if isinstance(optimizers, ParameterOptimizer) else [optimizers]
        self._factor = factor
        self.last_step = last_step
        """Optimizer steps done."""
        for group in optimizers.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._main = _main_group(optimizers.param_groups)
        self._apply()

    def _apply(self) -> None:
        factor = self._factor(self.last_step)
        for optimizer in self._each:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def step(self) -> None:
        """Call after the optimizer's step."""
        self.last_step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group, for the next step."""
        return [float(group["lr"]) for group in self._optimizers.param_groups]

    def learning_rate(self) -> float:
        """That of the run, for the next step: groups may have multiples of it."""
        return float(self._main["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the saved step, with this run's factor and initial learning rates."""
        check_fields(state, {"step": COUNT})
        self.last_step = state["step"]
        self._apply()

    @staticmethod
    def wrap(scheduler: Any) -> TorchSchedule:
        """A scheduler made elsewhere (torch's or one with its methods), or several, behind the same surface."""
        return TorchSchedule(scheduler if isinstance(scheduler, (list, tuple)) else [scheduler])


# a tensor where the optimizer has its learning rate in one
_RATE = FieldKind(lambda rate: AMOUNT.holds(rate.tolist() if isinstance(rate, Tensor) else rate), AMOUNT.name)
_TORCH_KINDS = {"last_epoch": COUNT, "_step_count": COUNT, "_last_lr": list_of(_RATE), "base_lrs": list_of(_RATE)}


class TorchSchedule:
    """Schedulers made elsewhere, torch's or the user's with the same methods: stepped together, one per optimizer."""

    def __init__(self, schedulers: Iterable[Any]) -> None:
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        self.schedulers: tuple[Any, ...] = tuple(schedulers)
        for scheduler in self.schedulers:
            name = type(scheduler).__name__
            if isinstance(scheduler, ReduceLROnPlateau):
                raise ConfigError(
                    f"lr_scheduler: {name} steps on a metric, which is not supported; choose one that counts steps"
                )
            methods = ("step", "state_dict", "load_state_dict", "get_last_lr")
            if missing := [method for method in methods if not callable(getattr(scheduler, method, None))]:
                raise ConfigError(f"lr_scheduler: a {name} has no {', '.join(missing)}; give a torch LR scheduler")

    def step(self) -> None:
        """Call after the optimizer's step."""
        for scheduler in self.schedulers:
            scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group, for the next step."""
        return [float(lr) for scheduler in self.schedulers for lr in scheduler.get_last_lr()]

    def learning_rate(self) -> float:
        """That of the run, for the next step: groups may have multiples of it."""
        groups = [group for scheduler in self.schedulers for group in _groups(scheduler)]
        return float(_main_group(groups)["lr"]) if groups else self.get_last_lr()[0]

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedulers": [_plain(scheduler.state_dict()) for scheduler in self.schedulers],
            "initial_lr": [[float(group["initial_lr"]) for group in _groups(s)] for s in self.schedulers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the saved state; where a group's initial learning rate has changed since, with the new one.

        Torch's schedulers leave the groups alone when they load, so the learning rates are set here.
        Raises SetupError if the number of schedulers differs.
        """
        check_fields(state, {"schedulers": list_of(object_of(ANYTHING)), "initial_lr": list_of(list_of(AMOUNT))})
        for saved in state["schedulers"]:
            check_fields(saved, {key: kind for key, kind in _TORCH_KINDS.items() if key in saved}, "schedulers")
        if len(state["schedulers"]) != len(self.schedulers):
            raise SetupError(
                f"lr_scheduler: the checkpoint has {len(state['schedulers'])} schedulers, this run "
                f"{len(self.schedulers)}; leave scheduler out of resume_components"
            )
        for scheduler, saved, saved_rates in zip(
            self.schedulers, state["schedulers"], state["initial_lr"], strict=True
        ):
            base_rates = [(part, list(part.base_lrs)) for part in _tree(scheduler) if hasattr(part, "base_lrs")]
            scheduler.load_state_dict(saved)
            for part, rates in base_rates:
                part.base_lrs = rates
            for group, lr, before in zip(_groups(scheduler), scheduler.get_last_lr(), saved_rates, strict=False):
                lr = in_schedule(lr, before, float(group["initial_lr"]))
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr


def _main_group(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The parameters that no regex has put elsewhere, of Muon its matrices; without them the first group."""
    names = [str(group.get("name", "")).split(".")[0] for group in groups]
    return groups[names.index(DEFAULT_GROUP)] if DEFAULT_GROUP in names else groups[0]


def _groups(scheduler: Any) -> list[dict[str, Any]]:
    """The groups a scheduler sets; none for one that keeps its optimizer elsewhere than torch's do."""
    found: list[dict[str, Any]] = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    return found


def _tree(scheduler: Any) -> list[Any]:
    """A scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    return [scheduler, *(inner for child in getattr(scheduler, "_schedulers", ()) for inner in _tree(child))]


def _plain(state: Any) -> Any:
    """Plain dictionaries, as a checkpoint holds them: MultiStepLR counts its milestones in a ``Counter``."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, list) else state


# --------------------------------------------------------------------------------------------------------- building


def build_schedule(
    option: SchedulerOption, optimizers: ParameterOptimizer, *, total_steps: int | None
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
    made = [make(factory, "lr_scheduler", option.path, each, **option.kwargs) for each in optimizers.optimizers]
    return TorchSchedule(made)

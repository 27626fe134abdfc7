"""The schedules of transformers' ``get_scheduler`` (transformers 5.23, optimization.py), under its names and arguments.

They differ from ours in the warmup: there the first step has a learning rate of 0, here it has one ``warmup_steps``-th.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from forgather_cli.errors import ConfigError

Factor = Callable[[int], float]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "cosine_with_min_lr": {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None},
    "cosine_warmup_with_min_lr": {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None, "warmup_lr_rate": None},
    "polynomial": {"lr_end": 1e-7, "power": 1.0},
    "inverse_sqrt": {"timescale": None},
    "warmup_stable_decay": {
        "num_decay_steps": None, "num_stable_steps": None, "warmup_type": "linear", "decay_type": "cosine",
        "min_lr_ratio": 0.0, "num_cycles": 0.5,
    },
}  # fmt: skip
"""Schedule -> its arguments (``lr_scheduler_kwargs``) with their defaults."""
REFUSED = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow a metric, which a schedule by step numbers cannot."""
_RAMPS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(1.0 - done),
}


def check(name: str, kwargs: dict[str, Any], learning_rate: float) -> None:
    """Raise ConfigError for a schedule that there is not, or for arguments that it does not take or needs."""
    if name not in ARGUMENTS:
        why = "it follows a metric; " if name in REFUSED else ""
        raise ConfigError(
            f"lr_scheduler_type: got {name!r}; {why}use {', '.join(ARGUMENTS)}, or give lr_scheduler_factory"
        )
    takes = ARGUMENTS[name]
    problems = [
        f"lr_scheduler_kwargs.{key}: {name} takes {', '.join(takes) or 'no arguments'}; leave it out"
        for key in kwargs
        if key not in takes
    ]
    if "min_lr" in takes and (kwargs.get("min_lr") is None) == (kwargs.get("min_lr_rate") is None):
        problems.append(f"lr_scheduler_kwargs: {name} needs one of min_lr and min_lr_rate, got {kwargs!r}; give one")
    if name == "polynomial" and not learning_rate > kwargs.get("lr_end", takes["lr_end"]):
        problems.append(
            f"lr_scheduler_kwargs.lr_end: must be below learning_rate={learning_rate:g}, "
            f"got {kwargs.get('lr_end', takes['lr_end']):g}"
        )
    if name == "warmup_stable_decay":
        if not isinstance(kwargs.get("num_decay_steps"), int):
            problems.append(f"lr_scheduler_kwargs.num_decay_steps: {name} needs whole steps, got {kwargs!r}; give them")
        for key in ("warmup_type", "decay_type"):
            if kwargs.get(key, "linear") not in _RAMPS:
                problems.append(f"lr_scheduler_kwargs.{key}: use one of {', '.join(_RAMPS)}, got {kwargs[key]!r}")
    if problems:
        raise ConfigError(problems)


def factor(*, warmup: int, total: Callable[[], int], name: str, kwargs: dict[str, Any], reference_lr: float) -> Factor:
    """The factor of the learning rate. ``total()`` is the number of optimizer steps, asked for by shapes that need it.

    Raises what ``total`` raises where that is unknown.
    """
    given = {**ARGUMENTS[name], **kwargs}
    match name:
        case "constant":
            return lambda step: 1.0
        case "constant_with_warmup":
            return _ramped(warmup, lambda step: 1.0)
        case "inverse_sqrt":
            scale = given["timescale"] or warmup or 10_000
            return _ramped(warmup, lambda step: 1.0 / math.sqrt((step + scale - warmup) / scale))
        case "warmup_stable_decay":
            return _stable(given, warmup, total)
    length = max(1, total() - warmup)
    match name:
        case "linear":
            return _ramped(warmup, lambda step: max(0.0, (total() - step) / length))
        case "polynomial":
            low, power = given["lr_end"] / reference_lr, given["power"]
            return _ramped(
                warmup,
                lambda step: low + (1 - low) * (1 - (step - warmup) / length) ** power if step <= total() else low,
            )
        case "cosine_with_restarts":
            cycles = given["num_cycles"]

            def restarts(step: int) -> float:
                done = (step - warmup) / length
                return 0.0 if done >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * ((cycles * done) % 1.0)))

            return _ramped(warmup, restarts)
    low = given.get("min_lr_rate") or (given.get("min_lr") or 0.0) / reference_lr
    late = 1 if name == "cosine_warmup_with_min_lr" else 0  # this one counts the step that begins

    def cosine(step: int) -> float:
        wave = 0.5 * (1.0 + math.cos(math.pi * given["num_cycles"] * 2.0 * (step - warmup + late) / length))
        return max(0.0, wave * (1 - low) + low)

    if not late:
        return _ramped(warmup, cosine)
    first = given["warmup_lr_rate"]

    def ramp(step: int) -> float:
        return (step + 1) / warmup if first is None else first + (1 - first) * step / max(1, warmup - 1)

    return lambda step: ramp(step) if step < warmup else cosine(step)


def _ramped(warmup: int, after: Factor) -> Factor:
    return lambda step: step / warmup if step < warmup else after(step)


def _stable(given: dict[str, Any], warmup: int, total: Callable[[], int]) -> Factor:
    """Warmup, stable, decay: each of them in one of three shapes, and never below ``min_lr_ratio``."""
    low, decay, stable = given["min_lr_ratio"], given["num_decay_steps"], given["num_stable_steps"]
    start = warmup + (total() - warmup - decay if stable is None else stable)

    def at(step: int) -> float:
        if step < warmup:
            height = _RAMPS[given["warmup_type"]](step / warmup)
        elif step < start:
            return 1.0
        elif step < start + decay:
            done = (step - start) / decay
            height = {
                "linear": 1.0 - done,
                "cosine": 0.5 * (1.0 + math.cos(math.pi * given["num_cycles"] * 2.0 * done)),
                "1-sqrt": 1.0 - math.sqrt(done),
            }[given["decay_type"]]
        else:
            return float(low)
        return max(0.0, float(height * (1.0 - low) + low))

    return at

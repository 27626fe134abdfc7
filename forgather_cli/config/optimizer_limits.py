"""What ``optimizer`` and its groups may be, as config mistakes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from forgather_cli.config.options import did_you_mean
from forgather_cli.config.schema import AdamWSettings, GroupSettings, OptimizerOption, SGDSettings, Target

DEFAULT_GROUP = "default"
EVERYWHERE = {"lr": 0.0, "lr_scale": 0.0, "weight_decay": 0.0}
"""Settings of a group that every optimizer has, the first two besides its own."""
_ADJUST_LR = ("original", "match_rms_adamw")


def optimizer_problems(option: OptimizerOption) -> Iterator[str]:
    """Each names the setting and the remedy."""
    if isinstance(option, SGDSettings):
        yield from _nesterov("nesterov", option.nesterov, option.momentum)
    yield from check_groups(option)


def _nesterov(name: str, nesterov: bool, momentum: float) -> Iterator[str]:
    if nesterov and not momentum:
        yield f"{name}: looks ahead along the momentum, got momentum=0; set momentum=0.9 or nesterov=false"


def groups_of(option: OptimizerOption) -> dict[str, GroupSettings]:
    """The option's groups; a ``_target_`` has none of its own and gets the shipped ones."""
    return AdamWSettings().groups if isinstance(option, Target) else option.groups


def label(option: OptimizerOption) -> str:
    """The option's name as typed, or the last part of its ``_target_``."""
    return option.path.rpartition(".")[2] if isinstance(option, Target) else option.type


def check_groups(option: OptimizerOption) -> list[str]:
    """Every mistake in ``optimizer.groups`` that can be seen without parameters, one line each."""
    return [problem for name, group in groups_of(option).items() for problem in _group_problems(name, group, option)]


def _group_problems(name: str, group: GroupSettings, main: OptimizerOption) -> Iterator[str]:
    where = f"optimizer.groups.{name}"
    if name == DEFAULT_GROUP:
        yield f"{where}: this name stands for the parameters that no regex matches; choose another"
    if problem := regex_problem(where, group.regex):
        yield problem
    if "lr" in group.settings and "lr_scale" in group.settings:
        yield f"{where}.settings: lr and lr_scale exclude each other; leave one out"
    own = group.optimizer
    if own is not None and not isinstance(own, Target) and own.groups != type(own)().groups:
        yield f"{where}.optimizer.groups: nothing reads it; groups are set in optimizer.groups only"
    option = own or main
    if not isinstance(option, Target):
        known = EVERYWHERE | _own_settings(option)
        for key, value in group.settings.items():
            problem = _problem(key, value, known, label(option))
            if problem:
                yield f"{where}.settings.{key}: {problem}"
    if isinstance(option, SGDSettings) and (own or {"nesterov", "momentum"} & group.settings.keys()):
        nesterov, momentum = (group.settings.get(key, getattr(option, key)) for key in ("nesterov", "momentum"))
        yield from _nesterov(f"{where}.settings.nesterov", nesterov, momentum)


def regex_problem(where: str, regex: str) -> str | None:
    """What is wrong with the regular expression of a group."""
    try:
        re.compile(regex)
    except re.error as error:
        remedy = "mend it, with a backslash before a sign that means itself"
        return f"{where}.regex: not a regular expression ({error}), got {regex!r}; {remedy}"
    return None


def _own_settings(option: Any) -> dict[str, Any]:
    """The option's settings that may differ from group to group, with their values."""
    names = (f.name for f in dataclasses.fields(option))
    return {name: getattr(option, name) for name in names if name not in ("type", "groups", "fused")}


def _problem(key: str, value: Any, known: dict[str, Any], kind: str) -> str | None:
    if key not in known:
        return f"{kind} has no such setting;{did_you_mean(key, known)} it has {', '.join(sorted(known))}"
    reference = known[key]
    if key == "adjust_lr":
        return None if value in _ADJUST_LR else f"must be one of {', '.join(_ADJUST_LR)}, got {value!r}"
    if isinstance(reference, bool):
        return None if isinstance(value, bool) else f"must be true or false, got {value!r}"
    if isinstance(reference, tuple):
        good = isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(v) and 0 <= v < 1 for v in value)
        return None if good else f"must be two numbers from 0 up to below 1, got {value!r}"
    if isinstance(reference, int):
        return None if isinstance(value, int) and value > 0 else f"must be a positive whole number, got {value!r}"
    low, high = (-math.inf, 0) if key == "beta2_decay" else (0, math.inf)
    bound = "at most 0" if key == "beta2_decay" else "at least 0"
    good = _is_number(value) and low <= value <= high
    return None if good else f"must be a number, {bound}, got {value!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

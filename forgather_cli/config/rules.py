"""Checks the rules between settings. They are declared beside the settings, in ``config/schema/``.

A settings class yields its contradictions with others from ``problems(config)``; a field that counts only under
another setting has an ``OnlyIf`` in its annotation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_type_hints

from forgather_cli.config.schema import CallbackSettings, Config, OnlyIf, Option, Settings, typed, value_at


def rule_problems(config: Config, layers: Mapping[str, int] = MappingProxyType({})) -> list[str]:
    """Every mistake between settings, each naming both and the remedy.

    ``layers``: path -> number of the layer that set it, innermost recipe first, command line last. A setting that a
    later layer makes void (``save_steps`` in the recipe, ``save_strategy=no`` on the command line) is no mistake.
    """
    found = dict(owners("", config))
    contradictions = [
        _placed(problem, prefix, each, config)
        for prefix, each in found.items()
        if isinstance(each, Settings)
        for problem in each.problems(config)
    ]
    return [*contradictions, *_unread(config, found, layers)]


def world_problems(config: Config, world: int) -> list[str]:
    """Mistakes of a config that is to be trained by ``world`` ranks, whatever its own settings of ranks."""
    return rule_problems(dataclasses.replace(config, nproc_per_node=world, nnodes=1, node_rank=0))


def owners(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every settings object with the prefix of its fields' paths: the run, each option, what is nested in them."""
    yield prefix, value
    for field in dataclasses.fields(value):
        child = getattr(value, field.name)
        for key, inner in child.items() if isinstance(child, dict) else ():
            if isinstance(inner, Settings):
                yield from owners(f"{prefix}{field.name}.{key}.", inner)
        if dataclasses.is_dataclass(child):
            yield from owners(f"{prefix}{field.name}.", child)


def _placed(problem: str, prefix: str, owner: Any, config: Config) -> str:
    """A problem as it is told where its option stands: rules name the settings beside them as at the group's place, and
    an option within one of its group has them elsewhere.
    """
    group = prefix.partition(".")[0]
    is_within = isinstance(owner, Option) and isinstance(getattr(config, group, None), Option) and prefix != f"{group}."
    names = "|".join(field.name for field in dataclasses.fields(owner))
    pattern = rf"(?<![\w.])(?:{group}\.({names})\b|({names})(?=[=:]))"
    return re.sub(pattern, rf"{prefix}\1\2", problem) if is_within else problem


def _unread(config: Config, owners: Mapping[str, Any], layers: Mapping[str, int]) -> Iterator[str]:
    """One problem for each path of ``layers`` that nothing reads."""
    reported: set[str] = set()
    for prefix, owner in owners.items():
        cls: type = type(owner)
        for name, condition in _conditions(cls):
            path = f"{prefix}{name}"
            given = {path} if path in layers else {each for each in layers if each.startswith(f"{path}.")}
            inactive = isinstance(owner, CallbackSettings) and getattr(owner, name) is None
            if not given or inactive or (void := condition.void(config, owner)) is None:
                continue
            because = f"{prefix}{void.because[1:]}" if void.because.startswith(".") else void.because
            since = max(layers.get(because, -1), layers.get(because.partition(".")[0], -1))
            for each in sorted(given - reported):
                if layers[each] >= since:
                    reported.add(each)
                    shown = each if each.startswith("callbacks.") else each.rpartition(".")[2]
                    cause = f"{because.rpartition('.')[2]}={typed(value_at(config, because))}"
                    problem = f"{shown}: {void.what} with {cause}; {void.remedy} or leave {shown} out"
                    yield _placed(problem, prefix, owner, config)


@cache
def _conditions(cls: type) -> list[tuple[str, OnlyIf]]:
    """The fields of a class that count only under other settings."""
    hints = get_type_hints(cls, include_extras=True)
    found = [(field.name, hints[field.name]) for field in dataclasses.fields(cls)]
    return [
        (name, mark) for name, hint in found for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, OnlyIf)
    ]

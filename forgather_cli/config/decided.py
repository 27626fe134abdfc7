"""Settings that a config leaves open and the machine decides: once, as a run first starts; config.yaml keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from forgather_cli.config.schema import Config, typed
from forgather_cli.hardware import gpu_of, without_auto


class Decision(NamedTuple):
    path: str
    asked: Any
    """What left the setting open."""
    value: Any
    why: str
    """For people."""

    @property
    def says(self) -> str:
        return f"{self.path}={_shown(self.asked)}: {_shown(self.value)}"


Rule = Callable[[Config, Any], tuple[Any, str]]
"""(config, the GPU as ``hardware.gpu_of`` has it, None of a CPU) -> the value, and why. Of a group's option the
settings that ``auto`` has too are put in afterwards."""


def _precision(config: Config, gpu: Any) -> tuple[Any, str]:
    return without_auto(config.precision, config.device)


_RULES: dict[str, tuple[str | None, Rule]] = {
    "precision": ("auto", _precision),
}
"""Setting, a dotted path -> what leaves it open (of a group the option's type), and its rule, which finds those above
it decided."""


def left_open(config: Config) -> bool:
    """Whether the machine has something to decide."""
    return any(_is_open(_value(config, path), word) for path, (word, _) in _RULES.items())


def decided(config: Config, begun: Config | None = None) -> tuple[Config, list[Decision]]:
    """``config`` with nothing left open, and what was decided: as a run's config has it, ``begun``, else by the rules."""
    decisions = []
    for path, (word, rule) in _RULES.items():
        asked = _value(config, path)
        if not _is_open(asked, word):
            continue
        own = {name: value for name, value in vars(asked).items() if name != "type"} if is_dataclass(asked) else {}
        value, why = _value(begun, path), "as the run was begun"
        if value is _ABSENT or _is_open(value, word) or not all(hasattr(value, name) for name in own):
            value, why = rule(config, gpu_of(config.device))
        value = replace(value, **own) if own else value
        group, _, name = path.rpartition(".")
        changed = {group: replace(getattr(config, group), **{name: value})} if group else {name: value}
        config = replace(config, **changed)
        decisions.append(Decision(path, asked, value, why))
    return config, decisions


_ABSENT = object()


def _value(config: Any, path: str) -> Any:
    return reduce(lambda found, name: getattr(found, name, _ABSENT), path.split("."), config)


def _is_open(value: Any, word: str | None) -> bool:
    return bool(getattr(value, "type", value) == word)


def _shown(value: Any) -> str:
    return typed(getattr(value, "type", value))

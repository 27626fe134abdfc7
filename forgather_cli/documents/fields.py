"""What the fields of a document must hold, for documents that anybody may have written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class FieldError(ValueError):
    """A field of a document is missing, or holds what it cannot hold."""


@dataclass(frozen=True)
class FieldKind:
    """What a field may hold; ``name`` says it."""

    holds: Callable[[Any], bool]
    name: str


_LARGEST = sys.float_info.max
COUNT = FieldKind(lambda value: type(value) is int and 0 <= value < 1 << 63, "a whole number from 0 on")
NUMBER = FieldKind(lambda value: type(value) in (int, float) and -_LARGEST <= value <= _LARGEST, "a finite number")
AMOUNT = FieldKind(lambda value: NUMBER.holds(value) and value >= 0, "a finite number from 0 on")
TEXT = FieldKind(lambda value: isinstance(value, str), "a text")
FLAG = FieldKind(lambda value: isinstance(value, bool), "true or false")


def optional(kind: FieldKind) -> FieldKind:
    return FieldKind(lambda value: value is None or kind.holds(value), f"{kind.name}, or null")


def several(*kinds: FieldKind) -> FieldKind:
    """A list of one value of each kind."""
    return FieldKind(
        lambda value: (
            isinstance(value, list | tuple)
            and len(value) == len(kinds)
            and all(kind.holds(item) for kind, item in zip(kinds, value, strict=True))
        ),
        f"a list of {len(kinds)} values ({', '.join(dict.fromkeys(kind.name for kind in kinds))})",
    )


def list_of(kind: FieldKind) -> FieldKind:
    return FieldKind(lambda value: isinstance(value, list) and all(map(kind.holds, value)), f"a list, each {kind.name}")


def object_of(kind: FieldKind) -> FieldKind:
    return FieldKind(
        lambda value: isinstance(value, dict) and all(map(kind.holds, value.values())), f"an object, each {kind.name}"
    )


ANYTHING = FieldKind(lambda value: True, "anything")


def check_fields(found: Any, kinds: Mapping[str, FieldKind], place: str = "it") -> None:
    """Raise FieldError, naming ``place`` and the field, unless ``found`` is an object with a value of each kind."""
    if not isinstance(found, Mapping):
        raise FieldError(f"{place} must be an object, got {found!r:.80}")
    inside = "" if place == "it" else f"{place}."
    for name, kind in kinds.items():
        if name not in found:
            raise FieldError(f"{inside}{name} is missing")
        if not kind.holds(found[name]):
            raise FieldError(f"{inside}{name} must be {kind.name}, got {found[name]!r:.80}")

"""What all settings are made of: the decorator, numbers with bounds, and ``_target_``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict, Discriminator, Tag
from typing_extensions import dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[_T]) -> type[_T]:
    """A frozen keyword-only dataclass that pydantic decodes without accepting unknown keys."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


def _no(value: Any) -> Any:
    """YAML 1.1 reads a bare ``no`` as false; Hugging Face users write it."""
    return "no" if value is False else value


PositiveInt = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Probability = Annotated[float, Ge(0), Lt(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Interval = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_no)]


@dataclass(frozen=True)
class Target:
    """A class or function of the user's (``_target_``) with its keyword arguments, bound to the signature at load."""

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_object(self) -> bool:
        """True for an object that a script gave, of which there is only the name, in angle brackets."""
        return self.path.startswith("<")


def _to_target(value: Any) -> Any:
    if isinstance(value, dict) and "_target_" in value:
        return {"path": value["_target_"], "kwargs": {k: v for k, v in value.items() if k != "_target_"}}
    return value


def _option(value: Any) -> Any:
    """Discriminator of the group unions: ``_target_`` or the option's ``type``."""
    if isinstance(value, dict):
        return "_target_" if "_target_" in value else value.get("type")
    return "_target_" if isinstance(value, Target) else getattr(value, "type", None)


TargetOption = Annotated[Target, BeforeValidator(_to_target), Tag("_target_")]
by_type = Discriminator(_option)

"""What settings classes are made of: the decorator, rules, types of numbers with bounds, and ``Target``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function, tagged_union_schema
from typing_extensions import dataclass_transform

from forgather_cli.targets import import_target

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[_T]) -> type[_T]:
    """A frozen keyword-only dataclass that pydantic decodes without accepting unknown keys."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
    made = dataclass(frozen=True, kw_only=True)(cls)
    if issubclass(made, Option) and vars(made).get("type"):
        for known in made.members if made.__module__.endswith(".settings") else ():
            if (known.__module__, known.__name__) == (made.__module__, made.__name__):
                return known  # type: ignore[return-value] # import_options has begun this module anew
        made.members.append(made)
    return made


class Settings:
    """A class of settings. A fact about it that no other setting changes is a class variable beside its fields."""

    def problems(self, config: Any) -> Iterable[str]:
        """Its contradictions with other settings of the ``Config``, each ``name: what is wrong, got X; what to do``."""
        return ()


class Option(Settings):
    """An option of a config group. What builds, prints, plans or explains options asks the object, never its kind.

    Each group has a public base class right below this one; its options are the classes below that which declare a
    ``type``, in the order in which they are written. Whoever adds one puts it into a ``settings.py`` (CONTRIBUTING.md).
    """

    bases: ClassVar[list[type[Option]]] = []
    """The base classes of all groups."""
    members: ClassVar[list[type[Option]]]
    """The options of the group."""
    maker: ClassVar[str] = ""
    """``module:name`` or ``module:Class.method`` of what makes it, imported where it is used. The base class says how
    it is called.
    """
    needs: ClassVar[tuple[str, ...]] = ()
    """An extra of ours, and the packages that it brings: a run begins where all of them are."""

    type: str

    def __init_subclass__(cls) -> None:
        if Option in cls.__bases__:
            cls.members = []
            Option.bases.append(cls)

    @classmethod
    def of_type(cls, name: object) -> Any:
        """The option of the group that has this ``type``; the base class itself where none has."""
        return next((option for option in cls.members if option.type == name), cls)

    @classmethod
    def load_maker(cls) -> Any:
        """What ``maker`` names."""
        return resolve_name(cls.maker)

    def arguments(self) -> dict[str, Any]:
        """What the maker is called with, by name: the fields without ``type`` and those that the base class has."""
        base = next(cls for cls in Option.bases if isinstance(self, cls))
        others = {"type", *getattr(base, "__dataclass_fields__", ())}
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclass(frozen=True)
class OnlyIf:
    """Annotation of a field that counts only under another setting: giving it where it does not count is a mistake.

    ``void(config, owner)`` returns why the field does not count under the whole ``Config`` and beside the other fields
    of ``owner``, the settings that have it; None where it counts.
    """

    void: Callable[[Any, Any], Void | None]


@dataclass(frozen=True)
class Void:
    """Why a field does not count: the setting ``because`` of which it does not, and the remedy that makes it count.

    A setting that begins with a dot stands beside the field, wherever the settings that have both are.
    """

    because: str
    remedy: str
    what: str = "nothing reads it"


def only_if(setting: str, *values: Any, remedy: str = "") -> OnlyIf:
    """The field counts where the setting has one of the values (of a group: of these options).

    ``setting``: a dotted path, of one beside the field a dot and its name.
    """
    remedy = remedy or f"set {setting.rpartition('.')[2]}={either(map(typed, values))}"
    return only_where(setting, lambda value: value in values, remedy)


def only_where(setting: str, counts: Callable[[Any], bool], remedy: str) -> OnlyIf:
    """The field counts where ``counts(the setting's value)`` is true."""
    void = Void(setting, remedy)
    is_beside, path = setting.startswith("."), setting.removeprefix(".")
    return OnlyIf(lambda config, owner: None if counts(value_at(owner if is_beside else config, path)) else void)


def value_at(config: Any, path: str) -> Any:
    """The value of a setting; of a group its option's type."""
    value = reduce(lambda at, key: at[key] if isinstance(at, dict) else getattr(at, key), path.split("."), config)
    return getattr(value, "type", value)


def typed(value: Any) -> str:
    """A setting's value as it is typed."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def either(words: Iterable[object]) -> str:
    """``a, b or c``."""
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last


def without_evaluation(config: Any) -> Void | None:
    """The setting that leaves a run without evaluations; None if it has some."""
    on_save = config.eval_on_save and config.save_strategy != "no"
    if config.eval_strategy == "no" and not config.eval_on_start and not on_save:
        return Void("eval_strategy", "set eval_strategy=steps")
    nothing: Void | None = config.data.nothing_held_out
    return nothing


NEEDS_EVALUATION = OnlyIf(lambda config, owner: without_evaluation(config))


def asks_for_evaluation(name: str) -> OnlyIf:
    """The run-level setting counts, unless it is off, only where something is held out."""
    return OnlyIf(lambda config, _: None if getattr(config, name) in ("no", False) else config.data.nothing_held_out)


PositiveInt = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
Steps = PositiveInt | Annotated[float, Gt(0), Lt(1)]  # optimizer steps; below 1: a share of all
PositiveFloat = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Probability = Annotated[float, Ge(0), Lt(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
# YAML 1.1 reads a bare ``no`` as false; Hugging Face users write it
_bare_no = BeforeValidator(lambda value: "no" if value is False else value)
Interval = Annotated[Literal["no", "steps", "epoch"], _bare_no]
SaveInterval = Annotated[Literal["no", "steps", "epoch", "best"], _bare_no]


def _at_home(path: str) -> str:
    """``~`` and ``~USER`` at a path's beginning are home directories, as in a shell."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise PydanticCustomError("home", "a path whose ~ stands for a home directory, or ./~...")
    return found


FilePath = Annotated[str, AfterValidator(_at_home)]
"""A setting that is a path, or may be one."""


@dataclass(frozen=True)
class Target:
    """A class or function of the user's (``_target_``) with its keyword arguments, bound to the signature at load."""

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.path

    def bound(self, where: str) -> Callable[..., Any]:
        """What it names, with its arguments bound. Raises ConfigError naming the setting ``where``."""
        found = import_target(self.path, where)
        return partial(found, **self.kwargs) if self.kwargs else found

    @classmethod
    def from_tree(cls, value: Any) -> Any:
        """``_target_`` with what stands beside it, as fields; those that a subclass adds are no arguments."""
        if not isinstance(value, dict) or "_target_" not in value:
            return value
        own = {field.name for field in fields(cls)} - {"path", "kwargs"}
        kwargs = {key: item for key, item in value.items() if key not in own and key != "_target_"}
        return {"path": value["_target_"], "kwargs": kwargs, **{key: value[key] for key in own & value.keys()}}


def all_options() -> list[type[Option]]:
    """The options of all groups."""
    return [option for base in Option.bases for option in base.members]


def options(kind: Any) -> list[Any]:
    """The options of a group's base class, or of one that says which it has; of another class itself."""
    found = vars(kind).get("members", [kind]) if isinstance(kind, type) else [kind]
    return found() if callable(found) else found


class ByType:
    """Annotation of a union of options: which of them a mapping is follows from its ``type`` or ``_target_``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds: dict[Any, CoreSchema] = {}
        for kind in (each for part in get_args(source) or (source,) for each in options(part)):
            schema = handler.generate_schema(kind)
            if issubclass(kind, Target):
                kinds["_target_"] = no_info_before_validator_function(kind.from_tree, schema)
            else:
                kinds[kind.type] = schema
        return tagged_union_schema(kinds, discriminator=self._kind)

    def _kind(self, value: Any) -> Any:
        if isinstance(value, dict):
            return "_target_" if "_target_" in value else value.get("type")
        return getattr(value, "type", "_target_" if isinstance(value, Target) else None)


by_type = ByType()

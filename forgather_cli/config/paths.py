"""What settings exist: every dotted path of the schema with its type and the options that have it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from forgather_cli.config import schema
from forgather_cli.config.options import BARE_GROUPS, GROUPS


@dataclass(frozen=True)
class Setting:
    """One dotted path of the schema.

    ``types`` are the option types that have it (empty at run level), ``annotation`` its type there. ``open`` paths
    may have anything below them: mappings, lists, and mappings of settings.
    """

    path: str
    types: tuple[str, ...]
    annotation: Any
    open: bool

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]


@cache
def settings() -> dict[str, Setting]:
    """Every setting of the schema by dotted path: run level, each option's, and the callbacks'."""
    found = dict(_below(schema.RunSettings, "", None))
    hints = get_type_hints(schema.Config, include_extras=True)
    for group in BARE_GROUPS:
        for option in members(hints[group]):
            for path, setting in _below(option, f"{group}.", option_type(option)):
                before = found.get(path)
                found[path] = (
                    setting if before is None else dataclasses.replace(setting, types=before.types + setting.types)
                )
    found.update(_below(schema.CallbackSettings, "callbacks.", None))
    return {path: setting for path, setting in found.items() if path != "callbacks.custom"}


def members(annotation: Any) -> list[type]:
    """The settings classes of a group's union; ``Target`` left out."""
    inner = unwrap(annotation)
    candidates = [unwrap(arg) for arg in get_args(inner)] if _is_union(inner) else [inner]
    return [
        cls
        for cls in candidates
        if isinstance(cls, type) and dataclasses.is_dataclass(cls) and not issubclass(cls, schema.Target)
    ]


def option_type(cls: type) -> str:
    """The ``type`` an option's YAML carries for this settings class."""
    return next(str(field.default) for field in dataclasses.fields(cls) if field.name == "type")


def unwrap(annotation: Any) -> Any:
    """An annotation without ``Annotated``."""
    return unwrap(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def alternatives(annotation: Any) -> list[Any]:
    """The types an annotation admits, unions flattened."""
    inner = unwrap(annotation)
    return [leaf for arg in get_args(inner) for leaf in alternatives(arg)] if _is_union(inner) else [inner]


def values(annotation: Any) -> list[str]:
    """The values a setting admits as they are typed, where they can be listed: literals, booleans, null."""
    found: list[str] = []
    for kind in alternatives(annotation):
        if get_origin(kind) is Literal:
            found += [str(value) for value in get_args(kind)]
        elif kind is bool:
            found += ["true", "false"]
        elif kind is types.NoneType:
            found.append("null")
    return found


def is_list(annotation: Any) -> bool:
    return any(get_origin(kind) in (list, tuple) for kind in alternatives(annotation))


def root_keys() -> set[str]:
    """Names of the run-level settings."""
    return {field.name for field in dataclasses.fields(schema.RunSettings)}


def lookup(path: str) -> Setting | None:
    """The setting at ``path``, or the open one above it."""
    known = settings()
    if path in known:
        return known[path]
    above, _, _ = path.rpartition(".")
    while above:
        if above in known:
            return known[above] if known[above].open else None
        above, _, _ = above.rpartition(".")
    return None


def ending_with(key: str, extra: set[str] | frozenset[str] = frozenset()) -> list[str]:
    """Paths under the groups addressed by their last parts that end with ``key``, from the schema and ``extra``."""
    pool = {*settings(), *extra}
    found = {path for path in pool if path.endswith(f".{key}") and path.split(".")[0] in BARE_GROUPS}
    above, _, rest = key.partition(".")
    if not found and rest:  # below an open setting: groups.no_decay.regex
        found = {f"{path}.{rest}" for path in ending_with(above, extra) if lookup(f"{path}.{rest}")}
    return sorted(found)


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted paths of the leaves of a plain tree; an empty mapping is a leaf."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix


def is_group_path(path: str) -> bool:
    return path.split(".")[0] in GROUPS


def _below(cls: type, prefix: str, kind: str | None) -> Iterator[tuple[str, Setting]]:
    """Settings of a dataclass and of the settings classes nested in it."""
    of = (kind,) if kind else ()
    own = {each.name for each in dataclasses.fields(cls)} - {"type"}  # what is no field cannot be set: report_to
    for name, annotation in get_type_hints(cls, include_extras=True, localns=vars(schema)).items():
        if name not in own:
            continue
        nested = [inner for inner in alternatives(annotation) if dataclasses.is_dataclass(inner)]
        opened = bool(nested) or any(get_origin(inner) in (dict, list) for inner in alternatives(annotation))
        yield f"{prefix}{name}", Setting(f"{prefix}{name}", of, annotation, opened and not nested)
        for inner in nested:
            if isinstance(inner, type):
                yield from _below(inner, f"{prefix}{name}.", kind)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)

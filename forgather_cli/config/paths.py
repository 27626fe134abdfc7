"""What settings exist: every dotted path of the schema with its type and the options that have it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from forgather_cli.config import schema
from forgather_cli.config.options import BARE_GROUPS, SERVER, SearchPath
from forgather_cli.documents.regular_files import read_yaml
from forgather_cli.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One dotted path of the schema.

    ``types`` are the option types that have it (empty at run level), ``annotation`` its type there. ``open`` paths
    may have anything below them: mappings, lists, and mappings of settings. ``owners``: the classes it is a field of.
    """

    path: str
    types: tuple[str, ...]
    annotation: Any
    open: bool
    owners: tuple[type, ...]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]


@cache
def settings() -> dict[str, Setting]:
    """Every setting of the schema by dotted path: run level, each option's, the callbacks' and the DiLoCo server's."""
    found = dict(_below(schema.RunSettings, "", None))
    hints = get_type_hints(schema.Config, include_extras=True)
    for group in BARE_GROUPS:
        for option in members(hints[group]):
            for path, new in _below(option, f"{group}.", option.type):
                old = found.get(path, dataclasses.replace(new, types=(), owners=()))
                found[path] = dataclasses.replace(old, types=old.types + new.types, owners=old.owners + new.owners)
    found.update(_below(schema.CallbackSettings, "callbacks.", None))
    found.update(_below(schema.DilocoServerSettings, f"{SERVER}.", None))
    return {path: setting for path, setting in found.items() if path != "callbacks.custom"}


def members(annotation: Any) -> list[Any]:
    """The settings classes of a group's union; ``Target`` left out."""
    return [kind for kind in alternatives(annotation) if not issubclass(kind, schema.Target)]


def alternatives(annotation: Any) -> list[Any]:
    """The types an annotation admits, unions flattened."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for arg in get_args(annotation) for leaf in alternatives(arg)]
    return schema.options(annotation)


def entries(path: str) -> dict[str, Any]:
    """By type the settings classes that a mapping by free names has entries of, where ``path`` is one or below it."""
    setting = lookup(path)
    if setting is None or setting.path == path:
        return {}
    values = [get_args(kind)[1] for kind in alternatives(setting.annotation) if get_origin(kind) is dict]
    kinds = [kind for value in values for kind in alternatives(value)]
    return {getattr(kind, "type", "_target_"): kind for kind in kinds if dataclasses.is_dataclass(kind)}


def values(annotation: Any) -> list[str]:
    """The values a setting admits as they are typed, where they can be listed: literals, booleans, null."""
    of = {bool: ("true", "false"), types.NoneType: ("null",)}
    words = [get_args(kind) if get_origin(kind) is Literal else of.get(kind, ()) for kind in alternatives(annotation)]
    return [str(word) for each in words for word in each]


def takes_target(setting: Setting) -> bool:
    """It may be a class or function of the user's, whose signature says what may stand beside ``_target_``."""
    return schema.Target in alternatives(setting.annotation)


def is_list(annotation: Any) -> bool:
    return any(get_origin(kind) in (list, tuple) for kind in alternatives(annotation))


def is_text(path: str) -> bool:
    """The setting takes text and no number."""
    kinds = alternatives(setting.annotation) if (setting := lookup(path)) else []
    return str in kinds and float not in kinds


def root_keys() -> set[str]:
    """Names of the run-level settings."""
    return {field.name for field in dataclasses.fields(schema.RunSettings)}


def lookup(path: str) -> Setting | None:
    """The setting at ``path``, or the open one above it."""
    above = path
    while above and above not in settings():
        above = above.rpartition(".")[0]
    found = settings().get(above)
    return found if found and (found.open or above == path) else None


def ending_with(key: str, extra: set[str] | frozenset[str] = frozenset()) -> list[str]:
    """Paths under the groups addressed by their last parts that end with ``key``, from the schema and ``extra``."""
    pool = {*settings(), *extra}
    found = {path for path in pool if path.endswith(f".{key}") and path.split(".")[0] in BARE_GROUPS}
    above, _, rest = key.partition(".")
    if not found and rest:  # below an open setting: groups.no_decay.regex
        found = {f"{path}.{rest}" for path in ending_with(above, extra) if lookup(f"{path}.{rest}")}
    return sorted(found)


def option_leaves(search: SearchPath | None, group: str, name: str) -> dict[str, tuple[Any, Path]]:
    """By dotted path, what an option says and the file that says it: its own, or one that it starts from. Of a broken
    file nothing: those who compose it tell.
    """
    found: dict[str, tuple[Any, Path]] = {}
    if search and (file := search.option(group, name)):
        with suppress(ConfigError, AttributeError, TypeError):
            tree = read_yaml(file, ConfigError)
            for entry in tree.pop("defaults", None) or []:
                if isinstance(entry, str) and entry not in ("_self_", name):
                    found |= option_leaves(search, group, entry.rpartition("/")[2].partition("@")[0])
            found |= {path: (value, file) for path, value in walk(tree, group, lists=False) if path != group}
    return found


def walk(tree: Any, path: str = "", *, lists: bool = True) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of all that a plain tree holds, an empty mapping or list too.

    Places in a list count from 0; without ``lists`` a list is one value.
    """
    if tree and (isinstance(tree, dict) or (lists and isinstance(tree, list))):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from walk(item, f"{path}.{key}" if path else str(key), lists=lists)
    elif path:
        yield path, tree


def leaves(tree: Any, path: str = "") -> list[str]:
    """The dotted paths of a plain tree's values; a list is one."""
    return [each for each, _ in walk(tree, path, lists=False)]


def _below(cls: type, prefix: str, kind: str | None) -> Iterator[tuple[str, Setting]]:
    """Settings of a dataclass and of the settings classes nested in it."""
    of = (kind,) if kind else ()
    own = {each.name for each in dataclasses.fields(cls)} - {"type"}  # what is no field cannot be set: min_ranks
    for name, annotation in get_type_hints(cls, include_extras=True, localns=vars(schema)).items():
        if name not in own:
            continue
        kinds = alternatives(annotation)
        nested = [inner for inner in kinds if dataclasses.is_dataclass(inner) and inner is not schema.Target]
        opened = bool(nested) or schema.Target in kinds or any(get_origin(inner) in (dict, list) for inner in kinds)
        yield f"{prefix}{name}", Setting(f"{prefix}{name}", of, annotation, opened and not nested, (cls,))
        for inner in nested:
            if isinstance(inner, type):
                yield from _below(inner, f"{prefix}{name}.", kind)

"""What a setting means: its comment in the shipped files, what it takes, and which option gives it which value; of a
group its options, and which recipe chooses which.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from forgather_cli.config.mistakes import nearest
from forgather_cli.config.options import Info, SearchPath, comment, groups, named, recipes, search_path
from forgather_cli.config.paths import Setting, ending_with, settings
from forgather_cli.config.recipe import read_recipe
from forgather_cli.config.schema import Meaning, Target
from forgather_cli.documents.regular_files import read_text, read_yaml
from forgather_cli.errors import ConfigError

_KINDS = {int: "a whole number", float: "a number", str: "text", list: "a list", tuple: "a list", dict: "a mapping"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@dataclass(frozen=True)
class Explained:
    """One setting."""

    path: str
    comment: str
    takes: str
    values: dict[str, Any]
    """By option (``data=text``), what its file says; of a run-level setting the value of ``train``."""
    recipes: dict[str, Any]
    """By recipe file, what it says."""


@dataclass(frozen=True)
class ExplainedGroup:
    """One config group."""

    path: str
    options: list[Info]
    recipes: dict[str, str]
    """By recipe, the option that it chooses or has from ``train``."""
    settings: list[str]
    """As they are named in an override; of callbacks the callbacks."""


def explain(key: str, config_dir: Path | None = None) -> list[Explained | ExplainedGroup]:
    """The group of that name, or the settings that ``key`` stands for: a full path, or the end of one.

    Raises ConfigError for an unknown key.
    """
    search, known = search_path(config_dir), settings()
    if search.is_group(key):
        chosen: dict[str, str] = {}
        for info in recipes(config_dir):
            with contextlib.suppress(ConfigError):  # of a broken recipe other commands tell
                for layer in read_recipe(info.name, search, Path.cwd()).layers:
                    chosen |= {info.name: ", ".join(map(str, layer.chosen[key]))} if key in layer.chosen else {}
        below = [path.split(".") for path in known if path.startswith(f"{key}.")]
        names = [".".join(parts[:2]) if key == "callbacks" else parts[1] for parts in below]
        return [ExplainedGroup(key, groups(config_dir)[key], chosen, list(dict.fromkeys(names)))]
    paths = [key] if key in known else [path for path in known if path.endswith(f".{key}")]
    if bare := [path for path in ending_with(key) if path in paths]:  # those that an override of this name sets
        paths = bare
    if not paths:
        raise ConfigError(f"{key}: unknown setting;{nearest(key) or ' forgather config show lists all'}")
    return [_explained(known[path], search, config_dir) for path in paths]


def _explained(setting: Setting, search: SearchPath, config_dir: Path | None) -> Explained:
    group, dot, rest = setting.path.partition(".")
    if not dot:
        files = {"train": search.conf[0] / "train.yaml"}
    else:
        paths = {name: search.option(group, name) for name in search.option_names(group)}
        files = {f"{group}={name}": file for name, file in paths.items() if file}
    about = next((text for file in files.values() if (text := comment(file, setting.leaf))), "")
    values: dict[str, Any] = {}
    for option, file in files.items():
        values |= _at(read_yaml(file, ConfigError), rest or setting.path, option)
    set_in: dict[str, Any] = {}
    for info in recipes(config_dir):
        with contextlib.suppress(ConfigError):
            if setting.leaf in read_text(info.file, ConfigError):  # to read them all takes 0.1 s
                own = read_recipe(str(info.file), search, Path.cwd()).layers[-2]
                set_in |= _at(own.node, setting.path, named(own.file))
    return Explained(setting.path, about or _meaning(setting.annotation), takes(setting.annotation), values, set_in)


def _at(value: Any, path: str, name: str) -> dict[str, Any]:
    """What a tree has at a path, by ``name``, if anything."""
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return {}
        value = value[part]
    return {name: value}


def _meaning(annotation: Any) -> str:
    """What the annotation itself says; empty where nothing."""
    for each in get_args(annotation):
        if found := each.text if isinstance(each, Meaning) else _meaning(each):
            return found
    return ""


def takes(annotation: Any) -> str:
    """What may be given: ``a number at least 0 or null``."""
    found = [_kind(each) for each in _parts(annotation)]
    *first, last = dict.fromkeys(text for text in found if text)
    return f"{', '.join(first)} or {last}" if first else last


def _parts(annotation: Any) -> list[Any]:
    """The alternatives, literals one by one, with their bounds still on them."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated and any(hasattr(bound, name) for bound in arguments[1:] for name in _BOUNDS):
        return [annotation]
    if origin is Annotated:
        return _parts(arguments[0])
    if origin is Literal:
        return list(arguments)
    if origin in (Union, types.UnionType):
        return [part for each in arguments for part in _parts(each)]
    return [annotation]


def _kind(part: Any) -> str:
    if get_origin(part) is Annotated:
        inner, *bounds = get_args(part)
        limits = [f"{word} {getattr(b, name):g}" for b in bounds for name, word in _BOUNDS.items() if hasattr(b, name)]
        return " ".join([_kind(inner), " and ".join(limits)]).rstrip()
    if part is types.NoneType:
        return "null"
    if part is bool:
        return "true or false"
    if part is Target:
        return "a function or class of yours by _target_"
    if isinstance(part, type) or get_origin(part):
        return _KINDS.get(get_origin(part) or part, "settings of its own")
    return str(part)

"""What a setting means: its comment in the shipped files, what it takes, and which option gives it which value."""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from forgather_cli.config.mistakes import nearest
from forgather_cli.config.options import SearchPath, comment, search_path
from forgather_cli.config.paths import Setting, ending_with, settings
from forgather_cli.errors import ConfigError
from forgather_cli.input_files import read_yaml

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


def explain(key: str, config_dir: Path | None = None) -> list[Explained]:
    """The settings that ``key`` stands for: a full path, or the end of one. Raises ConfigError for an unknown key."""
    search, known = search_path(config_dir), settings()
    paths = [key] if key in known else [path for path in known if path.endswith(f".{key}")]
    if bare := [path for path in ending_with(key) if path in paths]:  # those that an override of this name sets
        paths = bare
    if not paths:
        raise ConfigError(f"{key}: unknown setting;{nearest(key) or ' forgather config show lists all'}")
    return [_explained(known[path], search) for path in paths]


def _explained(setting: Setting, search: SearchPath) -> Explained:
    group, dot, rest = setting.path.partition(".")
    if not dot:
        files = {"train": search.conf[0] / "train.yaml"}
    else:
        named = {name: search.option(group, name) for name in search.option_names(group)}
        files = {f"{group}={name}": file for name, file in named.items() if file}
    about, found = "", {}
    for option, file in files.items():
        about = about or comment(file, setting.leaf)
        value: Any = read_yaml(file, ConfigError)
        for part in (rest or setting.path).split("."):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            found[option] = value
    return Explained(setting.path, about, takes(setting.annotation), found)


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
    if isinstance(part, type) or get_origin(part):
        return _KINDS.get(get_origin(part) or part, "settings of its own")
    return str(part)

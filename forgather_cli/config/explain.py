"""What a setting means: its comment in the shipped files, what it takes, and which option gives it which value; of a
group its options, and which recipe chooses which.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from forgather_cli.config.mistakes import nearest
from forgather_cli.config.options import Info, SearchPath, comment, groups, named, recipes, search_path
from forgather_cli.config.paths import Setting, ending_with, option_leaves, settings, walk
from forgather_cli.config.recipe import read_recipe
from forgather_cli.config.schema import Meaning, Option, Target, either
from forgather_cli.documents.regular_files import read_text, read_yaml
from forgather_cli.errors import ConfigError

_KINDS = {
    int: "a whole number", float: "a number", str: "text", list: "a list", tuple: "a list", dict: "a mapping",
    bool: "true or false", types.NoneType: "null", Target: "a function or class of yours by _target_",
}  # fmt: skip
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
    settings: dict[str, str]
    """By path what each means; of those that hold others nothing."""


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
        means = {path: about(path, search) for path in known if path.startswith(f"{key}.")}
        return [ExplainedGroup(key, groups(config_dir)[key], chosen, means)]
    paths = [key] if key in known else [path for path in known if path.endswith(f".{key}")]
    paths = [path for path in ending_with(key) if path in paths] or paths  # those that an override of this name sets
    if not paths:
        raise ConfigError(f"{key}: unknown setting;{nearest(key) or ' forgather config show lists all'}")
    return [_explained(known[path], search, config_dir) for path in paths]


def _explained(setting: Setting, search: SearchPath, config_dir: Path | None) -> Explained:
    files, values = _files(setting.path, search), dict[str, Any]()
    for option, file in files.items():
        values |= _at(read_yaml(file, ConfigError), setting.path.partition(".")[2] or setting.path, option)
    set_in: dict[str, Any] = {}
    for info in recipes(config_dir):
        with contextlib.suppress(ConfigError):
            if setting.leaf in read_text(info.file, ConfigError):  # to read them all takes 0.1 s
                own = read_recipe(str(info.file), search, Path.cwd()).layers[-2]
                set_in |= _at(own.node, setting.path, named(own.file))
    return Explained(setting.path, about(setting.path, search), takes(setting.annotation), values, set_in)


def _files(path: str, search: SearchPath) -> dict[str, Path]:
    """Those that may say a setting, by option."""
    group = path.partition(".")[0]
    found = {f"{group}={name}": search.option(group, name) for name in search.option_names(group)}
    return {name: file for name, file in found.items() if file} or {"train": search.conf[0] / "train.yaml"}


def about(path: str, search: SearchPath) -> str:
    """What a setting means; where nothing says it, what that of which it is a part means."""
    if (setting := settings().get(path)) is None:
        return ""
    if own := field_comment(setting.leaf, setting.owners):
        return own
    files = (comment(file, path.partition(".")[2] or path) for file in _files(path, search).values())
    return next(filter(None, files), "") or _meaning(setting.annotation) or about(path.rpartition(".")[0], search)


def field_comment(name: str, owners: Iterable[type]) -> str:
    """What stands at a field in the source of the first class that says something there."""
    classes = [base for owner in owners for base in owner.__mro__[:-1]]
    return next(filter(None, (_comments(cls.__module__).get(f"{cls.__name__}.{name}") for cls in classes)), "")


@cache
def _comments(module: str) -> dict[str, str]:
    """By ``Class.field`` the comment behind each field of a module's classes, or in the lines above it."""
    source, found = inspect.getsource(import_module(module)), dict[str, str]()
    lines = source.splitlines()
    for cls in (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)):
        for field in cls.body:
            if isinstance(field, ast.AnnAssign) and field.end_lineno:
                behind = lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode()
                above = takewhile(lambda line: line.strip().startswith("#"), lines[field.lineno - 2 :: -1])
                text = re.sub("# (type|fmt|noqa):.*", "", behind).strip() or "\n".join(reversed([*above]))
                found[f"{cls.name}.{ast.unparse(field.target)}"] = re.sub(r"\n *#", "", text).strip(" #")
    return found


_EDITED = (
    "model.path", "data.files", "data.seq_len", "global_batch_size", "per_device_train_batch_size", "max_steps",
    "num_train_epochs", "learning_rate", "save_steps", "save_total_limit",
)  # fmt: skip
"""What most people change first in a recipe."""


def to_edit(name: str, search: SearchPath) -> str:
    """A recipe's text with all of ``_EDITED``, the choice of model and data, and a comment behind each setting. It
    trains what the recipe trains.
    """
    recipe, known = read_recipe(name, search, Path.cwd()), settings()
    own, text = recipe.layers[-2], recipe.text
    chosen = {group: str(names[-1]) for layer in recipe.layers for group, names in layer.chosen.items() if names}
    said = dict(walk(read_yaml(search.conf[0] / "train.yaml", ConfigError), lists=False))
    for group, option in chosen.items():
        said |= {path: value for path, (value, _) in option_leaves(search, group, option).items()}
    said |= {path: change.value for layer in recipe.layers for path, change in layer.given.items()}
    unread = {"max_steps" if said["max_steps"] == -1 else "num_train_epochs", "data.files" * ("data.source" in said)}
    added = [path for path in _EDITED if path in said and path not in {*own.given, *unread}]
    for group in [group for group in ("model", "data") if group not in own.chosen]:
        choice = f"  - override {group}: {chosen[group]}  # others: forgather config options {group}\n"
        text = text.replace("  - _self_\n", f"{choice}  - _self_\n", 1)
    lines = [*text.splitlines(), "", "# as they are in what it starts from"]
    lines += [f"{path.rpartition('.')[2]}: {json.dumps(said[path])}".replace('"???"', "???") for path in added]
    paths = {path.rpartition(".")[2]: path for path in (*own.given, *added) if path in known}
    for n, line in enumerate(lines):
        if "#" not in line and (at := paths.get(line.partition(":")[0].strip())):
            lines[n] = f"{line:<33} # {about(at, search)}"
    return "\n".join([*lines, ""])


def _at(value: Any, path: str, name: str) -> dict[str, Any]:
    """What a tree has at a path, by ``name``, if anything."""
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return {}
        value = value[part]
    return {name: value}


def sentence(cls: type) -> str:
    """The first sentence of a class's docstring; empty where a dataclass has written it."""
    text = " ".join((cls.__doc__ or "").split()).partition(". ")[0].removesuffix(".")
    return "" if text.startswith(f"{cls.__name__}(") else text


def _meaning(annotation: Any) -> str:
    """What the annotation itself says, or the option that is the setting; empty where nothing."""
    if isinstance(annotation, type) and issubclass(annotation, Option):
        return sentence(annotation)
    found = (each.text if isinstance(each, Meaning) else _meaning(each) for each in get_args(annotation))
    return next(filter(None, found), "")


def takes(annotation: Any) -> str:
    """What may be given: ``a number at least 0 or null``."""
    return either(dict.fromkeys(_alternatives(annotation)))


def _alternatives(annotation: Any) -> list[str]:
    """Literals one by one, numbers with their bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *notes = arguments
        limits = [f"{word} {getattr(n, name):g}" for n in notes for name, word in _BOUNDS.items() if hasattr(n, name)]
        return [f"{each} {' and '.join(limits)}".rstrip() for each in _alternatives(inner)]
    if origin is Literal:
        return list(map(str, arguments))
    if origin in (Union, types.UnionType):
        return [text for each in arguments for text in _alternatives(each)]
    return [_KINDS.get(origin or annotation, "settings of its own")]

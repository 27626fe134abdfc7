"""Plain trees to ``Config`` and back: strict, with every mistake reported at once."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forgather_cli.config import mistakes
from forgather_cli.config.mistakes import Speech
from forgather_cli.config.options import GROUPS
from forgather_cli.config.references import as_typed, references, resolved, without_token
from forgather_cli.config.schema import CallbackSettings, Config, Target
from forgather_cli.errors import ConfigError
from forgather_cli.input_files import read_yaml
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")


def decode(
    tree: dict[str, Any],
    *,
    options: dict[str, str] | None = None,
    speech: Speech | None = None,
    unresolved: frozenset[str] = frozenset(),
) -> Config:
    """A plain resolved tree as ``Config``. Unknown keys, wrong types and missing values raise one ConfigError.

    ``options`` are the chosen options by group, for messages; ``speech`` says how paths were typed. Nothing is said of
    ``unresolved`` paths, which another message covers: a ConfigError of them alone has no problems.
    """
    from pydantic import ValidationError

    say = speech or Speech(options=options or option_types(tree))
    given, missing = _without_missing(tree)
    problems = [mistakes.missing(path, say) for path in missing if path not in unresolved]
    infinite = dict(_not_finite(given))
    problems += [f"{say.name(path)}: must be a finite number, got {value}" for path, value in infinite.items()]
    try:
        config = _adapter().validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        known = {*missing, *unresolved, *infinite}
        problems += mistakes.from_pydantic(error.errors(include_url=False), given, say, known)
        raise ConfigError(problems) from error  # without problems where other messages cover all of them
    if problems:
        raise ConfigError(problems)
    return config


def decode_settings(cls: type[_T], values: dict[str, Any]) -> _T:
    """Values by field name as a settings dataclass of the schema, strictly. Raises ConfigError with all problems."""
    from pydantic import TypeAdapter, ValidationError

    speech = Speech(fields=tuple(field.name for field in dataclasses.fields(cls)))  # type: ignore[arg-type]
    infinite = dict(_not_finite(values))
    problems = [f"{path}: must be a finite number, got {value}" for path, value in infinite.items()]
    try:
        decoded: _T = TypeAdapter(cls).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        problems += mistakes.from_pydantic(error.errors(include_url=False), values, speech, set(infinite))
    if problems:
        raise ConfigError(problems)
    return decoded


def option_types(tree: dict[str, Any]) -> dict[str, str]:
    """The ``type`` of each group's option, ``_target_`` for the user's own."""
    found = {group: tree[group] for group in GROUPS if isinstance(tree.get(group), dict)}
    return {group: "_target_" if "_target_" in option else str(option.get("type")) for group, option in found.items()}


def to_tree(config: Any) -> dict[str, Any]:
    """Settings of the schema as plain dicts and lists; of a ``Config``, ``decode`` gives back an equal one."""
    tree = _plain(config)
    assert isinstance(tree, dict)
    return tree


def without_tokens(tree: Any) -> Any:
    """A tree of settings that may be sent away: of ``auth_token`` and the like only the name is left."""
    if isinstance(tree, Mapping):
        return {
            key: f"<{str(key).upper()}>" if str(key).endswith("_token") and value is not None else without_tokens(value)
            for key, value in tree.items()
        }
    return [without_tokens(each) for each in tree] if isinstance(tree, list | tuple) else tree


def dump_tree(tree: dict[str, Any]) -> str:
    """YAML text of a plain tree, in the order of its keys."""
    import yaml

    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def load_tree(path: Path) -> dict[str, Any]:
    """The plain tree in a YAML file that ``dump_tree`` wrote. Raises ConfigError if it cannot be read."""
    tree = read_yaml(path, lambda why: ConfigError(f"{why}; give a run directory with its config.yaml"))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, got {type(tree).__name__}; restore the file")
    directory = RunDir(path.parent).first_directory()
    if directory is not None and directory != Path.cwd():
        _resolve(tree, directory)
    return tree


_FILES = ("data.files", "data.eval_files", "data.data_files")
_PATHS = (
    "data.tokenizer", "data.dataset", "data.chat_template", "data.cache_dir", "model.path", "model.config",
    "callbacks.textgen.prompts", "trainer.accelerate_config", "resume_from_checkpoint", "logging_dir",
)  # fmt: skip
"""Settings that may name a file or directory; ``_FILES`` are lists of nothing else."""


def _resolve(tree: dict[str, Any], directory: Path) -> None:
    """Make a run's relative paths absolute, which count from ``directory``. Words such as ``bytes`` stay."""
    for name in (*_FILES, *_PATHS):
        *above, last = name.split(".")
        node: Any = tree
        for part in above:
            node = node.get(part) if isinstance(node, dict) else None
        value = node.get(last) if isinstance(node, dict) else None
        if name in _FILES and isinstance(value, list):
            node[last] = [
                str(directory / each)
                if isinstance(each, str) and "://" not in each and not each.startswith(("~", "${"))
                else each
                for each in value
            ]
        elif name in _PATHS and isinstance(value, str) and (directory / value).exists():
            node[last] = str(directory / value)


def written_tree(config: Config, path: Path) -> dict[str, Any]:
    """The tree of a config that was started from the file at ``path``, with the references that it has there."""
    typed = references(load_tree(path)) if path.is_file() else {}
    return without_token(as_typed(to_tree(config), typed))


def load_saved(path: Path) -> Config:
    """The config a run was started with, from its ``config.yaml``. Raises ConfigError, each problem with the file."""
    return decode_saved(load_tree(path), path)


def decode_saved(tree: dict[str, Any], path: Path) -> Config:
    """The tree of the saved config at ``path`` as ``Config``. Raises ConfigError, each problem with the file."""
    try:
        return decode(resolved(tree))
    except ConfigError as error:
        named = [problem if str(path) in problem else f"{path}: {problem}" for problem in error.problems]
        raise ConfigError(named) from error


@cache
def _adapter() -> TypeAdapter[Config]:
    from pydantic import TypeAdapter

    return TypeAdapter(Config)


def _plain(value: Any) -> Any:
    if isinstance(value, Target):
        beside = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in ("path", "kwargs")}
        return {"_target_": value.path, **beside, **{key: _plain(item) for key, item in value.kwargs.items()}}
    if isinstance(value, CallbackSettings):
        named = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "custom"
        }
        active = {name: callback for name, callback in named.items() if callback is not None}
        return {name: _plain(callback) for name, callback in {**active, **value.custom}.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _without_missing(tree: dict[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """The tree without its ``???`` values, and their paths."""
    kept, missing = {}, []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            kept[key], below = _without_missing(value, f"{path}.")
            missing += below
        elif value == "???":
            missing.append(path)
        else:
            kept[key] = value
    return kept, missing


def _not_finite(tree: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Paths of infinities and NaNs, which comparisons with bounds would let pass."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, float) and not math.isfinite(value):
            yield path, value
        yield from _not_finite(value, path)

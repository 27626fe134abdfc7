"""Plain trees to ``Config`` and back: strict, with every mistake reported at once."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forgather_cli import __version__
from forgather_cli.config import mistakes
from forgather_cli.config.compose import references, resolved, written
from forgather_cli.config.mistakes import Naming
from forgather_cli.config.options import GROUPS
from forgather_cli.config.paths import is_text, walk
from forgather_cli.config.schema import CallbackSettings, Config, Sampling, Target, all_options
from forgather_cli.config.schema.folders import undecodable
from forgather_cli.documents.json_and_yaml import has_half
from forgather_cli.documents.regular_files import read_yaml
from forgather_cli.errors import ConfigError, CutOffError
from forgather_cli.run_dir import RunDir, resume_command

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")
_VERSION = "forgather_version"


def decode(tree: dict[str, Any], *, naming: Naming | None = None, unresolved: Collection[str] = ()) -> Config:
    """A plain resolved tree as ``Config``. Unknown keys, wrong types and missing values raise one ConfigError.

    ``naming`` tells how paths were typed. ``unresolved`` paths are reported already: they get no message here, and a
    ConfigError of them alone has no problems.
    """
    naming = naming or Naming(options=option_types(tree))
    left = [path for path, value in walk(tree, lists=False) if value == "???" and path.split(".")[0] not in unresolved]
    problems = [mistakes.missing(path, naming) for path in left if path not in unresolved]
    return _validated(Config, _without_missing(tree), naming, problems, {*left, *unresolved})


def decode_settings(cls: type[_T], values: dict[str, Any]) -> _T:
    """Values by field name as a settings dataclass of the schema, strictly. Raises ConfigError with all problems."""
    naming = Naming(fields=tuple(field.name for field in dataclasses.fields(cls)))  # type: ignore[arg-type]
    return _validated(cls, values, naming, [], set())


def decode_sampling(values: dict[str, Any]) -> Sampling:
    """Settings of ``Sampling`` by name, where ``temperature`` 0 is greedy. Raises ConfigError with all problems."""
    if values.get("temperature") == 0:
        values = {**values, "do_sample": False, "temperature": 1.0}
    found = decode_settings(Sampling, values)
    if problems := list(found.problems()):
        raise ConfigError(problems)
    return found


def decode_part(name: str, cls: type[_T], tree: dict[str, Any], naming: Naming) -> _T:
    """Settings that are no part of a ``Config``, from a tree with them alone, under ``name``. Raises ConfigError."""
    whole = dataclasses.make_dataclass("Part", [(name, cls)])
    whole.__pydantic_config__ = getattr(cls, "__pydantic_config__", None)  # type: ignore[attr-defined]
    return getattr(_validated(whole, tree, naming, [], set()), name)  # type: ignore[no-any-return]


def _validated(cls: type[_T], tree: dict[str, Any], naming: Naming, problems: list[str], known: set[str]) -> _T:
    """A tree as ``cls``. Raises ConfigError with ``problems`` and pydantic's errors of paths that are not ``known``."""
    from pydantic import ValidationError

    # comparisons with bounds would let infinities and NaNs pass
    infinite = {
        path: value
        for path, value in walk(tree)
        if isinstance(value, float) and not math.isfinite(value) and not is_text(path)
    }
    problems += [f"{naming.name(path)}: must be a finite number, got {value}" for path, value in infinite.items()]
    bytes_in = {path: value for path, value in walk(tree) if isinstance(value, str) and has_half(value)}
    encoding = sys.getfilesystemencoding()
    remedy = "rename the file, or name it by a pattern with *" if encoding == "utf-8" else "export LC_ALL=C.UTF-8"
    problems += [
        f"{naming.name(path)}: must be text in {encoding}, got {value!r}; {remedy}" for path, value in bytes_in.items()
    ]
    if bytes_in:  # the library reports them all as one, of the whole document
        raise ConfigError(problems)
    try:
        decoded: _T = _adapter(cls).validate_json(json.dumps(tree, default=str))  # type: ignore[arg-type]
    except ValidationError as error:
        problems += mistakes.from_pydantic(error.errors(include_url=False), tree, naming, {*known, *infinite})
        raise ConfigError(problems) from error  # without problems where other messages cover all of them
    if problems:
        raise ConfigError(problems)
    return decoded


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    from pydantic import PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(cls)
    except PydanticUserError as error:
        found = [option for option in all_options() if option.__module__.endswith(".settings")]
        raise ConfigError([problem for option in found for problem in undecodable(option)] or str(error)) from error


def _without_missing(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_missing(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value != "???"
    }


def option_types(tree: dict[str, Any]) -> dict[str, str]:
    """The ``type`` of each group's option, ``_target_`` for the user's own."""
    found = {group: tree[group] for group in GROUPS if isinstance(tree.get(group), dict)}
    return {group: "_target_" if "_target_" in option else str(option.get("type")) for group, option in found.items()}


def to_tree(settings: Any) -> Any:
    """Settings of the schema as plain dicts and lists; ``decode`` turns a ``Config``'s tree back into an equal one."""
    if isinstance(settings, dict):
        return {key: to_tree(item) for key, item in settings.items()}
    if isinstance(settings, list | tuple):
        return [to_tree(item) for item in settings]
    if not dataclasses.is_dataclass(settings):
        return settings
    tree = {field.name: to_tree(getattr(settings, field.name)) for field in dataclasses.fields(settings) if field.init}
    if isinstance(settings, Target):
        kwargs = tree.pop("kwargs")
        return {"_target_": tree.pop("path"), **tree, **kwargs}
    if isinstance(settings, CallbackSettings):
        custom = tree.pop("custom")
        return {**{name: callback for name, callback in tree.items() if callback is not None}, **custom}
    return tree


def without_tokens(tree: Any) -> Any:
    """A tree of settings that others may see: the value of ``auth_token`` and the like is replaced by its name."""
    if isinstance(tree, Mapping):
        return {
            key: f"<{str(key).upper()}>" if str(key).endswith("_token") and value is not None else without_tokens(value)
            for key, value in tree.items()
        }
    return [without_tokens(each) for each in tree] if isinstance(tree, list | tuple) else tree


def dump_tree(tree: dict[str, Any]) -> str:
    """YAML text of a plain tree, in the order of its keys."""
    import yaml

    base: Any = yaml.SafeDumper
    # libyaml, five times as fast where PyYAML has it, folds texts of several lines otherwise and escapes emoji
    if "\\" not in ascii(tree).replace(r"\\", ""):
        base = getattr(yaml, "CSafeDumper", base)

    class Dumper(base):  # type: ignore[misc]
        """Quotes 1e5, a text to PyYAML and a number in a recipe (OmegaConf 2.3 and 2.4)."""

    Dumper.add_implicit_resolver("float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789"))
    text: str = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def with_comments(text: str, comments: Mapping[str, str]) -> str:
    """A text of ``dump_tree`` with comments on settings, by dotted path: at their lines, or above what is too long."""
    import yaml

    lines = text.splitlines(keepends=True)

    def add_below(node: Any, above: str) -> None:
        for key, value in node.value:
            path, is_block = f"{above}{key.value}", isinstance(value, yaml.CollectionNode) and value.value
            if is_block and isinstance(value, yaml.MappingNode):
                add_below(value, f"{path}.")
            elif path in comments:
                first, last = key.start_mark.line, (key if is_block else value).end_mark.line
                beside = f"{lines[last].rstrip():<42}  # {comments[path]}\n"
                if len(beside) <= 81:
                    lines[last] = beside
                else:
                    lines[first] = f"{' ' * key.start_mark.column}# {comments[path]}\n{lines[first]}"

    add_below(yaml.compose(text, yaml.SafeLoader), "")
    return "".join(lines)


def dump_saved(tree: dict[str, Any]) -> str:
    """YAML text of a run's ``config.yaml``: the version that writes it, then the tree."""
    return dump_tree({_VERSION: __version__, **tree})


def load_tree(path: Path) -> dict[str, Any]:
    """The plain tree in a YAML file that ``dump_saved`` wrote; of 0.2 with what later settings were there.

    Raises ConfigError if it cannot be read.
    """
    again = f"{resume_command(RunDir(path.parent))} makes it again from the newest checkpoint, if there is one"
    tree = read_yaml(path, lambda why: ConfigError(f"{why}; mend it; or empty it, and {again}"))
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, got {type(tree).__name__}; restore the file")
    last = tree and tree.get("adapter")
    if tree is None or (_VERSION in tree and not (isinstance(last, dict) and any(last.values()))):
        raise CutOffError(f"{path}: is empty or cut off; {again}")
    version = tree.pop(_VERSION, None)  # 0.2 and before wrote none
    if isinstance(tree.get("data"), dict) and isinstance(tree.get("model"), dict):
        if version is None:
            _complete_0_2(tree["data"], tree["model"])
        if tree["data"].get("type") == "instruct":
            tree["data"].setdefault("add_tokens", False)  # before there was the setting, markers were text
            tree["data"].setdefault("template_date", RunDir(path.parent).read_origin().get("started_at"))
    directory = RunDir(path.parent).first_directory()
    if directory is None or directory == Path.cwd():
        return tree
    return _absolute(tree, directory)  # type: ignore[no-any-return]


def _complete_0_2(data: dict[str, Any], model: dict[str, Any]) -> None:
    """Add the settings that 0.2 did not have, as it trained: nothing before a text, any tokenizer, and with denoisers
    a prefix that no ``corruption`` moved."""
    if data.get("type") in ("python_stdlib", "text", "hf", "tokens", "instruct", "synthetic"):
        data.setdefault("add_bos", False)
    if model.get("type") in ("pretrained", "transformers", "qwen3_encdec") and "replace_tokenizer" not in model:
        model["replace_tokenizer"] = data.get("tokenizer") in ("bytes", "bpe")
        denoisers = data.get("denoisers")
        for each in denoisers if isinstance(denoisers, list) else []:
            if isinstance(each, dict) and each.get("mean_span") is None:
                each["corruption"] = None


_FILES = ("data.files", "data.eval_files", "data.data_files")
_PATHS = (
    "data.tokenizer", "data.dataset", "data.chat_template", "data.cache_dir", "model.path", "model.config",
    "callbacks.textgen.prompts", "callbacks.tasks.tasks_dir", "trainer.accelerate_config", "logging_dir",
    "resume_from_checkpoint",
)  # fmt: skip
"""Settings that may name a file or directory; ``_FILES`` are lists of nothing else."""


def _absolute(value: Any, directory: Path, path: str = "", is_argument: bool = False) -> Any:
    """A run's tree with the relative paths, which count from ``directory``, made absolute.

    A setting that may be a path or a word such as ``bytes`` is taken for a path if one of that name exists. So is an
    argument of a ``_target_`` that looks like a path: with a slash or an ending.
    """
    if isinstance(value, dict):
        is_argument |= "_target_" in value
        below = {key: f"{path}.{key}" if path else str(key) for key in value}
        return {key: _absolute(item, directory, below[key], is_argument) for key, item in value.items()}
    if isinstance(value, list):
        return [_absolute(item, directory, path, is_argument) for item in value]
    if not isinstance(value, str) or path.endswith("_target_"):
        return value
    path = re.sub(r"^data\.sources\.[^.]+", "data", path)
    if path in _FILES and not is_argument:
        is_path = "://" not in value and not value.startswith(("~", "${"))
    else:
        may_be = path in _PATHS or (is_argument and ("/" in value or Path(value).suffix))
        is_path = bool(may_be) and os.path.exists(directory / value)
    return str(directory / value) if is_path else value


def written_tree(config: Config, path: Path) -> dict[str, Any]:
    """The tree of a config that was loaded from the file at ``path``, with that file's references unresolved."""
    tree: dict[str, Any] = written(to_tree(config), references(load_tree(path)) if path.is_file() else {})
    return tree


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

"""Where option files and recipes lie: the shipped ones, and the user's beside them.

Shipped: ``conf/`` and ``recipes/`` of the checkout, or ``forgather_cli/conf`` and ``forgather_cli/recipes`` in a wheel.
The user's: ``./conf``, ``./recipes``, and ``--config-dir DIR`` with ``DIR/<group>/x.yaml``, ``DIR/recipes/x.yaml`` or
``DIR/x.yaml``. They add to the shipped ones; a file that would replace one is an error.
"""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forgather_cli.documents.regular_files import read_text
from forgather_cli.errors import ConfigError, did_you_mean
from forgather_cli.run_dir import shown

GROUPS = ("model", "data", "trainer", "optimizer", "lr_scheduler", "loss", "precision", "adapter", "callbacks")
"""The config groups, as in ``schema.Config.GROUPS``; stated again so that listing them costs no import."""

BARE_GROUPS = GROUPS[:-1]
"""Groups whose settings may be named by their last part alone; callbacks are addressed in full."""

SERVER = "diloco"
"""The settings of ``forgather diloco server``, which no run has: a directory of options, and no group of ``Config``."""


@dataclass(frozen=True)
class Info:
    """An option of a config group, or a recipe that can be called by name."""

    name: str
    description: str
    file: Path


@dataclass(frozen=True)
class SearchPath:
    """Directories to look in, the shipped ones first."""

    conf: tuple[Path, ...]
    recipes: tuple[Path, ...]

    def option(self, group: str, name: str) -> Path | None:
        """The file of an option, or None."""
        return next((path for root in self.conf if (path := root / group / f"{name}.yaml").is_file()), None)

    def is_group(self, name: str) -> bool:
        """True for the groups of ``Config`` and for any further directory of options (``+experiment=mine``)."""
        if name in GROUPS or name == SERVER:
            return name in GROUPS
        return any(any((root / name).glob("*.yaml")) for root in self.conf if (root / name).is_dir())

    def option_names(self, group: str) -> list[str]:
        files = (path for root in self.conf for path in (root / group).glob("*.yaml"))
        return sorted({path.stem for path in files if path.is_file()}, key=_natural)


def shipped(name: str) -> Path:
    """The shipped ``conf`` or ``recipes`` directory: inside the package (wheel) or beside it (checkout)."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def named(file: Path | None) -> str:
    """A file as people are shown it, a shipped one from its folder on; None is the command line."""
    root = next((each for each in map(shipped, ("conf", "recipes")) if file and file.is_relative_to(each)), None)
    return "the command line" if file is None else str(file.relative_to(root.parent)) if root else shown(file)


def search_path(config_dir: Path | None = None, cwd: Path | None = None) -> SearchPath:
    """Directories to look in for one command.

    Raises ConfigError if one of the user's files would replace a shipped one.
    """
    here = cwd or Path.cwd()
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(
            f"--config-dir: no such directory, got {str(config_dir)!r}; give one with <group>/<option>.yaml"
        )
    own = [config_dir] if config_dir else []
    conf = _distinct([shipped("conf"), here / "conf", *own])
    recipes = _distinct([shipped("recipes"), here / "recipes", *(root / "recipes" for root in own), *own])
    path = SearchPath(tuple(conf), tuple(recipes))
    problems = []
    for first, file in _collisions(path.conf, ["*/*.yaml", "train.yaml"]):
        name = f"{file.parent.name}={file.stem}" if file.stem != "train" else "train"
        which = "a shipped option" if first.is_relative_to(shipped("conf").resolve()) else "another option"
        problems.append(f"{name}: {file} has the name of {which}, {first}; rename yours")
    for first, file in _collisions(path.recipes, ["*.yaml"]):
        which = "a shipped recipe" if first.is_relative_to(shipped("recipes").resolve()) else "another recipe"
        problems.append(f"recipe {file.stem}: {file} has the name of {which}, {first}; rename yours")
    if problems:
        raise ConfigError(problems)
    return path


def groups(config_dir: Path | None = None, cwd: Path | None = None) -> dict[str, list[Info]]:
    """Every group with its options: one-line description (first comment) and file."""
    path = search_path(config_dir, cwd)
    # directories of options that are no group of Config; a --config-dir may hold its recipes there too
    further = {file.parent.name for root in path.conf for file in root.glob("*/*.yaml")} - {*GROUPS, "recipes"}
    return {
        group: [
            Info(name, description(file), file)
            for name in path.option_names(group)
            if (file := path.option(group, name)) is not None
        ]
        for group in (*GROUPS, *sorted(further))
    }


def recipes(config_dir: Path | None = None, cwd: Path | None = None) -> list[Info]:
    """Every recipe that can be called by name, ``default`` first."""
    path = search_path(config_dir, cwd)
    found = {file.stem: file for root in reversed(path.recipes) for file in _recipe_files(root)}
    return [
        Info(name, description(file), file)
        for name, file in sorted(found.items(), key=lambda item: (item[0] != "default", *_natural(item[0])))
    ]


def find_recipe(name: str, path: SearchPath, cwd: Path) -> Path:
    """The file of a recipe given by name or path. Raises ConfigError with the nearest names."""
    file = cwd / name
    if name.endswith((".yaml", ".yml")) or "/" in name:
        if file.exists():
            return file.resolve()
        raise ConfigError(f"recipe {name}: no such file; give an existing YAML file or a recipe's name")
    for root in path.recipes:
        if (root / f"{name}.yaml").is_file():
            return root / f"{name}.yaml"
    known = sorted({file.stem for root in path.recipes for file in _recipe_files(root)})
    raise ConfigError(f"recipe {name}: no such recipe;{did_you_mean(name, known)} Recipes: {', '.join(known)}")


def description(file: Path) -> str:
    """The first comment line of a YAML file."""
    for line in read_text(file, ConfigError).splitlines():
        text = line.strip()
        if text.startswith("#") and not text.startswith("# @package"):
            return text.lstrip("# ").rstrip()
        if text and not text.startswith("#"):
            break
    return ""


def comment(file: Path, path: str) -> str:
    """The comment behind the last key of ``path``, below its others, in a YAML file; empty if there is none."""
    keys = "".join(rf"(?:.*\n)*? *{re.escape(key)}:" for key in path.split("."))
    match = re.match(rf"{keys}[^#\n]* # (.+)", read_text(file, ConfigError))
    return match.group(1).strip() if match else ""


def _distinct(directories: list[Path]) -> list[Path]:
    kept: list[Path] = []
    for directory in directories:
        if directory.is_dir() and directory.resolve() not in kept:
            kept.append(directory.resolve())
    return kept


def _recipe_files(root: Path) -> list[Path]:
    """Recipes directly in a directory; ``train`` is the config they start from."""
    return [file for file in root.glob("*.yaml") if file.stem != "train"]


def _collisions(roots: tuple[Path, ...], patterns: list[str]) -> Iterator[tuple[Path, Path]]:
    """(first file, later file) of what two roots both have. A plain copy replaces nothing and is let pass."""
    seen: dict[Path, Path] = {}
    for root in roots:
        for file in sorted(file for pattern in patterns for file in root.glob(pattern)):
            first = seen.setdefault(file.relative_to(root), file)
            if first is not file and not filecmp.cmp(first, file, shallow=False):
                yield first, file


def _natural(name: str) -> tuple[bool, str, int]:
    """Sort key: names by letter, with sizes (60m, 160m, 1b) by size; bare sizes come last."""
    match = re.fullmatch(r"(.*?)(\d+)([kmb])", name)
    if not match:
        return False, name, 0
    stem, digits, unit = match.groups()
    return not stem, stem, int(digits) * {"k": 1, "m": 10**3, "b": 10**6}[unit]

"""Reading recipes: Hydra primary configs that start from ``train`` or from another recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgather_cli.config.options import GROUPS, SearchPath, find_recipe
from forgather_cli.config.overrides import Change, wrong_option
from forgather_cli.config.paths import leaves, root_keys
from forgather_cli.documents.regular_files import read_text, read_yaml
from forgather_cli.errors import ConfigError, did_you_mean


@dataclass
class Recipe:
    """A recipe with those it starts from.

    ``nodes`` are the configs that Hydra composes, by name, ``primary`` the outermost one's name. ``bare`` are bare keys
    (``seq_len`` for ``data.seq_len``), innermost recipe first; ``given`` the paths set in full; ``files`` those of all
    recipes, innermost first; ``of_weights`` those that choose a model with weights.
    """

    name: str
    path: Path
    text: str
    primary: str = ""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    bare: list[Change] = field(default_factory=list)
    given: dict[str, Change] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    of_weights: set[Path] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def read_recipe(name: str, path: SearchPath, cwd: Path) -> Recipe:
    """A recipe by name or path. Lesser faults go into ``problems``; raises ConfigError if it cannot be read."""
    file = find_recipe(name, path, cwd)
    recipe = Recipe(file.stem, file, read_text(file, ConfigError))
    recipe.primary = _add(recipe, file, path, cwd, ())
    return recipe


def _add(recipe: Recipe, file: Path, path: SearchPath, cwd: Path, outer: tuple[Path, ...]) -> str:
    """Add a recipe file, after those it starts from, to ``recipe``; returns its node's name."""
    if file in outer:
        raise ConfigError(f"{file}: starts from itself through its defaults list; start from train")
    body = _load(file)
    entries = body.pop("defaults", None)
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: a recipe begins with 'defaults: [train, _self_]', got no defaults list; add it")
    if not any(isinstance(entry, str) and entry != "_self_" for entry in entries):
        what = f"its defaults list starts from nothing, got {entries}"
        raise ConfigError(f"{file}: {what}; put train (or a recipe) first")
    defaults = []
    for entry in entries:
        if isinstance(entry, str) and entry not in ("train", "_self_") and "/" not in entry:
            try:
                entry = _add(recipe, find_recipe(entry, path, cwd), path, cwd, (*outer, file))
            except ConfigError as error:
                raise ConfigError([f"{problem} (defaults of {file})" for problem in error.problems]) from error
        elif problem := _entry_problem(entry, file, path):
            recipe.problems.append(problem)
            continue
        if entry in ({"override model": "pretrained"}, {"override model": "transformers"}):
            recipe.of_weights.add(file)
        if entry != "_self_":
            defaults.append(entry)
    kept: dict[str, Any] = {}  # what Hydra merges
    for key, value in body.items():
        if key == "hydra":
            recipe.problems.append(f"hydra: Hydra's own settings have no effect here; remove them from {file}")
        elif key in GROUPS and not isinstance(value, dict):
            what = f"options are chosen in the defaults list, got {value!r} in {file}"
            recipe.problems.append(f"{key}: {what}; write '- override {key}: {value}' there")
        elif key in GROUPS and "type" in value:  # another option's settings would stay beside it
            what = f"follows from the option, got {value['type']!r} in {file}"
            remedy = f"write '- override {key}: {value['type']}' in the defaults list"
            recipe.problems.append(f"{key}.type: {what}; {remedy}")
        elif key in GROUPS or key in root_keys():
            kept[key] = value
        else:
            recipe.bare.append(Change(str(key), value, "force", file))
    recipe.given |= {each: Change(each, None, source=file) for each in leaves(kept)}
    if "model.init_from" in leaves(kept):
        recipe.of_weights.add(file)
    recipe.files.append(file)
    node = f"recipe_{len(outer)}_{file.stem}"
    recipe.nodes[node] = {"defaults": [*defaults, "_self_"], **kept}  # a recipe outranks option files
    return node


def _entry_problem(entry: Any, file: Path, path: SearchPath) -> str | None:
    """What is wrong with a ``group: option`` entry of a recipe's defaults list."""
    if not isinstance(entry, dict) or len(entry) != 1:
        return None
    key, value = next(iter(entry.items()))
    words = str(key).split()
    group = words[-1].lstrip("/").partition("@")[0]
    if group not in GROUPS:
        if path.is_group(group):
            return None
        near = did_you_mean(group, GROUPS)
        return f"{group}: no such group (defaults of {file});{near} Groups: {', '.join(GROUPS)}"
    for name in value if isinstance(value, list) else [value]:
        if problem := wrong_option(group, name, path):
            return f"{problem} (defaults of {file})"
    if "override" not in words:
        return f"{group}: train chooses it already (defaults of {file}); write '- override {group}: {value}'"
    return None


def _load(file: Path) -> dict[str, Any]:
    """The YAML mapping in a file, interpolations as they stand."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    read_yaml(file, ConfigError)  # OmegaConf expands aliases without end
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.create(read_text(file, ConfigError)), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, TypeError) as error:
        raise ConfigError(f"{file}: not valid YAML ({' '.join(str(error).split())}); mend the file") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must be a mapping of settings, got {type(tree).__name__}; begin with 'defaults:'")
    return tree

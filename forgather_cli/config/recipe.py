"""Reading recipes: Hydra primary configs that start from ``train`` or from another recipe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgather_cli.config.options import BARE_GROUPS, GROUPS, SearchPath, find_recipe, named
from forgather_cli.config.overrides import Change, Parsed, full_path, typed_paths, wrong_option
from forgather_cli.config.paths import lookup, option_leaves, root_keys, walk
from forgather_cli.documents.regular_files import read_text, read_yaml
from forgather_cli.errors import ConfigError, did_you_mean


@dataclass
class Layer:
    """What one file of a recipe says, or the command line, which has no ``file``.

    ``node`` is the config that Hydra composes, ``bare`` what is named by its last part (``seq_len`` for
    ``data.seq_len``) and still to be put there. ``chosen`` are its options by group, ``beside`` what those of no group
    of ours say and in which file, ``given`` its settings, both by path.
    """

    file: Path | None
    node: dict[str, Any] = field(default_factory=dict)
    bare: dict[str, Any] = field(default_factory=dict)
    chosen: dict[str, list[Any]] = field(default_factory=dict)
    beside: dict[str, tuple[Any, Path]] = field(default_factory=dict)
    given: dict[str, Change] = field(default_factory=dict)

    def choose(self, entries: Iterable[Any], path: SearchPath) -> None:
        """Take what a defaults list chooses."""
        for key, value in (pair for entry in entries if isinstance(entry, dict) for pair in entry.items()):
            group = str(key).split()[-1].lstrip("/").partition("@")[0]
            self.chosen[group] = value if isinstance(value, list) else [value]
            for name in map(str, self.chosen[group] if group not in GROUPS else ()):
                leaves = option_leaves(path, group, name)  # of the whole config: # @package _global_
                self.beside |= {each.removeprefix(f"{group}."): found for each, found in leaves.items()}
                tree = read_yaml(file, ConfigError) if (file := path.option(group, name)) else None
                self.choose(tree.get("defaults") or [] if isinstance(tree, dict) else [], path)


@dataclass
class Recipe:
    """A recipe with those it starts from.

    ``nodes`` are the configs that Hydra composes, by name, ``primary`` the outermost one's name. ``layers`` are
    ``train``, the recipes, innermost first, and the command line; ``of_weights`` the files that choose a model with
    weights. ``left_out``: the settings that went with an option, of which ``notes`` tell.
    """

    name: str
    path: Path
    text: str
    primary: str = ""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    of_weights: set[Path] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_recipe(name: str, path: SearchPath, cwd: Path, parsed: Parsed | None = None) -> Recipe:
    """A recipe by name or path, as it is beside the overrides of the command line. Lesser faults go into ``problems``;
    raises ConfigError if it cannot be read.
    """
    file, train = find_recipe(name, path, cwd), Layer(path.conf[0] / "train.yaml")
    train.choose(read_yaml(path.conf[0] / "train.yaml", ConfigError)["defaults"], path)
    recipe = Recipe(file.stem, file, read_text(file, ConfigError), layers=[train])
    recipe.primary = _add(recipe, file, path, cwd, ())
    typed = Layer(None, given=typed_paths(parsed.changes if parsed else []))
    typed.choose([parsed.chosen] if parsed else [], path)
    recipe.layers.append(typed)
    _settle(recipe, path)
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
    layer = Layer(file)
    layer.choose(defaults, path)
    for key, value in body.items():
        if str(key).split(".")[0] in ("hydra", "defaults"):
            recipe.problems.append(f"{key}: Hydra's own settings have no effect here; remove them from {file}")
        elif key in GROUPS and isinstance(value, str) and (wrong := wrong_option(key, value, path)):
            recipe.problems.append(f"{wrong}; write '- override {key}: NAME' in the defaults list of {file}")
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
            layer.bare[str(key)] = value
    layer.given = {each: Change(each, value, source=file) for each, value in walk(kept, lists=False)}
    if "model.init_from" in layer.given:
        recipe.of_weights.add(file)
    recipe.layers.append(layer)
    node = f"recipe_{len(outer)}_{file.stem}"
    recipe.nodes[node] = layer.node = {"defaults": [*defaults, "_self_"], **kept}  # a recipe outranks option files
    return node


@dataclass(frozen=True)
class _Option:
    """What is chosen in a group, as it is typed; its type, ``_target_`` for a class of the user's; and by path what it
    says."""

    text: str
    kind: str | None
    says: dict[str, Any]


def _option(group: str, names: list[Any], path: SearchPath) -> _Option:
    says = {each: said for name in names for each, (said, _) in option_leaves(path, group, str(name)).items()}
    kind = "_target_" if f"{group}._target_" in says else says.get(f"{group}.type")
    return _Option(f"{group}={','.join(map(str, names))}", kind, says) if names else _Option(f"~{group}", "", {})


def _settle(recipe: Recipe, path: SearchPath) -> None:
    """Settle what each layer sets before anything is composed, where it then counts as its file stands.

    Bare keys are put where they belong, by the options of their file, or those that it is used with. What files set of
    an option that a later layer replaces by one without such settings is taken out.
    """
    chosen = [
        {group: _option(group, layer.chosen[group], path) for group in BARE_GROUPS if group in layer.chosen}
        for layer in recipe.layers
    ]
    last = {group: option for options in chosen for group, option in options.items()}
    files = [layer.given for layer in recipe.layers if layer.file]
    known = set[str]().union(*files, *(option.says for option in last.values()))
    now: dict[str, _Option] = {}  # by group, what this layer trains with
    for number, layer in enumerate(recipe.layers):
        for group in BARE_GROUPS:
            old, new = now.get(group), chosen[number].get(group)
            if in_place := f"{group}._target_" in (*layer.given, *layer.bare):
                new = _Option(f"{group}._target_", "_target_", {})
            if new is None:
                continue
            now[group] = new
            if old is None or new.kind is None or new.text == old.text or (in_place and old.kind == "_target_"):
                continue
            if gone := _leave_out(recipe.layers[:number], group, old, new):
                where = ", ".join(dict.fromkeys(gone.values()))
                by = f", which {named(layer.file)} chooses" if layer.file else ""
                recipe.notes.append(f"{', '.join(gone)}: set in {where} for {old.text}; left out under {new.text}{by}")
                recipe.left_out += gone
        types = {group: str(option.kind) for group, option in now.items()}
        leaves = known.union(*(option.says for option in now.values()))
        for key, value in layer.bare.items():
            target, problem = full_path(key, leaves, types)
            inside = (p for p in layer.given if f"{p}.".startswith(f"{target}.") or target.startswith(f"{p}."))
            if problem is None and (twice := next(inside, None)):
                problem = f"{key}: set twice, {layer.given[twice].key} being the same setting; keep one"
            if problem:
                recipe.problems.append(f"{problem} (in {layer.file})")
                continue
            tree, (*above, name) = layer.node, target.split(".")
            for part in above:
                tree = tree.setdefault(part, {})
            tree[name] = value
            below = {each: Change(each, part, source=layer.file) for each, part in walk(value, target, lists=False)}
            layer.given |= {**below, target: Change(key, value, source=layer.file)}


def _leave_out(layers: list[Layer], group: str, old: _Option, new: _Option) -> dict[str, str]:
    """Take out what ``layers`` set of an option that is replaced; returns the settings, and the file that had each.

    Nobody knows which settings a class of the user's takes, so that with it all go that the new option lacks.
    """
    said = {each.split(".")[1] for each in new.says}
    gone: dict[str, str] = {}
    for layer in layers:
        for path in [path for path in layer.given if path.startswith(f"{group}.")]:
            name = path.split(".")[1]
            setting = lookup(f"{group}.{name}")
            kinds = setting.types if setting else ()
            stays = name in said if new.kind == "_target_" else new.kind in kinds
            if not stays and (old.kind == "_target_" or old.kind in kinds):
                gone[f"{group}.{name}"] = named(layer.file)
                del layer.given[path]
                layer.node[group].pop(name, None)
    return gone


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

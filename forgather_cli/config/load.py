"""A checked ``Config`` from a recipe and overrides, or from the config that a run has saved.

``load_config`` reads top to bottom: parse the overrides, read the recipe and settle which of its files sets what
(``recipe``), let Hydra compose them (``compose``), then apply the overrides that set values, decode and check
(``builder``).

A saved config may be somebody else's: what it imports or reads from the environment is taken out, unless it is trusted.
Allowing a ``_target_`` by its package would not help: any package has functions that import or run their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from forgather_cli.config.accelerate_file import launched_trainer
from forgather_cli.config.builder import ConfigBuilder
from forgather_cli.config.compose import compose, is_reference
from forgather_cli.config.decode import decode_saved, load_tree, option_types
from forgather_cli.config.options import GROUPS, SearchPath, search_path
from forgather_cli.config.overrides import Parsed, parse, parse_lines
from forgather_cli.config.paths import option_leaves, walk
from forgather_cli.config.recipe import Layer, Recipe, read_recipe
from forgather_cli.config.schema import Config, TrainerSettings
from forgather_cli.documents.regular_files import read_text, read_yaml
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir, is_checkpoint, is_model_directory, model_in, resume_command, run_of, step_of
from forgather_cli.terminal.bars import doing


@dataclass(frozen=True)
class Loaded:
    """A checked config and where it came from.

    ``tree`` is the config as ``config.yaml`` has it: complete, references to the environment unresolved, without the
    job's token. ``given`` are the dotted paths set in recipe or command line, chosen groups included. ``notes`` are to
    be told before training: what each line of an Accelerate file is here, and what does not suit a model's weights.
    """

    config: Config
    tree: dict[str, Any]
    given: frozenset[str]
    notes: tuple[str, ...]
    recipe: str
    recipe_path: Path
    recipe_text: str
    overrides: tuple[str, ...]
    option_files: dict[str, str]
    """By setting: the user's file that names a part of their own (``_target_``)."""
    sources: Callable[[], dict[str, Path | None]]
    """By path, the file that says the value, of a run its config; None for the command line."""


@doing("composing the config")
def load_config(
    recipe: str | None, overrides: Sequence[str], *, config_dir: Path | None = None, cwd: Path | None = None
) -> Loaded:
    """Compose a recipe with overrides and check it. Writes nothing, starts nothing.

    ``recipe`` None: ``default``, or where the overrides give a model's weights ``finetune``. Raises ConfigError with
    every problem found.
    """
    here = (cwd or Path.cwd()).resolve()
    search, notes = search_path(config_dir, here), []
    source, builder = _composed(recipe or "default", overrides, search, here)
    if (weights := builder.weights) is not None:
        if recipe is None and not builder.is_paired:  # finetune's sequences have one side
            source, builder = _composed("finetune", overrides, search, here)
            notes = [f"recipe: finetune, since {weights} gives weights; to take another one, name it"]
        elif (rate := builder.rate_of_scratch(source.of_weights)) is not None:
            take = "" if builder.is_paired else "take the recipe finetune, or "
            notes = [
                f"warning: {rate} are those of a recipe for fresh weights, and may undo what {weights} has learned; "
                f"{take}set learning_rate=2e-05 optimizer=adamw, or what you mean"
            ]
    config, tree, given, found = builder.build()
    sources = partial(_sources, tree, builder, search.conf[0] / "train.yaml", source.layers)
    return Loaded(
        config, tree, given, (*notes, *found), source.name, source.path, source.text, tuple(overrides),
        _option_files(tree, sources), sources,
    )  # fmt: skip


def _sources(
    tree: dict[str, Any], builder: ConfigBuilder, base: Path, layers: Sequence[Layer]
) -> dict[str, Path | None]:
    """See ``Loaded``. ``base`` is ``train``, or a run's config, beside which options have files that are chosen now."""
    begun = {**read_yaml(base, ConfigError), "output_dir": None}  # each run has one of its own
    says: dict[str, tuple[Any, Path | None]] = {path: (value, base) for path, value in walk(begun, lists=False)}
    for group in builder.options.keys() & (GROUPS if layers else builder.chosen):
        for name in builder.options[group].strip("[]").split(","):
            says |= option_leaves(builder.search, group, name)
    for layer in layers:
        says |= layer.beside
        says |= {path: (change.value, layer.file) for path, change in layer.given.items() if path in builder.given}
    says |= {path: (..., file) for path, file in builder.read_from.items()}
    says |= {path: (..., None) for path, change in builder.given.items() if change.source is None}
    completed = {path for path, value in walk(tree, lists=False) if value is not None}  # where its file says null
    return {path: file for path, (value, file) in says.items() if value is not None or path not in completed}


def _option_files(tree: dict[str, Any], sources: Callable[[], dict[str, Path | None]]) -> dict[str, str]:
    """See ``Loaded``."""
    parts = [path for path, _ in walk(tree) if path.endswith("._target_")]
    files = sources() if parts else {}
    found = {path: files.get(re.sub(r"\.\d+\..*", "", path)) for path in parts}  # a list has one
    return {path.removesuffix("._target_"): str(file) for path, file in found.items() if file}


def _composed(recipe: str, overrides: Sequence[str], search: SearchPath, here: Path) -> tuple[Recipe, ConfigBuilder]:
    """The recipe, and what is built from it and the overrides, not checked yet."""
    parsed = parse(overrides, search)
    source = read_recipe(recipe, search, here, parsed)
    problems = [*parsed.problems, *source.problems]
    try:
        cfg, options = compose(source.primary, source.nodes, parsed.groups, search)
        trainer = _trainer_of_accelerate(parsed)
        if trainer is not None and TrainerSettings.of_type(options.get("trainer")).is_one_process:
            parsed = parse([*overrides, f"trainer={trainer}"], search)
            cfg, options = compose(source.primary, source.nodes, parsed.groups, search)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    given = {path: change for layer in source.layers if layer.file for path, change in layer.given.items()}
    files = [layer.file for layer in source.layers[1:] if layer.file]
    builder = ConfigBuilder(search, cfg, options, source.name, {*parsed.chosen}, problems, given, files, source.notes)
    builder.apply_changes(  # ~KEY of what was left out asks for what has happened already
        change
        for change in parsed.changes
        if change.action != "delete" or not any(f".{path}".endswith(f".{change.key}") for path in source.left_out)
    )
    return source, builder


@doing("composing the config")
def load_resumed(
    saved: Path,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    cwd: Path | None = None,
    edited: Mapping[str, Any] | None = None,
    reads: Collection[str] | None = None,
) -> Loaded:
    """A run's saved ``config.yaml`` with overrides, checked. A group override replaces the whole group by that option.

    ``edited``: parts of the tree that replace the saved ones before the overrides are applied.
    ``reads``: None trusts the saved config; else the groups that the command reads, which may neither name code nor
    read the environment. Other groups that do are replaced by shipped options.
    ``recipe_path`` and ``recipe_text`` are those of the saved config. Raises ConfigError with every problem found.
    """
    from omegaconf import OmegaConf

    search = search_path(config_dir, (cwd or Path.cwd()).resolve())
    tree = {**load_tree(saved), **(edited or {})}
    if isinstance(trainer := tree.get("trainer"), dict) and trainer.get("accelerate_config"):
        trainer["accelerate_config"] = None  # the tree holds the file's settings already
    parsed = parse(overrides, search)
    implied = _trainer_of_accelerate(parsed)
    if implied is not None and option_types(tree).get("trainer") != implied:
        parsed = parse([*overrides, f"trainer={implied}"], search)
    problems = list(parsed.problems)
    if reads is not None:
        typed = {*parsed.chosen, *(change.key.removesuffix("._target_") for change in parsed.changes)}
        wanted = take_out_code(tree)
        for group in (group for group in wanted if group in reads and group not in typed):
            other = "data=text 'data.files=[...]'" if group == "data" else f"{group}=..."
            trust = "add --trust-config if you trust who wrote it"
            problems.append(f"{group}: the saved config {wanted[group]}; give {other}, or {trust}")
    options = option_types(tree)
    if parsed.groups:
        cfg, chosen = compose("train", {}, parsed.groups, search)
        fresh: Any = OmegaConf.to_container(cfg, resolve=False)
        for group in parsed.chosen:
            tree[group] = fresh.get(group, {})
        options |= {group: option for group, option in chosen.items() if group in parsed.chosen}
    name = str(tree.pop("recipe", "default"))
    builder = ConfigBuilder(search, OmegaConf.create(tree), options, name, {*parsed.chosen}, problems)
    builder.apply_changes(parsed.changes)
    config, tree, given, notes = builder.build()
    sources = partial(_sources, tree, builder, saved, [])
    files = {path: file for path, file in _option_files(tree, sources).items() if file != str(saved)}
    return Loaded(
        config, tree, given, notes, name, saved, read_text(saved, ConfigError), tuple(overrides),
        RunDir(saved.parent).option_files() | files, sources,
    )  # fmt: skip


def _trainer_of_accelerate(parsed: Parsed) -> str | None:
    """The option of ``trainer`` that a file of Accelerate's on the command line needs, or its launcher asks for; None
    where the command line chooses one.
    """
    if "trainer" in parsed.chosen:
        return None
    keys = ("accelerate_config", "trainer.accelerate_config")
    return "fsdp2" if any(change.key in keys and change.value for change in parsed.changes) else launched_trainer()


def reload_config(
    run_dir: Path,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    edited: Mapping[str, Any] | None = None,
) -> Loaded:
    """The config of a run's newest start with overrides, set to resume from its newest valid checkpoint.

    ``edited``: settings that ``forgather checkpoint edit`` wrote into that checkpoint; overrides win.
    Strict as ``load_config``; a group override replaces that group by the option. Raises ConfigError.
    """
    run = RunDir(run_dir)
    if not run.root.is_dir():
        raise ConfigError(f"{run.root}: no such directory; give the directory of a run")
    if is_model_directory(run.root):
        raise ConfigError(f"{run.root}: is a model directory (config.json); give a run, or train model=pretrained")
    if is_checkpoint(run.root) or (not run.config.exists() and step_of(run.root) is not None):
        around = run_of(run.root)
        if around is not None and around.root != run.root.resolve():
            raise ConfigError(f"{run.root}: is a checkpoint; give its run, {resume_command(around)}")
        further = f"forgather train model.path={run.root}"
        if not is_model_directory(model_in(run.root)):  # code of its run builds the model
            further = f"forgather train RECIPE resume_from_checkpoint={run.root} resume_components=[model]"
        raise ConfigError(
            f"{run.root}: is a checkpoint, and no run is around it to go on with; train its weights further, in a run "
            f"of its own: {further}"
        )
    if not run.config.exists():
        raise ConfigError(f"{run.root}: is not a run's directory (no config.yaml); start one with forgather train")
    of_new_runs = {
        "output_dir": f"resume continues in {run_dir}; for a new run from its weights use "
        f"forgather train output_dir=... resume_from_checkpoint={run_dir}/checkpoints/step-...",
        "overwrite_output_dir": "resume continues the run and deletes nothing; leave it out",
    }
    typed = {item.key_or_group for item in parse_lines(overrides)[0]}
    if problems := [f"{name}: {remedy}" for name, remedy in of_new_runs.items() if name in typed]:
        raise ConfigError(problems)
    changes: dict[str, Any] = {"output_dir": str(run.root), "overwrite_output_dir": False}
    began = load_tree(run.newest_config()).get("resume_from_checkpoint")
    # a run that itself began from another's checkpoint begins there again as long as it has none of its own
    if run.checkpoint_steps() or not isinstance(began, str):
        changes |= {"resume_from_checkpoint": True, "resume_components": "all"}
    loaded = load_resumed(run.newest_config(), overrides, config_dir=config_dir, edited={**changes, **(edited or {})})
    return replace(loaded, given=loaded.given | set(changes))


def load_untrusted(path: Path) -> tuple[Config, dict[str, str]]:
    """The config a run was started with after ``take_out_code``, and what that returned. Raises ConfigError."""
    tree = load_tree(path)
    wanted = take_out_code(tree)
    return decode_saved(tree, path), wanted


def take_out_code(tree: dict[str, Any]) -> dict[str, str]:
    """Replace each group that names code or reads the environment by the default recipe's option.

    Run-level settings that do are removed. Returns the reason by group or setting. Callbacks, which can name code in
    more ways, are all removed without a reason: only training reads them.
    """
    tree["callbacks"] = {}
    found: dict[str, str] = {}
    for key, part in tree.items():
        for path, value in walk(part, key):
            if "_target_" in path.removeprefix(key).split("."):
                found.setdefault(key, f"imports {value!s} (_target_)")
            elif is_reference(value):
                found.setdefault(key, f"reads the environment ({value})")
    default = load_config("default", []).tree if found.keys() & set(GROUPS) else {}
    for key in found:
        if key in GROUPS:
            tree[key] = default[key]
        else:
            del tree[key]
    return found

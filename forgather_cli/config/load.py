"""From a recipe and overrides to a checked ``Config``: compose, change, decode, cross-check, bind targets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.errors import ConfigError
from forgather_cli.input_files import read_text

if TYPE_CHECKING:
    from forgather_cli.config.build import Build
    from forgather_cli.config.options import SearchPath
    from forgather_cli.config.overrides import Parsed
    from forgather_cli.config.schema import Config


@dataclass(frozen=True)
class Loaded:
    """A checked config and where it came from.

    ``tree`` is the config as it is written: complete and resolved but for references to the environment, without the
    job's token; ``given`` the dotted paths that recipe or command
    line set, groups whose option was chosen among them.
    """

    config: Config
    tree: dict[str, Any]
    recipe: str
    recipe_path: Path
    recipe_text: str
    overrides: tuple[str, ...]
    given: frozenset[str]


def load_config(
    recipe: str | None, overrides: Sequence[str], *, config_dir: Path | None = None, cwd: Path | None = None
) -> Loaded:
    """Compose a recipe (None: ``default``) with overrides and check it. Writes nothing, starts nothing.

    Raises ConfigError with every problem found.
    """
    from forgather_cli.config.accelerate_file import is_launched_for_fsdp
    from forgather_cli.config.build import Build
    from forgather_cli.config.compose import compose
    from forgather_cli.config.options import search_path
    from forgather_cli.config.overrides import parse
    from forgather_cli.config.recipe import read_recipe

    here = (cwd or Path.cwd()).resolve()
    search = search_path(config_dir, here)
    source = read_recipe(recipe or "default", search, here)
    parsed = parse(overrides, search)
    problems = [*parsed.problems, *source.problems]
    try:
        composed = compose(source.primary, source.nodes, parsed.groups, search)
        if is_launched_for_fsdp() and composed.options.get("trainer") == "single" and "trainer" not in parsed.chosen:
            parsed = parse([*overrides, "trainer=fsdp2"], search)
            composed = compose(source.primary, source.nodes, parsed.groups, search)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    build = Build(search, composed.cfg, composed.options, source.name, parsed.chosen, dict(source.given), problems)
    build.files = source.files
    build.change([*source.bare, *parsed.changes])
    return _loaded(build, source.path, source.text, overrides)


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

    ``edited``: parts of the tree that stand in the place of the saved ones before the overrides are applied.
    ``reads``: None trusts the saved config; else the groups that the command reads, which may neither name code nor
    read the environment. Other groups that do are replaced by shipped options.
    ``recipe_path`` and ``recipe_text`` are those of the saved config. Raises ConfigError with every problem found.
    """
    from omegaconf import OmegaConf

    from forgather_cli.config.accelerate_file import is_launched_for_fsdp
    from forgather_cli.config.build import Build
    from forgather_cli.config.decode import load_tree, option_types
    from forgather_cli.config.options import search_path
    from forgather_cli.config.overrides import parse
    from forgather_cli.config.trust import take_out_code, untrusted

    search = search_path(config_dir, (cwd or Path.cwd()).resolve())
    tree = {**load_tree(saved), **(edited or {})}
    if isinstance(trainer := tree.get("trainer"), dict) and trainer.get("accelerate_config"):
        trainer["accelerate_config"] = None  # what the file said then stands in the tree
    parsed = parse(overrides, search)
    if is_launched_for_fsdp() and option_types(tree).get("trainer") != "fsdp2" and "trainer" not in parsed.chosen:
        parsed = parse([*overrides, "trainer=fsdp2"], search)
    problems = list(parsed.problems)
    if reads is not None:
        typed = {*parsed.chosen, *(change.key.removesuffix("._target_") for change in parsed.changes)}
        wanted = take_out_code(tree)
        problems += [untrusted(group, want) for group, want in wanted.items() if group in reads and group not in typed]
    options = {**option_types(tree), **_replace_groups(tree, parsed, search)}
    name = str(tree.pop("recipe", "default"))
    build = Build(search, OmegaConf.create(tree), options, name, parsed.chosen, {}, problems)
    build.change(parsed.changes)
    return _loaded(build, saved, read_text(saved, ConfigError), overrides)


def _replace_groups(tree: dict[str, Any], parsed: Parsed, search: SearchPath) -> dict[str, str]:
    """Put the options that ``parsed`` chooses into a saved tree; returns the options by group."""
    if not parsed.groups:
        return {}
    from omegaconf import OmegaConf

    from forgather_cli.config.compose import compose

    composed = compose("train", {}, parsed.groups, search)
    fresh: Any = OmegaConf.to_container(composed.cfg, resolve=False)
    for group in parsed.chosen:
        tree[group] = fresh.get(group, {})
    return {group: option for group, option in composed.options.items() if group in parsed.chosen}


def _loaded(build: Build, path: Path, text: str, overrides: Sequence[str]) -> Loaded:
    from forgather_cli.config.decode import to_tree
    from forgather_cli.config.references import as_typed, escaped, without_token

    config = build.finish()
    tree = without_token(as_typed(escaped(to_tree(config)), build.references))
    return Loaded(config, tree, build.recipe, path, text, tuple(overrides), build.given())

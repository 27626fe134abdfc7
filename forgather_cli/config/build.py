"""The middle of loading: changes applied to a composed config, and the checks on what comes out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.config.accelerate_file import (
    LAUNCHED,
    accelerate_settings,
    is_launched,
    is_launched_for_fsdp,
    launched_settings,
)
from forgather_cli.config.compose import Plain, plain
from forgather_cli.config.decode import decode, option_types
from forgather_cli.config.mistakes import Speech
from forgather_cli.config.options import BARE_GROUPS, SearchPath, shipped
from forgather_cli.config.overrides import Change, apply, resolve
from forgather_cli.config.paths import leaves
from forgather_cli.config.references import references
from forgather_cli.config.rules import rule_problems
from forgather_cli.config.schema import AdamWSettings
from forgather_cli.config.targets import target_problems
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from forgather_cli.config.schema import Config


@dataclass
class Build:
    """A config on its way from composition to ``Config``.

    ``options``: chosen option by group; ``chosen``: groups chosen on the command line; ``in_recipe``: paths that a
    recipe sets, with its file; ``files`` those of the recipe and what it starts from, innermost first; ``problems``
    collects the mistakes of every stage; ``references`` are those to the environment, as typed.
    """

    search: SearchPath
    cfg: DictConfig
    options: dict[str, str]
    recipe: str
    chosen: set[str]
    in_recipe: dict[str, Path]
    problems: list[str]
    typed: dict[str, str] = field(default_factory=dict)
    on_command_line: set[str] = field(default_factory=set)
    files: list[Path] = field(default_factory=list)
    references: dict[str, str] = field(default_factory=dict)

    def change(self, changes: Iterable[Change]) -> None:
        """Apply value changes in order; those that cannot be made become problems."""
        changes = self._make_room(changes)
        tree = self._raw()
        selected, known = option_types(tree), frozenset(leaves(tree))
        for change in changes:
            path, problem = resolve(change.key, known, selected)
            problem = problem or self._twice(change, path) or apply(change, path, self.cfg)
            if problem:
                self.problems.append(f"{problem} (in {change.source})" if change.source else problem)
            else:
                self._note(change, path)

    def _make_room(self, changes: Iterable[Change]) -> list[Change]:
        """Remove the settings of options that a ``group._target_`` replaces; returns the changes that still count."""
        left = list(changes)
        for group in BARE_GROUPS:
            left = self._make_room_in(group, left)
        return left

    def _make_room_in(self, group: str, changes: list[Change]) -> list[Change]:
        from omegaconf import OmegaConf

        key, tree = f"{group}._target_", self._raw()
        typed = any(
            change.action != "delete"
            and (change.key == key or (change.key == group and "_target_" in _mapping(change.value)))
            for change in changes
        )
        option = tree.get(group)
        if not (typed or key in self.in_recipe) or not isinstance(option, dict) or "type" not in option:
            return changes
        if typed and group in self.chosen:
            self.problems.append(f"{key}: takes the place of {group}={self.options[group]}; leave one of them out")
        own = set() if typed else {path.split(".")[1] for path in self.in_recipe if path.startswith(f"{group}.")}
        kept = {name: value for name, value in option.items() if name in own}
        OmegaConf.update(self.cfg, group, kept, merge=False, force_add=True)
        self.options.pop(group, None)
        known, where = list(leaves(tree)), self.in_recipe.get(key)

        def is_void(change: Change) -> bool:
            """A recipe's bare key that meant the option."""
            return change.source not in (None, where) and resolve(change.key, known, {})[0].startswith(f"{group}.")

        return [change for change in changes if not is_void(change)]

    def finish(self) -> Config:
        """Resolve, decode and check. Raises ConfigError with the problems of every stage."""
        self._fill_output_dir()
        self._read_accelerate()
        self.references = references(self._raw())
        resolved = plain(self.cfg)
        self.problems += resolved.problems
        config = self._decoded(resolved)
        if config and not self._unknown_options():
            self.problems += rule_problems(config, self._layers())
        if config and not self.problems:
            self.problems += target_problems(config)
        if self.problems or config is None:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        return config

    def given(self) -> frozenset[str]:
        """Paths set by recipe or command line, and groups chosen on the command line."""
        return frozenset(self._layers())

    def _layers(self) -> dict[str, int]:
        """Those paths with how late they were set: recipes from the innermost on, then the command line."""
        recipes = {path: self.files.index(file) for path, file in self.in_recipe.items()}
        return {**recipes, **dict.fromkeys(self.on_command_line | self.chosen, len(self.files))}

    def _decoded(self, resolved: Plain) -> Config | None:
        tree = resolved.tree
        tree["recipe"] = self.recipe
        _fill_tokenizer(tree)
        self._put_own_groups_first(tree)
        if tree.get("callbacks") is None:
            tree["callbacks"] = {}  # ~callbacks: none
        speech = Speech(self.options, self.typed, {**self._option_sources(), **self.in_recipe}, self.search)
        try:
            return decode(tree, speech=speech, unresolved=resolved.unresolved | self._unknown_options())
        except ConfigError as error:
            self.problems += error.problems
            return None

    def _put_own_groups_first(self, tree: dict[str, Any]) -> None:
        """Before the shipped groups of the optimizer, of which the first that matches wins.

        What a saved config holds is in its order already; there only what the command line adds is new.
        """
        groups = _mapping(_mapping(tree.get("optimizer")).get("groups"))
        added = {path.split(".")[2] for path in self.on_command_line if path.startswith("optimizer.groups.")}
        own = [name for name in groups if name not in AdamWSettings().groups and (self.files or name in added)]
        if own:
            tree["optimizer"]["groups"] = {name: groups[name] for name in dict.fromkeys([*own, *groups])}

    def _fill_output_dir(self) -> None:
        """Before interpolations are resolved, since others may name it."""
        from omegaconf import OmegaConf

        if OmegaConf.select(self.cfg, "output_dir", throw_on_resolution_failure=False) is None:
            fresh = f"outputs/{self.recipe}/{datetime.now():%Y-%m-%d_%H-%M-%S}"
            OmegaConf.update(self.cfg, "output_dir", fresh, force_add=True)

    def _read_accelerate(self) -> None:
        """Take over what ``trainer.accelerate_config`` says, or else ``accelerate launch``; the command line wins."""
        tree = self._raw()
        kinds, trainer = option_types(tree), tree.get("trainer")
        sharded, own_decoder = kinds.get("trainer") == "fsdp2", kinds.get("model") in ("decoder", "pretrained")
        name = trainer.get("accelerate_config") if sharded and isinstance(trainer, dict) else None
        try:
            if isinstance(name, str) and name != "???":
                source, said = f"accelerate_config={name}", accelerate_settings(Path(name), own_decoder=own_decoder)
            elif name is None and is_launched():
                source, said = LAUNCHED, launched_settings(sharded=sharded, own_decoder=own_decoder)
            else:
                return
        except ConfigError as error:
            self.problems += error.problems
            return
        if is_launched_for_fsdp() and not sharded and "trainer" in self.options:
            said["trainer"] = "fsdp2"
        for path, value in said.items():
            if path not in self.on_command_line | self.chosen:
                self._take_over(path, value, source)

    def _take_over(self, path: str, value: Any, source: str) -> None:
        from omegaconf import OmegaConf

        if path in self.options:  # train.yaml chooses fp32; what a resumed run says has no recipe and gives way
            now, set_before = self.options[path], self.options[path] != "fp32" and bool(self.files)
        else:
            now, set_before = OmegaConf.select(self.cfg, path), path in self.in_recipe
        if set_before and now != value:
            was, wants = (str(v).lower() if isinstance(v, bool) else v for v in (now, value))
            self.problems.append(f"{path}: {source} says {wants}, got {was} too; leave one of them out")
        elif path in self.options:
            OmegaConf.update(self.cfg, path, {"type": value}, merge=False)
            self.options[path] = value
        else:
            OmegaConf.update(self.cfg, path, value, force_add=True)

    def _note(self, change: Change, path: str) -> None:
        """Remember who set a path and how it was typed, for messages and for the checks."""
        paths = [path, *leaves(change.value, path)] if isinstance(change.value, dict) else [path]
        for each in paths:
            self.typed[each] = change.key if each == path else each
            self.in_recipe.pop(each, None)
            self.on_command_line.discard(each)
            if change.action == "delete":
                self.typed.pop(each)
            elif change.source:
                self.in_recipe[each] = change.source
            else:
                self.on_command_line.add(each)

    def _twice(self, change: Change, path: str) -> str | None:
        if change.source and self.in_recipe.get(path) == change.source:
            return f"{change.key}: set twice, {path} being the same setting; keep one"
        return None

    def _unknown_options(self) -> frozenset[str]:
        """Groups whose option could not be chosen; their settings are not spoken of."""
        return frozenset(group for group in self.options if any(p.startswith(f"{group}=") for p in self.problems))

    def _option_sources(self) -> dict[str, Path]:
        """Leaves that stand in option files of the user's, with the file."""
        found: dict[str, Path] = {}
        tree = self._raw()
        for group, option in self.options.items():
            file = self.search.option(group, option)
            if file and not file.is_relative_to(shipped("conf")):
                found.update(dict.fromkeys(leaves(tree.get(group), group), file))
        return {path: file for path, file in found.items() if path not in self.typed}

    def _raw(self) -> dict[str, Any]:
        from omegaconf import OmegaConf

        tree: Any = OmegaConf.to_container(self.cfg, resolve=False)
        return {str(key): value for key, value in tree.items()}


def _fill_tokenizer(tree: dict[str, Any]) -> None:
    """``data.tokenizer=null`` is that of the model's directory: other tokens would mean nothing to it. Else bytes."""
    data, model = tree.get("data"), tree.get("model")
    if isinstance(data, dict) and "_target_" not in data and data.get("tokenizer") is None:
        path = model.get("path") if isinstance(model, dict) and "_target_" not in model else None
        data["tokenizer"] = path if isinstance(path, str) and path != "???" else "bytes"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

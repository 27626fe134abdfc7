"""A composed config to a checked ``Config``: overrides applied, interpolations resolved, decoded, rules checked."""

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
    launched_alone,
    launched_settings,
)
from forgather_cli.config.compose import plain, references, written
from forgather_cli.config.decode import decode, option_types, to_tree
from forgather_cli.config.mistakes import Naming
from forgather_cli.config.options import BARE_GROUPS, GROUPS, SearchPath, named, shipped
from forgather_cli.config.overrides import Change, apply, full_path, typed_paths
from forgather_cli.config.paths import leaves
from forgather_cli.config.rules import rule_problems
from forgather_cli.config.schema import CorpusSettings, DataSettings, TrainerSettings, services, shipped_groups, typed
from forgather_cli.config.targets import target_problems
from forgather_cli.config.translation import Translation
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from forgather_cli.config.schema import Config

_BEGUN_WITH = {
    "trainer": "single", "precision": "auto", "optimizer": "adamw", "lr_scheduler": "cosine",
}  # fmt: skip
"""Options that a recipe has without choosing them (``conf/train.yaml``)."""
_OF_ADAPTERS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters")
"""Settings that an adapter's own files have too, under the same names."""


@dataclass
class ConfigBuilder:
    """Turns the composed ``cfg`` into a ``Config``: first ``apply_changes``, then ``build``.

    ``options``: each group's option; ``chosen``: the groups chosen on the command line; ``given``: by path, the change
    that set it last, in a recipe or on the command line; ``files``: the recipe's and those of the recipes it starts
    from, innermost first, none for a saved config; ``problems`` collects the mistakes of every stage.
    """

    search: SearchPath
    cfg: DictConfig
    options: dict[str, str]
    recipe: str
    chosen: set[str]
    problems: list[str]
    given: dict[str, Change] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a recipe's settings that are left out were for, what became of the lines of Accelerate's file, and that its
    launcher has started one process alone."""
    read_from: dict[str, Path] = field(default_factory=dict)
    """Path -> Accelerate's file that sets it."""

    def apply_changes(self, changes: Iterable[Change]) -> None:
        """Apply value changes in order; those that cannot be made become problems."""
        changes = list(changes)
        for group in BARE_GROUPS:
            self._drop_replaced_option(group, changes)
        tree = self._raw()
        selected, known = option_types(tree), frozenset(leaves(tree))
        for change in changes:
            path, problem = full_path(change.key, known, selected)
            if problem := problem or apply(change, path, self.cfg):
                self.problems.append(problem)
                continue
            for each in dict.fromkeys([path, *leaves(change.value, path)]):
                self.given.pop(each, None)
                if change.action != "delete":
                    self.given[each] = change if each == path else Change(each, None, text=change.text)

    def _drop_replaced_option(self, group: str, changes: list[Change]) -> None:
        """Remove the settings of an option that a ``group._target_`` replaces."""
        from omegaconf import OmegaConf

        key = f"{group}._target_"
        typed = key in typed_paths(changes)
        if not (typed or key in self.given):
            return
        option = self._raw().get(group)  # OmegaConf takes 10 ms for it
        if not isinstance(option, dict) or "type" not in option:
            return
        if typed and group in self.chosen:
            self.problems.append(f"{key}: takes the place of {group}={self.options[group]}; leave one of them out")
        own = {path.split(".")[1] for path in self.given if path.startswith(f"{group}.")}
        kept = {name: value for name, value in option.items() if name in own}
        OmegaConf.update(self.cfg, group, kept, merge=False, force_add=True)
        self.options.pop(group, None)

    @property
    def weights(self) -> str | None:
        """The setting that gives the model's weights, as it is typed; None for fresh ones."""
        name, path = _directory(self._raw())
        return None if path is None else f"model.{name}={path}"

    @property
    def is_paired(self) -> bool:
        """Sequences have two sides."""
        return DataSettings.of_type(option_types(self._raw()).get("data")).is_paired is True

    def rate_of_scratch(self, of_weights: set[Path]) -> str | None:
        """The learning rate with its optimizer, as they are typed, where a shipped file gives it that is not made for
        training on from weights; None where somebody has chosen it. ``of_weights``: the recipes that choose such a
        model.
        """
        by = self.given.get("learning_rate")
        if by is not None and (
            by.source is None
            or not by.source.is_relative_to(shipped("recipes"))
            or of_weights.intersection(self.files[: self.files.index(by.source) + 1])
        ):
            return None
        tree = self._raw()
        optimizer = self.options.get("optimizer", "a class of yours")
        return f"learning_rate={tree.get('learning_rate')} and optimizer={optimizer}"

    def build(self) -> tuple[Config, dict[str, Any], frozenset[str], tuple[str, ...]]:
        """Resolve, decode and check: the config, its tree for ``config.yaml``, the paths and groups given by users, and
        ``notes``.

        Raises ConfigError with the problems of every stage.
        """
        from omegaconf import OmegaConf

        # before interpolations are resolved, since others may name it
        if OmegaConf.select(self.cfg, "output_dir", throw_on_resolution_failure=False) is None:
            fresh = f"outputs/{self.recipe}/{datetime.now():%Y-%m-%d_%H-%M-%S}"
            OmegaConf.update(self.cfg, "output_dir", fresh, force_add=True)
        # a file that says both parts of the batch means them, and not the whole of a recipe that it starts from
        names = ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
        whole, sequences, steps = (change.source if (change := self.given.get(name)) else None for name in names)
        later = self.files[self.files.index(whole) + 1 :] if whole else []
        if sequences == steps and steps in later:
            was = f"global_batch_size={self.given.pop(names[0]).value} of {named(whole)}"
            self.notes.append(f"{was} is left out: {named(steps)} gives both its parts")
            OmegaConf.update(self.cfg, names[0], None)
        self._read_accelerate()
        raw = self._raw()
        tree, failed = plain(self.cfg)
        self.problems += filter(None, failed.values())
        self._complete(tree)
        self._report(tree)
        # groups whose option does not exist: nothing is reported of their settings
        unknown = {group for group in self.options if any(p.startswith(f"{group}=") for p in self.problems)}
        sources = {path: change.source for path, change in self.given.items() if change.source} | self.read_from
        for group, option in self.options.items():
            file = self.search.option(group, option)
            if file and not file.is_relative_to(shipped("conf")):
                sources |= {path: file for path in leaves(raw.get(group), group) if path not in self.given}
        targets = {group: str(tree[group]["_target_"]) for group in GROUPS if "_target_" in _mapping(tree.get(group))}
        keys = {path: change.key for path, change in self.given.items()}
        texts = {path: change.text for path, change in self.given.items()}
        naming = Naming(self.options, keys, sources, self.search, targets=targets, texts=texts)
        # the layer that set each path: recipes count from 0 for the innermost, the command line comes last
        numbers: dict[Path | None, int] = {file: number for number, file in enumerate(self.files)}
        layers = {path: numbers.get(change.source, len(self.files)) for path, change in self.given.items()}
        layers |= dict.fromkeys(self.chosen, len(self.files))
        name, directory = _directory(tree)  # what data.tokenizer follows from where nobody has set it (``_complete``)
        causes = ("model", f"model.{name}") if directory else ("tokenizer_default", "data.streaming")
        since = max((layer for path, layer in layers.items() if path in causes), default=-1)
        try:
            config = decode(tree, naming=naming, unresolved={*failed, *unknown})
            if not unknown:
                self.problems += rule_problems(config, {"data.tokenizer": since, **layers})
            self.problems += [] if self.problems else target_problems(config)
        except ConfigError as error:
            raise ConfigError(list(dict.fromkeys([*self.problems, *error.problems]))) from error
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))
        return config, written(to_tree(config), references(raw)), frozenset(layers), tuple(self.notes)

    def _complete(self, tree: dict[str, Any]) -> None:
        """Fill in the settings of a resolved tree that follow from others."""
        tree["recipe"] = self.recipe
        tree["callbacks"] = {} if tree.get("callbacks") is None else tree["callbacks"]  # ~callbacks: none
        # data.tokenizer=null: that of the model's directory, whose weights know no other tokens; else a corpus gets the
        # recipe's default
        data = tree.get("data")
        if isinstance(data, dict) and "_target_" not in data and data.get("tokenizer") is None:
            parts = [data, *map(_mapping, _mapping(data.get("sources")).values())]  # those of a mixture
            kinds = [DataSettings.of_type(each.get("type")) for each in parts if not each.get("streaming")]
            default = any(issubclass(kind, CorpusSettings) for kind in kinds) and tree.get("tokenizer_default")
            data["tokenizer"] = _directory(tree)[1] or default or "bytes"
        # what nobody has set of an adapter that is gone on from is as it has it
        adapter = _mapping(tree.get("adapter"))
        file = Path(str(adapter.get("from_adapter"))).expanduser() / "adapter_config.json"
        if "adapter.from_adapter" in self.given and file.is_file():
            said = read_json_object(file, ConfigError)
            found = {"target_modules": []} | {key: value for key, value in said.items() if value is not None}
            given = {path.split(".")[1] for path in self.given if path.startswith("adapter.")}  # an entry of it too
            adapter |= {key: found[key] for key in _OF_ADAPTERS if key in found.keys() & adapter.keys() - given}
        # the first parameter group that matches wins, so the user's come before the shipped ones. A saved config is in
        # that order already: there only groups that the command line adds are moved
        optimizer = _mapping(tree.get("optimizer"))
        groups, shipped = _mapping(optimizer.get("groups")), shipped_groups(optimizer.get("type"))
        added = {p.split(".")[2] for p, c in self.given.items() if p.startswith("optimizer.groups.") and not c.source}
        own = [name for name in groups if name not in shipped and (self.files or name in added)]
        if own:
            tree["optimizer"]["groups"] = {name: groups[name] for name in dict.fromkeys([*own, *groups])}

    def _report(self, tree: dict[str, Any]) -> None:
        """Put the callbacks that ``report_to`` names into a resolved tree, in place of those that reported before.

        They stand for it from there on: ``config.yaml`` and a resume have them alone.
        """
        wanted, callbacks = tree.get("report_to"), tree["callbacks"]
        if not isinstance(wanted, str | list) or not isinstance(callbacks, dict):
            return
        tree["report_to"] = None
        try:
            names = services(wanted)
        except ConfigError as error:
            self.problems += error.problems
            return
        if "callbacks.trackers.names" in self.given:
            self.problems.append(
                f"report_to: callbacks.trackers.names says it too, got {wanted}; leave one of them out"
            )
        tensorboard, trackers = callbacks.pop("tensorboard", None), callbacks.pop("trackers", None)
        if "tensorboard" in names:
            callbacks["tensorboard"] = tensorboard or {}
        if others := [name for name in names if name != "tensorboard"]:
            callbacks["trackers"] = {**_mapping(trackers), "names": others}

    def _read_accelerate(self) -> None:
        """Take over the settings of ``trainer.accelerate_config``, or else of ``accelerate launch``.

        Settings of the command line win, those of shipped recipes give way; one of a user's recipe that differs is a
        problem.
        """
        tree = self._raw()
        kinds, trainer = option_types(tree), tree.get("trainer")
        in_one_process = TrainerSettings.of_type(kinds.get("trainer")).is_one_process
        sharded, own_decoder = kinds.get("trainer") == "fsdp2", kinds.get("model") in ("decoder", "pretrained")
        name = trainer.get("accelerate_config") if sharded and isinstance(trainer, dict) else None
        try:
            if isinstance(name, str) and name != "???":
                source, found = f"accelerate_config={name}", accelerate_settings(Path(name), own_decoder=own_decoder)
            elif name is None and in_one_process and (alone := launched_alone()):
                self.notes.append(alone)
                return
            elif name is None and is_launched():
                source, found = LAUNCHED, launched_settings(sharded=sharded, own_decoder=own_decoder)
            else:
                return
        except ConfigError as error:
            self.problems += error.problems
            return
        outcomes = self._take_over(found, source, Path(name) if isinstance(name, str) else None)
        if notes := found.notes(outcomes):
            self.notes += [f"{source}:", *(f"  {note}" for note in notes)]

    def _take_over(self, found: Translation, source: str, file: Path | None) -> dict[str, str]:
        """Put the settings that a file says into the config; returns, by path, what holds where that is another value.

        ``file``: that trainer.accelerate_config names, which only trainer=fsdp2 has.
        """
        from omegaconf import OmegaConf

        own = [recipe for recipe in self.files if not recipe.is_relative_to(shipped("recipes"))]
        outcomes: dict[str, str] = {}
        accumulation = "gradient_accumulation_steps"
        # groups first, since their other settings follow; accumulation when the global batch is known
        for path in sorted(found.settings, key=lambda path: (path not in GROUPS, path == accumulation)):
            value, by, group = found.settings[path], self.given.get(path), path.partition(".")[0]
            is_group, option = path in GROUPS, self.options.get(group)
            now = option if is_group else OmegaConf.select(self.cfg, path)
            switches = file is not None and path == "trainer"  # to ddp: ZeRO's stage 0
            if is_group and now is None:
                outcomes[path] = f"{path} is a class of yours"
            elif now == value:
                continue
            elif (path in self.chosen and not switches) or (by and by.source is None):
                outcomes[path] = f"{path}={typed(now)}, as the command line says"
            elif not is_group and group in GROUPS and option != found.settings.get(group, option):
                outcomes[path] = f"nothing under {group}={option or 'a class of yours'}"
            elif path == accumulation and (batch := OmegaConf.select(self.cfg, "global_batch_size")):
                outcomes[path] = f"follows from global_batch_size={batch}"
            elif is_group and not switches and own and self._chosen_in(own, path):
                self.problems.append(f"{path}: {source} says {value}, got {now} too; leave one of them out")
            elif is_group:
                self._choose(path, value)
            elif by is not None and by.source in own:
                said = f"{source} says {typed(value)}, got {typed(now)} too"
                self.problems.append(f"{path}: {said}; leave one of them out")
            else:
                OmegaConf.update(self.cfg, path, value, force_add=True)
                self.read_from |= {} if file is None else {path: file}
        return outcomes

    def _chosen_in(self, files: list[Path], group: str) -> bool:
        """Whether recipes have another option of a group than every run begins with, or settings of it."""
        settings = [path for path, change in self.given.items() if change.source in files]
        return self.options[group] != _BEGUN_WITH[group] or any(path.startswith(f"{group}.") for path in settings)

    def _choose(self, group: str, option: str) -> None:
        """Replace a group's option; of its settings those of the command line stay."""
        from omegaconf import OmegaConf

        below = [path for path in self.given if path.startswith(f"{group}.")]
        gone = [path for path in below if self.given[path].source or path == "trainer.accelerate_config"]
        kept = {path: OmegaConf.select(self.cfg, path) for path in below if path not in gone}
        OmegaConf.update(self.cfg, group, {"type": option}, merge=False)
        for path, value in kept.items():
            OmegaConf.update(self.cfg, path, value, force_add=True)
        for path in gone:
            del self.given[path]
        self.options[group] = option

    def _raw(self) -> dict[str, Any]:
        from omegaconf import OmegaConf

        tree: Any = OmegaConf.to_container(self.cfg, resolve=False)
        return {str(key): value for key, value in tree.items()}


def _directory(tree: dict[str, Any]) -> tuple[str, str | None]:
    """The setting of ``model`` that names a directory with its weights, and the directory; None without one."""
    model = _mapping(tree.get("model"))
    name = "path" if model.get("path") else "init_from"
    path = None if "_target_" in model else model.get(name)
    return name, path if isinstance(path, str) and path != "???" else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

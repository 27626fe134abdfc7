"""Command-line overrides: Hydra's grammar, and bare keys (``n_microbatches`` for ``trainer.n_microbatches``).

A key that no setting has is no error here: it is set all the same, and strict decoding (``decode``) reports it together
with all other mistakes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forgather_cli.config.as_typed import as_typed
from forgather_cli.config.options import BARE_GROUPS, GROUPS, SearchPath
from forgather_cli.config.paths import ending_with, entries, leaves, lookup, root_keys, takes_target
from forgather_cli.documents.regular_files import read_yaml
from forgather_cli.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


_READ_BY = {
    "model": "model=pretrained model.path={0}", "adapter": "adapter=lora adapter.from_adapter={0}",
    "data": "data=text 'data.files=[{0}]'; of chats data=instruct 'data.files=[{0}]', of a dataset data.dataset={0}",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One value override: ``key`` as typed, ``source`` the recipe file that has it, None for the command line, where
    ``text`` is the value as typed."""

    key: str
    value: Any
    action: Literal["set", "add", "force", "delete"] = "set"
    source: Path | None = None
    text: str = ""


@dataclass
class Parsed:
    """Overrides by kind: ``groups`` as typed (``model=nano``), ``chosen`` by group the names of its options (none:
    ``~model``), ``changes`` of values."""

    groups: list[str]
    chosen: dict[str, list[Any]]
    changes: list[Change]
    problems: list[str]


def parse_lines(overrides: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Each override as Hydra parses it, and a problem for each that is no override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed, problems = [], []
    for line in overrides:
        try:
            try:
                parsed.append(parser.parse_override(line))
            except HydraException:
                # its grammar has no ~, which no shell expands behind a =, and no second =
                given = re.sub(r"(?<=[=,\[])[^\s,\[\]{}()'\"]*[~=][^\s,\[\]{}()'\"]*", r"'\g<0>'", line)
                # nor most signs of regular expressions, which in a list are texts
                if listed := re.fullmatch(r"([^=]+=)\[([^'\"]*[(^|\[{][^'\"]*)\]", line):
                    texts = re.split(r",\s*(?![^(\[{]*[)\]}])", listed[2])
                    given = f"{listed[1]}['" + "','".join(texts) + "']"
                parsed.append(parser.parse_override(given))
        except HydraException as error:
            reason = str(error).partition("\n")[0].partition(" expecting {")[0] or type(error).__name__
            problems.append(f"{line}: not an override ({reason}); write key=value and quote special characters")
    return parsed, problems


def parse(overrides: Sequence[str], path: SearchPath) -> Parsed:
    """Sort overrides into options to choose and values to change. Options that do not exist become problems."""
    parsed, problems = parse_lines(overrides)
    result = Parsed([], {}, [], problems)
    for item in parsed:
        key, line = item.key_or_group, item.input_line or item.key_or_group
        text = line.partition("=")[2].strip()
        if item.is_hydra_override() or key == "hydra":
            remedy = "leave it out (output_dir=DIR sets the run directory)"
            problems.append(f"{key}: Hydra's own settings have no effect here; {remedy}")
        elif item.is_sweep_override():
            remedy = f"or write a list as {key}=[a,b] and a string as \"{key}='a,b'\""
            problems.append(f"{line}: several values; add -m to run one job for each, {remedy}")
        elif path.is_group(key) and not isinstance(value := item.value(), dict):
            names = [] if item.is_delete() else value if isinstance(value, list) else [value]
            wrong = [problem for name in names if (problem := wrong_option(key, name, path, text))]
            problems += wrong
            result.chosen[key] = names
            result.groups += [] if wrong else [line]
        else:
            kinds = {"delete": item.is_delete(), "add": item.is_add(), "force": item.is_force_add(), "set": True}
            action: Any = next(kind for kind, holds in kinds.items() if holds)
            result.changes.append(Change(key, item.value(), action, text=text))
    return result


def typed_paths(changes: Iterable[Change]) -> dict[str, Change]:
    """By path as typed, what sets it."""
    setting = [change for change in changes if change.action != "delete"]
    return {path: change for change in setting for path in (change.key, *leaves(change.value, change.key))}


def wrong_option(group: str, name: object, path: SearchPath, text: str = "") -> str | None:
    """The problem with choosing ``name``, typed as ``text``, in ``group``; None if it exists."""
    names = path.option_names(group)
    if isinstance(name, str) and (file := path.option(group, name)):
        read_yaml(file, ConfigError)  # Hydra expands aliases without end
        return None
    typed = "null" if name is None else as_typed(name, text)
    if path.option(group, typed):
        return f"""{group}={typed}: is read as {name}; write {group}="'{typed}'\""""
    if group in _READ_BY and ("/" in typed or os.path.exists(typed)):
        return f"{group}={typed}: no such option; a path or a name is given as {_READ_BY[group].format(typed)}"
    nothing = group == "callbacks" and (not name or name in ("none", "no", "off"))
    remedy = " remove it with ~callbacks;" if nothing else did_you_mean(typed, names)
    return f"{group}={typed}: no such option;{remedy} Options: {', '.join(names)}"


def full_path(key: str, cfg_leaves: Iterable[str], selected: dict[str, str]) -> tuple[str, str | None]:
    """The path that a key stands for (itself if no setting ends with it), and the problem if it stands for several.

    ``selected`` maps each group to the type of its option; ``cfg_leaves`` are the leaves of the composed options.
    """
    first = key.split(".")[0]
    if key == "recipe":
        return key, "recipe: is named by the first word of the command, not by a setting; leave it out"
    if first in root_keys() or first in GROUPS:
        is_type = key.partition(".")[2] == "type" and first in GROUPS
        return key, f"{key}: follows from the option; choose one with {first}=..." if is_type else None
    here = {leaf for leaf in cfg_leaves if leaf.split(".")[0] in BARE_GROUPS}
    candidates = ending_with(key, here)
    # of several candidates, those that the selected options have
    fitting = [
        path
        for path in candidates
        if path in here or ((setting := lookup(path)) and selected.get(path.split(".")[0]) in setting.types)
    ]
    if len(fitting := fitting or candidates) > 1:
        return key, f"{key}: stands for {' and '.join(fitting)}; write one of them in full"
    return (fitting[0] if fitting else key), None


def apply(change: Change, path: str, cfg: DictConfig) -> str | None:
    """Make one change in the composed config; the problem if it cannot be made."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if change.action == "delete":
            return _delete(change, path, cfg)
        if path in GROUPS and isinstance(change.value, dict) and "_target_" not in change.value:
            kind = change.value.get("type")  # another option's settings would stay beside it
            if kind is not None and kind != OmegaConf.select(cfg, f"{path}.type"):
                return f"{path}.type: follows from the option; choose it with {path}={kind}, and set {path}.NAME=..."
        present = OmegaConf.select(cfg, path, throw_on_missing=False) is not None
        if change.action == "add" and present and not isinstance(change.value, dict | list):
            return f"+{change.key}: is there already; leave the + out to change it"
        setting = lookup(path)  # in a mapping of free names, a misspelt one would silently become a new entry
        is_free = setting is not None and setting.open and setting.path != path and not takes_target(setting)
        if change.action == "set" and not present and is_free and setting is not None:
            there = list(OmegaConf.select(cfg, setting.path) or {}) if entries(path) else []
            entry = path.removeprefix(f"{setting.path}.").partition(".")[0]
            if entry not in there:  # what stands below an entry of settings is no free name
                near = did_you_mean(entry, there)
                return f"{change.key}: nothing of that name there;{near} write +{change.key}=... to add it"
        OmegaConf.update(cfg, path, change.value, merge=True, force_add=True)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        return f"{change.key}: cannot be set to {change.value!r} ({str(error).splitlines()[0]})"
    return None


def _delete(change: Change, path: str, cfg: DictConfig) -> str | None:
    from omegaconf import DictConfig, OmegaConf, open_dict

    above, _, last = path.rpartition(".")
    parent = OmegaConf.select(cfg, above) if above else cfg
    if not isinstance(parent, DictConfig) or last not in parent:
        return f"~{change.key}: nothing of that name to remove; leave it out"
    if change.value is not None and change.value != parent[last]:
        remedy = f"write ~{change.key} to remove it whatever it is"
        return f"~{change.key}: is {parent[last]!r}, not {change.value!r}; {remedy}"
    with open_dict(cfg):
        del parent[last]
    return None

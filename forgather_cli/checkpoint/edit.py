"""``forgather checkpoint edit``: other optimizer and schedule settings in a saved state, as if the run had been started
with them. Its hashes are made anew, and the checkpoint as it was is kept beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forgather_cli.checkpoint.compare import differences
from forgather_cli.checkpoint.components import shared_file
from forgather_cli.checkpoint.files import remove, sibling, sync_directory, write_file
from forgather_cli.checkpoint.load import Reader
from forgather_cli.checkpoint.manifest import NAME, merge_entries
from forgather_cli.checkpoint.retention import EDITED, record
from forgather_cli.config.schema import Config
from forgather_cli.documents.encoding import Encoded
from forgather_cli.errors import CheckpointError, ConfigError, SetupError
from forgather_cli.optim.groups import assign
from forgather_cli.optim.state import check_group_states, in_schedule, plain
from forgather_cli.run_dir import RunDir, run_of

EDITABLE = ("learning_rate", "weight_decay", "optimizer", "lr_scheduler")
"""The parts of a config that an edit may change."""


@dataclass(frozen=True)
class Edit:
    """What was changed."""

    changes: dict[str, tuple[Any, Any]]
    """Setting -> (before, after)."""
    backup: Path
    """The checkpoint as it was."""


@dataclass(frozen=True)
class _Shaped:
    """Stands for a parameter: which group it belongs to depends on name and shape alone."""

    shape: tuple[int, ...]


def saved_config(reader: Reader) -> dict[str, Any]:
    """The config tree a checkpoint was saved with. Raises CheckpointError for one without."""
    saved = reader.identity().get("config")
    if not saved:
        raise CheckpointError(
            f"{reader.path}: holds no config, as it was saved by a Trainer from Python; give the settings to "
            "TrainingArguments, a resume takes those"
        )
    return dict(saved)


def edit_checkpoint(reader: Reader, config: Config, tree: Mapping[str, Any]) -> Edit:
    """Give a checkpoint the optimizer and schedule settings of ``config``, whose tree is ``tree``.

    They go into the optimizer's groups, into the config that a resume compares with, and into the manifest, from which
    ``forgather resume`` takes them. Raises ConfigError where nothing changes or another optimizer is asked for,
    CheckpointError where a job is at work.
    """
    before = saved_config(reader)
    settings = {key: tree[key] for key in EDITABLE if tree[key] != before.get(key)}
    if not settings:
        raise ConfigError(f"{reader.path}: has these settings already; nothing was changed")
    kinds = [(tree.get("optimizer") or {}).get(key) for tree in (before, tree) for key in ("type", "_target_")]
    if kinds[:2] != kinds[2:]:
        raise ConfigError(
            f"optimizer: {reader.path} holds the moments of another one; an edit changes an optimizer's settings, not "
            "the optimizer"
        )
    run = run_of(reader.path)
    if run is not None:
        _check_idle(run)
    identity = {**reader.identity(), "config": {**before, **settings}}
    states = {"identity": identity}
    if "optimizer" in reader.components():
        states["optimizer"] = _with_settings(reader, config, settings)
    info = record(run, settings, reader.manifest.info.get(EDITED, {}))
    backup = _rewrite(reader, states, info)
    return Edit(differences({key: before.get(key) for key in settings}, settings), backup)


def _with_settings(reader: Reader, config: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state with the settings of ``config`` in its groups."""
    state: dict[str, Any] = reader.state("optimizer")
    with reader.loading(reader.file_of("optimizer"), "optimizer"):
        check_group_states(state)
    groups: dict[str, Any] = state["groups"]
    named = [(name, _Shaped(reader.shape(name))) for group in groups.values() for name in group["parameters"]]
    assigned = assign(
        config.optimizer,
        named,  # type: ignore[arg-type]
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    wanted = {each.name: {name for name, _ in each.parameters} for each in assigned}
    if wanted != {name: set(group["parameters"]) for name, group in groups.items()}:
        raise ConfigError(
            f"optimizer: {reader.path} has the groups {', '.join(groups)}, these settings make {', '.join(wanted)} or "
            "put other parameters into them; an edit changes the groups' settings, not the groups"
        )
    edited = {}
    for each in assigned:
        group = groups[each.name]
        before: dict[str, Any] = group["settings"]
        given = {"initial_lr" if key == "lr" else key: plain(value, key) for key, value in each.settings.items()}
        changed = {key: value for key, value in given.items() if before.get(key) != value}
        lr = float(group["lr"])
        if changed.get("initial_lr") is not None:
            lr = in_schedule(lr, before.get("initial_lr"), changed["initial_lr"])
        overridden = {key: value for key, value in group["changed"].items() if key not in changed}
        edited[each.name] = {**group, "settings": {**before, **changed}, "changed": overridden, "lr": lr}
    return {**state, "groups": edited}


def _rewrite(reader: Reader, states: Mapping[str, Any], info: Mapping[str, Any]) -> Path:
    """Replace the states of components that all ranks share, and add to the manifest's ``info``; the backup's path.

    The checkpoint keeps its name; the one before becomes its sibling ``<name>.backup-<n>``, which shares all unchanged
    files (hard links) and is no checkpoint of the run until it is moved back. A crash at any instant leaves one of the
    two under the name, or to be given it by the next job. States hold no tensors. Raises SetupError.
    """
    path = reader.path
    temporary = sibling(path, "tmp")
    try:
        for source in [path, *sorted(path.rglob("*"))]:
            copy = temporary / source.relative_to(path)
            if source.is_dir():
                copy.mkdir()
                continue
            try:
                os.link(source, copy)
            except OSError:  # not every file system has hard links
                shutil.copy2(source, copy)
        name = f"{shared_file()}.json"
        document = json.loads((temporary / name).read_bytes())
        for key, state in states.items():
            encoded = Encoded()
            encoded.add(key, state)
            assert not encoded.tensors, key
            document["components"][key] = encoded.documents[key]
        for changed in (name, NAME):  # new files instead of the links: the old ones must not change
            (temporary / changed).unlink()
        content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        old, new = reader.manifest, merge_entries([{name: write_file(temporary / name, content)}])
        manifest = replace(old, files={**old.files, **new}, info={**old.info, **info})
        write_file(temporary / NAME, manifest.to_bytes())
        for directory in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
            sync_directory(directory)
        return _swap(temporary, path)
    except OSError as error:
        raise SetupError(f"{path}: cannot be edited ({error.strerror or error}); it is as it was") from error
    finally:
        remove(temporary)


def _swap(temporary: Path, path: Path) -> Path:
    """Give ``temporary`` the name of ``path``, which becomes the backup."""
    aside = sibling(path, "replaced")  # under this name the next job would give it back
    path.rename(aside)
    try:
        temporary.rename(path)
    except OSError:
        aside.rename(path)
        raise
    sync_directory(path.parent)
    number = 1
    while (backup := path.with_name(f"{path.name}.backup-{number}")).exists():
        number += 1
    aside.rename(backup)
    sync_directory(path.parent)
    return backup


def _check_idle(run: RunDir) -> None:
    """Raise CheckpointError if a job is writing the run directory."""
    if not run.lock.exists():
        return
    with run.lock.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"{run.root}: a job is writing it; stop it first with forgather control save_and_stop {run.root}"
            ) from None

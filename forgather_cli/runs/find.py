"""Which directories are runs, which of their settings differ, and short names by which people tell them apart."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path, PurePath
from typing import Any

from forgather_cli.documents.regular_files import read_yaml
from forgather_cli.errors import SetupError
from forgather_cli.run_dir import ABOUT_THE_RUN, RunDir

OUTPUTS = Path("outputs")
"""Where runs go that name no ``output_dir``."""
_DEPTH = 4  # directories below a given one in which runs are looked for
_GROUPS = ("model", "data", "trainer", "optimizer", "lr_scheduler", "loss", "precision")
_MANY = 3  # settings of one group that differ: its option is named instead, if it was named at the start

Settings = dict[str, str]


def find_runs(paths: Sequence[Path]) -> list[RunDir]:
    """The runs that ``paths`` name: themselves, all in a directory that holds runs, or all that a pattern matches.

    Reads directories. Raises SetupError for a path that leads to no run.
    """
    found = []
    for path in paths:
        if not path.exists() and any(letter in str(path) for letter in "*?["):  # a pattern that no shell has replaced
            places = [Path(name) for name in sorted(glob(str(path))) if Path(name).is_dir()]
            missing = "matches no run; give runs, or directories that hold runs"
        elif path.is_dir():
            places = [path]
            missing = "has no metrics.jsonl or config.yaml, nor has a directory in it; give a run's directory"
        else:
            raise SetupError(f"{path}: no such directory; give a run's directory")
        runs = [run for place in places for run in runs_below(place)]
        if not runs:
            raise SetupError(f"{path}: {missing}")
        found += runs
    return found


def runs_below(path: Path, depth: int = _DEPTH) -> Iterator[RunDir]:
    """``path`` if it is a run, else the runs in it by name; directories with a leading dot are left out."""
    run = RunDir(path)
    if run.config.is_file() or run.metrics.is_file():
        logging_dir = settings_of(run).get("logging_dir")  # the loggers may have written elsewhere
        logs = (run.first_directory() or Path()) / str(logging_dir)
        yield replace(run, logging_dir=logs) if logging_dir and logs.is_dir() else run
    elif depth:
        with os.scandir(path) as entries:
            inside = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        for name in inside:
            yield from runs_below(path / name, depth - 1)


def newest_run() -> RunDir:
    """The run below ``OUTPUTS`` that changed last. Raises SetupError where there is none."""
    runs = list(runs_below(OUTPUTS)) if OUTPUTS.is_dir() else []
    if not runs:
        raise SetupError(f"latest: there is no run below {OUTPUTS} here ({Path.cwd()}); give a run's directory")
    return max(runs, key=last_change)


def last_change(run: RunDir) -> float:
    """When a job last wrote something of a run, in seconds since the epoch."""
    files = (run.newest_config(), run.lock, run.exit, run.metrics, run.rank_log(0), run.checkpoints)
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def settings_of(run: RunDir) -> dict[str, Any]:
    """The tree of the newest start's ``config.yaml``; empty where that cannot be read."""
    try:
        tree = read_yaml(run.newest_config())
    except SetupError:
        return {}
    return tree if isinstance(tree, dict) else {}


# ------------------------------------------------------------------------------------------------ settings that differ


def differing(runs: Sequence[RunDir]) -> list[Settings]:
    """For each run the settings that are not the same in all runs that have them, as they are typed.

    What only other options have is left out: ``trainer=pipeline`` says enough. Keys are in one order for all runs.
    """
    trees = []
    for run in runs:
        tree = {key: _text(value) for key, value in _leaves(settings_of(run)) if key not in ABOUT_THE_RUN}
        if tree.get("trainer.type") == "single":
            tree.pop("nproc_per_node", None)  # read by the others only
        trees.append(tree)
    keys = list(dict.fromkeys(key for tree in trees for key in tree))
    kept = [key for key in keys if len({tree[key] for tree in trees if key in tree}) > 1]
    found = [{key: tree[key] for key in kept if key in tree} for tree in trees]
    for group in _GROUPS:
        _name_the_option(group, runs, found)
    return [{_typed(key): value for key, value in each.items()} for each in found]


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _name_the_option(group: str, runs: Sequence[RunDir], found: list[Settings]) -> None:
    """Replace many differing settings of a group by the option's name, where that tells the same runs apart."""
    keys = {key for each in found for key in each if key.startswith(f"{group}.")}
    if len(keys) < _MANY:
        return
    words = [run.typed() for run in runs]
    of_option: dict[str, Settings] = {}
    for word, each in zip(words, found, strict=True):
        own = {key: value for key, value in each.items() if key in keys}
        if group not in word or of_option.setdefault(word[group], own) != own:
            return
    for word, each in zip(words, found, strict=True):
        for key in keys & each.keys():
            del each[key]
        each[f"{group}.type"] = word[group]


def _typed(key: str) -> str:
    """A path as on the command line: ``trainer`` for its type, the last part alone where that is enough."""
    group, _, rest = key.partition(".")
    if group not in _GROUPS or not rest:
        return key
    return group if rest == "type" else rest


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value)


def labels(runs: Sequence[RunDir]) -> list[str]:
    """A name for each run, different ones: all settings that differ, and where those are alike its directory."""
    if len(runs) == 1:
        return [_directory_names(runs)[0]]
    names = [", ".join(f"{key}={value}" for key, value in each.items()) for each in differing(runs)]
    many, places = Counter(names), _directory_names(runs)
    return [
        name if name and many[name] == 1 else f"{name} ({place})" if name else place
        for name, place in zip(names, places, strict=True)
    ]


def _directory_names(runs: Sequence[RunDir]) -> list[str]:
    """The last parts of the runs' paths, as many as tell them apart."""
    parts = [PurePath(run.root.resolve()).parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(run.root) for run in runs]

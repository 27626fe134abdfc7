"""Which directories are runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

from forgather_cli.errors import SetupError
from forgather_cli.input_files import read_yaml
from forgather_cli.run_dir import RunDir

_DEPTH = 4  # directories below a given one in which runs are looked for


def find_runs(paths: Sequence[Path]) -> list[RunDir]:
    """The runs that ``paths`` name: themselves, all in a directory that holds runs, or all that a pattern matches.

    Reads directories. Raises SetupError for a path that leads to no run.
    """
    return [run for path in paths for run in _runs_at(path)]


def _runs_at(path: Path) -> list[RunDir]:
    if not path.exists() and any(letter in str(path) for letter in "*?["):  # a pattern that no shell has replaced
        places = [Path(name) for name in sorted(glob(str(path))) if Path(name).is_dir()]
        runs = [place for each in places for place in _below(each)]
        missing = "matches no run; give runs, or directories that hold runs"
    elif path.is_dir():
        runs = list(_below(path))
        missing = "has no metrics.jsonl or config.yaml, nor has a directory in it; give a run's directory"
    else:
        raise SetupError(f"{path}: no such directory; give a run's directory")
    if not runs:
        raise SetupError(f"{path}: {missing}")
    return [opened(run) for run in runs]


def _below(path: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """``path`` if it is a run, else the runs in it by name; directories with a leading dot are left out."""
    run = RunDir(path)
    if run.config.is_file() or run.metrics.is_file():
        yield path
    elif depth:
        with os.scandir(path) as entries:
            inside = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        for name in inside:
            yield from _below(path / name, depth - 1)


def opened(path: Path) -> RunDir:
    """A run with its ``logging_dir``, where its loggers have written elsewhere."""
    run = RunDir(path)
    elsewhere = settings_of(run).get("logging_dir")
    logs = (run.first_directory() or Path()) / str(elsewhere)
    return replace(run, logging_dir=logs) if elsewhere and logs.is_dir() else run


def settings_of(run: RunDir) -> dict[str, Any]:
    """The tree of the newest start's ``config.yaml``; empty where that cannot be read."""
    return _tree(run.newest_config())


def origin_of(run: RunDir) -> dict[str, Any]:
    """What ``origin.yaml`` tells; empty where that cannot be read."""
    return _tree(run.origin)


def _tree(path: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(path)
    except SetupError:
        return {}
    return tree if isinstance(tree, dict) else {}

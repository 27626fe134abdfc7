"""Which settings of several runs differ, and short names by which people tell the runs apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from forgather_cli.run_dir import RunDir
from forgather_cli.runs.find import origin_of, settings_of

_ABOUT_THE_RUN = {
    "output_dir", "logging_dir", "job_id", "overwrite_output_dir", "resume_from_checkpoint", "resume_components",
    "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "max_restarts", "hang_timeout",
    "hang_report_after",
}  # fmt: skip
"""Settings that say where and how a run was started, and not what was trained."""
_GROUPS = ("model", "data", "trainer", "optimizer", "lr_scheduler", "loss", "precision")
_MANY = 3  # settings of one group that differ: its option is named instead, if it was named at the start

Settings = dict[str, str]


def differing(runs: Sequence[RunDir]) -> list[Settings]:
    """For each run the settings that are not the same in all runs that have them, as they are typed.

    What only other options have is left out: ``trainer=pipeline`` says enough. Keys are in one order for all runs.
    """
    trees = [_settings(run) for run in runs]
    keys = list(dict.fromkeys(key for tree in trees for key in tree))
    kept = [key for key in keys if len({tree[key] for tree in trees if key in tree}) > 1]
    found = [{key: tree[key] for key in kept if key in tree} for tree in trees]
    for group in _GROUPS:
        _name_the_option(group, runs, found)
    return [{_typed(key): value for key, value in each.items()} for each in found]


def _settings(run: RunDir) -> Settings:
    tree = settings_of(run)
    flat = {key: _text(value) for key, value in _leaves(tree) if key not in _ABOUT_THE_RUN}
    if flat.get("trainer.type") == "single":
        flat.pop("nproc_per_node", None)  # read by the others only
    return flat


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _name_the_option(group: str, runs: Sequence[RunDir], found: list[Settings]) -> None:
    """Replace many differing settings of a group by the option's name, where every start has named one."""
    keys = {key for each in found for key in each if key.startswith(f"{group}.")}
    if len(keys) < _MANY:
        return
    words = [dict(word.partition("=")[::2] for word in origin_of(run).get("overrides") or []) for run in runs]
    if not all(group in word for word in words):
        return
    for word, each in zip(words, found, strict=True):
        for key in keys & each.keys():
            del each[key]
        each[f"{group}.type"] = str(word[group])


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
    """A short name for each run, different ones: the fewest settings that tell them apart, else their directories."""
    if len(runs) == 1:
        return [directory_names(runs)[0]]
    found = differing(runs)
    keys = _telling(found)
    names = [", ".join(f"{key}={each[key]}" for key in keys if key in each) for each in found]
    places = directory_names(runs)
    many = Counter(names)
    alike = [name for name in names if many[name] > 1 or not name]
    return [
        name if name not in alike else f"{name} ({place})" if name else place
        for name, place in zip(names, places, strict=True)
    ]


def _telling(found: Sequence[Settings]) -> list[str]:
    """Settings that, one after another, tell most runs apart, until no other one helps."""
    keys = list(dict.fromkeys(key for each in found for key in each))
    chosen: list[str] = []
    while rest := [key for key in keys if key not in chosen]:
        best = max(rest, key=lambda key: _kinds(found, [*chosen, key]))
        if _kinds(found, [*chosen, best]) == _kinds(found, chosen):
            break
        chosen.append(best)
    return [key for key in keys if key in chosen]


def _kinds(found: Sequence[Settings], keys: Sequence[str]) -> int:
    return len({tuple(each.get(key) for key in keys) for each in found})


def directory_names(runs: Sequence[RunDir]) -> list[str]:
    """The last parts of the runs' paths, as many as tell them apart."""
    parts = [PurePath(run.root.resolve()).parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(run.root) for run in runs]

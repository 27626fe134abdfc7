"""What may differ between a checkpoint's settings and those of the run that resumes from it."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from forgather_cli.documents.regular_files import read_json_object, read_state, write_whole
from forgather_cli.errors import SetupError
from forgather_cli.run_dir import RunDir

# worth a line in the log; all else is free to change
_LOGGED = (
    "learning_rate", "weight_decay", "max_grad_norm", "lr_scheduler", "optimizer", "seed", "global_batch_size", "loss",
    "precision", "model.path", "model.attn_implementation",
)  # fmt: skip
_MAY_MOVE = (
    "adapter.lora_dropout", "adapter.init_lora_weights", "model.path", "model.attn_implementation", "data.cache_dir",
    "data.dispatch_batches", "data.dispatch_eval_batches", "data.tokenize_processes",
)  # fmt: skip
"""Paths of things that are compared by their content, or by names and shapes; who reads the samples, not which."""
_OF_SHARES = re.compile(r"data\.(weight_schedule|sources\.[^.]+\.(weight|max_epochs|max_samples|on_exhausted))")
"""Paths of what a mixture changes on the way."""

_FEW = 5  # files that are named

Differences = dict[str, tuple[Any, Any]]


def compare_configs(
    saved: dict[str, Any], now: dict[str, Any], wanted: set[str], changed_files: str = ""
) -> tuple[list[str], list[str]]:
    """(what forbids to resume, what is worth a line in the log), one sentence per setting.

    ``saved`` and ``now`` hold the resolved config tree (``config``) and the description of the data (``data``, of which
    the ``fingerprint`` counts). Model shape and data are refused unless that component is left out of ``wanted``.
    ``changed_files``: what has become of the data's files, where that is known.
    """
    changed = differences(saved.get("config") or {}, now.get("config") or {})
    data, data_now = saved.get("data") or {}, now.get("data") or {}
    content, name = differences(data, data_now).get("fingerprint"), "data"
    if content and content[0] == data_now.get("formerly"):  # the same samples by rules that have changed since
        content = None
    if "fingerprints" in data and "fingerprints" in data_now:  # of sources, which may come and go
        found = differences(data["fingerprints"], data_now["fingerprints"])
        name, content = next(((f"data.sources.{each}", pair) for each, pair in found.items()), (name, None))
    refused: list[str] = []
    if "model" in wanted:
        refused += _refusals(changed, "model", "leave model and optimizer out of resume_components")
        refused += _refusals(changed, "adapter", "start another run")
        before, after = saved.get("base") or {}, now.get("base") or {}
        if before and after and before.get("sha256") != after["sha256"]:
            refused.append(
                f"model.path: the adapter is for the model that {before.get('path')} held (sha256 "
                f"{before.get('sha256')!s:.12}), and {after['path']} holds another (sha256 {after['sha256']:.12}); "
                "bring that one back"
            )
    if "data" in wanted and content:
        others = "other files, another tokenizer, another Python's standard library, or another seed of synthetic data"
        remedy = "bring them back"
        if data.get("rules") != data_now.get("rules") and not changed_files:
            others = "the data are read by other rules than when it was saved (docs/data.md)"
            remedy = "resume with the version of Forgather that saved it"
        refused += _refusals(changed, "data", "leave data out of resume_components") or [
            f"{name}: the samples are not those of the checkpoint (fingerprint {content[0][:8]} there, "
            f"{content[1][:8]} here): {changed_files or others}; {remedy}, or leave data out of resume_components"
        ]
    elif "model" in wanted:
        refused += _other_tokens(data, data_now, changed)
    logged = [
        f"{_typed(path)}: {before!r} in the checkpoint, {after!r} from here on"
        for path, (before, after) in changed.items()
        if _is_below(path, _LOGGED)
    ]
    return refused, logged


def _other_tokens(data: dict[str, Any], data_now: dict[str, Any], changed: Differences) -> list[str]:
    """Why a model that has learned the tokens of one BPE does not go on: of data and settings there and here."""
    names = data.get("tokenizer"), data_now.get("tokenizer")
    if names == ("bpe", "bpe"):  # that of the checkpoint, whatever is asked for
        return _refusals(changed, "data.bpe_vocab_size", "leave model and optimizer out of resume_components")
    before, after = data.get("vocabulary"), data_now.get("vocabulary")  # fingerprints; of 0.3.0 on
    if "bpe" not in names or not before or before == after:
        return []
    return [
        f"data.tokenizer: {names[1]} makes other tokens than those that the model has learned; set tokenizer=bpe, "
        "which is the checkpoint's own where a run resumes, or leave model and optimizer out of resume_components"
    ]


def record_files(run: RunDir, fingerprint: str, files: Mapping[str, str]) -> None:
    """Keep in the run which files its data are, once; what other starts have read stays. Raises OSError."""
    known = read_state(run.data_files, "it is written again") or {}
    if files and fingerprint not in known:
        write_whole(run.data_files, json.dumps({**known, fingerprint: dict(files)}))


def changed_files(run: RunDir, fingerprint: str, files: Mapping[str, str], saved: str) -> str:
    """What has become of the files that the data with ``fingerprint`` were, in words; empty where it is not known.

    Of a run that has kept none, those changed since ``saved``, the time of a checkpoint (ISO 8601).
    """
    try:
        before = read_json_object(run.data_files, limit=None).get(fingerprint)
    except SetupError:
        before = None
    if not isinstance(before, dict) or not all(
        isinstance(each, str) and each for each in (*before.values(), *files.values())
    ):
        try:
            since = datetime.fromisoformat(saved).timestamp()
            newer = [path for path in files if os.stat(path).st_mtime > since]
        except (OSError, ValueError):
            newer = []
        return _listed(newer, "changed since the checkpoint was saved")
    # by content: a file that was only moved is the same
    gone, new = Counter(before.values()), Counter(files.values())
    other = [path for path, each in files.items() if each not in gone]
    missing = [path for path, each in before.items() if each not in new]
    kinds = {
        "changed": [path for path in other if path in before],
        "new": [path for path in other if path not in before],
        "gone": [path for path in missing if path not in files],
    }
    told = [_listed(paths, kind) for kind, paths in kinds.items() if paths]
    if not told and gone != new:
        told = ["a file is there more often or less often than before"]
    if not told and list(before.values()) != list(files.values()):
        told = ["the files are the same, in another order"]
    return ", ".join(told)


def _listed(paths: Sequence[str], kind: str) -> str:
    """``a.txt and b.txt (changed)``, with as many as one reads."""
    more = [f"{len(paths) - _FEW} more"] if len(paths) > _FEW else []
    return f"{' and '.join([*paths[:_FEW], *more])} ({kind})" if paths else ""


def _refusals(changed: Differences, group: str, remedy: str) -> list[str]:
    return [
        f"{_typed(path)}: the checkpoint has {before!r}, this run {after!r}; change it back, or {remedy}"
        for path, (before, after) in changed.items()
        if _is_below(path, (group,))
        and path not in _MAY_MOVE
        and not _OF_SHARES.fullmatch(path)
        # of a script's object only the name is known, which may change; weights are compared by names and shapes
        and not (isinstance(before, str) and before.startswith("<"))
    ]


def _is_below(path: str, groups: tuple[str, ...]) -> bool:
    return any(path == group or path.startswith(group + ".") for group in groups)


def _typed(path: str) -> str:
    """A setting as it is typed; of an option's type the group."""
    return path.removesuffix(".type")


def differences(before: dict[str, Any], after: dict[str, Any]) -> Differences:
    """Path -> (value before, value after), of the settings that both have."""
    old, new = _flatten(before), _flatten(after)
    return {path: (old[path], new[path]) for path in sorted(old.keys() & new.keys()) if old[path] != new[path]}


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat

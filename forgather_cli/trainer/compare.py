"""What may differ between a checkpoint's settings and those of the run that resumes from it."""

from __future__ import annotations

from typing import Any

# worth a line in the log; all else is free to change
_LOGGED = (
    "learning_rate", "weight_decay", "max_grad_norm", "lr_scheduler", "optimizer", "seed", "global_batch_size", "loss",
    "precision",
)  # fmt: skip


def compare_configs(saved: dict[str, Any], now: dict[str, Any], wanted: set[str]) -> tuple[list[str], list[str]]:
    """(what forbids to resume, what is worth a line in the log), one sentence per setting.

    ``saved`` and ``now`` hold the resolved config tree (``config``) and the description of the data (``data``: its
    fingerprint and the tokenizer's). Model shape and data are refused unless that component is left out of ``wanted``.
    """
    refused: list[str] = []
    logged: list[str] = []
    old, new = _flatten(saved), _flatten(now)
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path), new.get(path)
        if before == after or path not in old or path not in new:
            continue
        component = _component(path)
        name = path.removeprefix("config.")
        if component and component in wanted:
            refused.append(
                f"{name}: the checkpoint has {before!r}, this run {after!r}; change it back, or leave {component} "
                "out of resume_components"
            )
        elif any(name == p or name.startswith(p + ".") for p in _LOGGED):
            logged.append(f"{name}: {before!r} in the checkpoint, {after!r} from here on")
    return refused, logged


def _component(path: str) -> str | None:
    if path.startswith("config.model."):
        return "model"
    if path in ("data.fingerprint", "data.tokenizer"):
        return "data"
    if path in ("config.data.seq_len", "config.data.packing", "config.data.isolate_documents", "config.data.tokenizer"):
        return "data"
    return None


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat

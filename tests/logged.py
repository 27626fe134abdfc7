"""Directories of runs that have logged, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def make_run(root: Path, losses: list[float], overrides: tuple[str, ...] = (), **settings: Any) -> Path:
    """A run's files as training leaves them, a record every 10 seconds; dotted settings are ``group__name``."""
    tree: dict[str, Any] = {"output_dir": str(root), "recipe": "default", "max_steps": 100, "seed": 42}
    for key, value in settings.items():
        group, _, name = key.partition("__")
        if name:
            tree.setdefault(group, {})[name] = value
        else:
            tree[key] = value
    root.mkdir(parents=True)
    (root / "config.yaml").write_text(yaml.safe_dump(tree))
    (root / "origin.yaml").write_text(yaml.safe_dump({"recipe": "default", "overrides": list(overrides)}))
    records = [
        {"time": f"2026-01-01T00:{n // 6:02}:{n % 6}0.000+00:00", "step": 10 * (n + 1), "loss": loss,
         "eval_loss": loss + 1, "eval_bits_per_byte": 5 - loss, "total_tokens": 1000 * (n + 1)}
        for n, loss in enumerate(losses)
    ]  # fmt: skip
    if losses:
        write_records(root, records)
    return root


def write_records(root: Path, records: list[dict[str, Any]]) -> None:
    (root / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

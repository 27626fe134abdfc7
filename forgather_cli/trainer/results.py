"""A script's metrics on the terminal and in files, as Hugging Face's ``log_metrics`` and ``save_metrics`` have them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any


def show(split: str, metrics: dict[str, Any]) -> None:
    """Print a table of the metrics, sorted by name (transformers 5.23, ``trainer_pt_utils.py: log_metrics``)."""
    told = {name: _told(name, value) for name, value in sorted(metrics.items())}
    width, places = max(map(len, told), default=0), max(map(len, told.values()), default=0)
    print(f"***** {split} metrics *****")
    for name, value in told.items():
        print(f"  {name:<{width}} = {value:>{places}}")


def _told(name: str, value: Any) -> str:
    if "_runtime" in name:
        return str(datetime.timedelta(seconds=round(value)))
    return str(round(value, 4) if isinstance(value, float) else value)


def save(root: Path, split: str, metrics: dict[str, Any], *, combined: bool) -> None:
    """Write ``<split>_results.json``, and with ``combined`` what ``all_results.json`` has not yet or no more."""
    write(root / f"{split}_results.json", metrics)
    if combined:
        path = root / "all_results.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write(path, before | metrics)


def write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=4, sort_keys=True, default=str) + "\n", encoding="utf-8")

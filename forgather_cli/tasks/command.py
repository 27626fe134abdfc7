"""``forgather eval --tasks``: what is asked, and what is shown of the answer. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forgather_cli.cli.output import Col, print_table, writable
from forgather_cli.errors import ConfigError, ModelError, SetupError


def request(
    source: Path, names: str | None, tasks_dir: Path | None, samples: Path | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The ``tasks`` of ``source.evaluate_source``. Raises ConfigError and SetupError."""
    if not names:
        raise ConfigError("--tasks: names no task, and options of tasks need some; give some, --tasks arc_easy")
    if find_spec("lm_eval") is None:
        raise SetupError("--tasks: needs the package lm_eval; pip install 'forgather[tasks]'")
    if source.suffix == ".gguf":
        raise ModelError(f"{source}: tasks are run on what torch loads; give the run or directory that it was made of")
    if tasks_dir is not None and not tasks_dir.is_dir():
        raise ConfigError(f"--tasks-dir: no such directory: {tasks_dir}; give one with YAML files of tasks")
    if samples is not None:
        writable(samples, "--samples")
    paths = {"tasks_dir": tasks_dir and str(tasks_dir.absolute()), "samples": samples and str(samples.absolute())}
    return {"names": [name.strip() for name in names.split(",") if name.strip()], **settings, **paths}


def show(report: dict[str, Any]) -> None:
    """Print a row for each metric."""
    rows = []
    for key, value in report["metrics"].items():
        _, task, metric = key.split("/", 2)
        name, _, kind = metric.partition("/")
        if not name.endswith("_stderr"):
            error = report["metrics"].get(f"tasks/{task}/{name}_stderr" + (f"/{kind}" if kind else ""))
            shown = [f"{value:.4f}", "" if error is None else f"± {error:.4f}"]
            rows.append([task, metric, *shown, *(str(report[key].get(task, "")) for key in ("fewshot", "samples"))])
    right = [Col(title, right=True) for title in ("value", "stderr", "shots", "samples")]
    print_table([Col("task"), Col("metric"), *right], rows)

"""A run's metrics in a few numbers, read from its directory without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from forgather_cli.errors import SetupError
from forgather_cli.launch.outcome import DONE, STOPPED, read_outcome
from forgather_cli.run_dir import RunDir

Record = dict[str, Any]
_PAUSE = 600.0  # seconds between two records that count as the run standing still, when it says nothing itself


@dataclass(frozen=True)
class Summary:
    """Losses in nats per token, time in seconds; None where the run has not measured it."""

    run: str
    state: str
    """done, stopped (with a checkpoint), ended (by a second signal), failed, or unfinished: running or killed."""
    reason: str
    step: int
    max_steps: int | None
    first_loss: float | None
    last_loss: float | None
    best_loss: float | None
    first_eval_loss: float | None
    last_eval_loss: float | None
    best_eval_loss: float | None
    best_eval_step: int | None
    num_evaluations: int
    tokens: int | None
    tokens_per_second: float | None
    """Median over the log records."""
    seconds: float | None


def summarize(run: RunDir) -> Summary:
    """Read a run's metrics. Raises SetupError if there are none."""
    if not run.root.is_dir():
        raise SetupError(f"{run.root}: no such directory; give a run's directory")
    if not run.metrics.exists():
        raise SetupError(f"{run.root}: has no {run.metrics.name}; nothing was logged there (callbacks.json writes it)")
    records = [record for record in read_records(run.metrics) if not record.get("abandoned")]
    ended = read_outcome(run)
    return Summary(
        run=str(run.root),
        state=_state(ended.code) if ended else "unfinished",
        reason=ended.reason if ended else "",
        step=max((int(record.get("step", 0)) for record in records), default=0),
        max_steps=_max_steps(run),
        **_losses(records),
        tokens=_last(records, "total_tokens"),
        tokens_per_second=_median([float(r["tok_per_sec"]) for r in records if _is_number(r.get("tok_per_sec"))]),
        seconds=_seconds(records),
    )


def _state(code: int) -> str:
    return {DONE: "done", STOPPED: "stopped"}.get(code, "ended" if code > 128 else "failed")


def read_records(path: Path) -> Iterator[Record]:
    """The records of a metrics file; a torn last line is left out, any other broken one is a SetupError."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise SetupError(f"{path}:{number}: not a record of metrics: {error}") from error
        if isinstance(record, dict):
            yield record


def _losses(records: list[Record]) -> dict[str, Any]:
    train = [float(r["loss"]) for r in records if _is_number(r.get("loss"))]
    evals = [(float(r["eval_loss"]), int(r.get("step", 0))) for r in records if _is_number(r.get("eval_loss"))]
    return {
        "first_loss": train[0] if train else None,
        "last_loss": train[-1] if train else None,
        "best_loss": min(train, default=None),
        "first_eval_loss": evals[0][0] if evals else None,
        "last_eval_loss": evals[-1][0] if evals else None,
        "best_eval_loss": min(evals)[0] if evals else None,
        "best_eval_step": min(evals)[1] if evals else None,
        "num_evaluations": len(evals),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _last(records: list[Record], key: str) -> Any:
    return next((record[key] for record in reversed(records) if key in record), None)


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _seconds(records: list[Record]) -> float | None:
    """Time from the first record to the last, without the pauses between a stop and a resume; or what the run says."""
    told = _last(records, "train_runtime")
    if told is not None:
        return float(told)
    times = [datetime.fromisoformat(str(r["time"])).timestamp() for r in records if "time" in r]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return sum(gap for gap in gaps if gap < _PAUSE) if gaps else None


def _max_steps(run: RunDir) -> int | None:
    """``max_steps`` of the newest start, None if the run counts epochs or its config cannot be read."""
    import yaml

    try:
        steps = yaml.safe_load(run.newest_config().read_text(encoding="utf-8"))["max_steps"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None
    return int(steps) if isinstance(steps, int) and steps > 0 else None

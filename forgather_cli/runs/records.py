"""Records of a run's logs (``metrics.jsonl`` and those of the norm loggers), and the axes they are seen along."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import read_bytes
from forgather_cli.errors import ConfigError, SetupError, did_you_mean
from forgather_cli.run_dir import RunDir

Record = dict[str, Any]
Axis = Literal["step", "tokens", "time"]

_PAUSE = 60.0  # seconds between two records below which a run never counts as standing still


def read_records(path: Path) -> Iterator[Record]:
    """The records of a log; a torn last line is left out, any other broken one is a SetupError."""
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except OSError as error:
        raise SetupError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise SetupError(f"{path}:{number}: not a record of metrics: {error}") from error
        if isinstance(record, dict):
            yield record


def records_of(run: RunDir) -> list[Record]:
    """What a run has logged, without what a rollback took back. Raises SetupError if it has logged nothing."""
    if not run.root.is_dir():
        raise SetupError(f"{run.root}: no such directory; give a run's directory")
    if not run.metrics.exists():
        if (note := run.note_set_aside()) is not None:
            raise SetupError(note)
        raise SetupError(f"{run.root}: has no {run.metrics.name}; nothing was logged there (callbacks.json writes it)")
    return [record for record in read_records(run.metrics) if not record.get("abandoned")]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def metric_names(records: Sequence[Record]) -> list[str]:
    """Names of all metrics that the records have numbers of, in the order of their first appearance."""
    known = {key: None for record in records for key, value in record.items() if is_number(value)}
    return [name for name in known if name not in ("step", "epoch")]


def check_logged(wanted: Iterable[str], names: Sequence[str], where: str) -> None:
    """Raise ConfigError for each of the ``wanted`` that is not among the ``names`` of metrics."""
    problems = []
    for each in wanted:
        if each not in names:
            near = did_you_mean(each, names)
            logged = f"{'Logged' if near else 'logged'}: {', '.join(names)}"
            problems.append(f"{where}: nothing was logged as {each!r};{near} {logged}")
    if problems:
        raise ConfigError(problems)


def positions(records: Sequence[Record], axis: str) -> list[float]:
    """Where each record stands on an ``Axis``: its step, the tokens trained on, or seconds of running time."""
    if axis == "step":
        return [float(record.get("step", 0)) for record in records]
    if axis == "time":
        return _running_seconds(records)
    known = sorted({(int(r["step"]), float(r["total_tokens"])) for r in records if is_number(r.get("total_tokens"))})
    places = []
    for record in records:
        if is_number(record.get("total_tokens")):
            places.append(float(record["total_tokens"]))
            continue
        # such as an evaluation: it stands between those of the steps around it
        step = int(record.get("step", 0))
        before = max((pair for pair in known if pair[0] <= step), default=(0, 0.0))
        after = min((pair for pair in known if pair[0] >= step), default=before)
        share = (step - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        places.append(before[1] + share * (after[1] - before[1]))
    return places


def _running_seconds(records: Sequence[Record]) -> list[float]:
    """Seconds since the first record; the time between a stop and a resume is left out.

    A run stood still between two records if ten times as long passed as usual, and more than a minute, not counting
    an evaluation in between.
    """
    times = [datetime.fromisoformat(str(r["time"])).timestamp() if "time" in r else None for r in records]
    known = [time for time in times if time is not None]
    gaps = sorted(later - earlier for earlier, later in pairwise(known))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    seconds, now, last = [], 0.0, known[0] if known else 0.0
    for time, record in zip(times, records, strict=True):
        gap = 0.0 if time is None else time - last
        evaluating = float(record.get("eval_runtime") or 0.0)
        now += usual if gap - evaluating > max(10 * usual, _PAUSE) else max(gap, 0.0)
        last = last if time is None else time
        seconds.append(now)
    return seconds


def running_time(records: Sequence[Record]) -> float | None:
    """Seconds from the first record to the last without pauses; None if the records have no time."""
    return _running_seconds(records)[-1] if any("time" in record for record in records) else None

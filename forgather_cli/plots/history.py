"""What is drawn of a run: its metrics as curves, with the stretches that it has gone back from."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from forgather_cli.errors import SetupError
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.differences import labels
from forgather_cli.runs.records import Axis, Record, is_number, metric_names, positions, read_records


@dataclass(frozen=True)
class History:
    """A run as it is drawn."""

    name: str
    records: list[Record]
    x: list[float]
    """Where each record stands on the x axis."""
    resumed: list[float]
    """Where the run was gone on with."""


def histories(runs: Sequence[RunDir], axis: Axis) -> list[History]:
    """Read the runs' metrics. Raises SetupError for one without."""
    return [_history(run, name, axis) for run, name in zip(runs, labels(runs), strict=True)]


def _history(run: RunDir, name: str, axis: Axis) -> History:
    if not run.metrics.is_file():
        raise SetupError(f"{run.root}: has no {run.metrics.name}; nothing was logged there (callbacks.json writes it)")
    records = list(read_records(run.metrics))
    if not metric_names(records):
        raise SetupError(f"{run.metrics}: holds no metrics yet; wait for the first log, or leave the run out")
    x = positions(records, axis)
    return History(name, records, x, _resumed(run, records, x))


def _resumed(run: RunDir, records: list[Record], x: list[float]) -> list[float]:
    """Where later starts fall between two records, by the time of their config files."""
    known = [(datetime.fromisoformat(str(r["time"])).timestamp(), at) for r, at in zip(records, x, strict=True)
             if "time" in r]  # fmt: skip
    starts = [run.later_config(n).stat().st_mtime for n in run.later_starts()]
    before = [bisect_right([time for time, _ in known], start) for start in starts]
    return sorted({known[n - 1][1] for n in before if 0 < n < len(known)})


@dataclass(frozen=True)
class Curve:
    """One metric of one run; not a number where the run has logged none, so that the line has a gap."""

    x: list[float]
    y: list[float]
    abandoned: list[list[tuple[float, float]]]
    """Stretches that were rolled back."""

    def divided(self, size: float) -> Curve:
        back = [[(x, y / size) for x, y in stretch] for stretch in self.abandoned]
        return Curve(self.x, [y / size for y in self.y], back)


def curve_of(run: History, name: str) -> Curve:
    live = [(x, r) for x, r in zip(run.x, run.records, strict=True) if name in r and not r.get("abandoned")]
    return Curve(
        [x for x, _ in live],
        [float(r[name]) if is_number(r[name]) else math.nan for _, r in live],
        _stretches(run, name),
    )


def _stretches(run: History, name: str) -> list[list[tuple[float, float]]]:
    """Abandoned values, a list for each time that the run went back."""
    found: list[list[tuple[float, float]]] = []
    open_ = False
    for x, record in zip(run.x, run.records, strict=True):
        if not record.get("abandoned"):
            open_ = False
        elif is_number(record.get(name)):
            if not open_ or x < found[-1][-1][0]:
                found.append([])
            found[-1].append((x, float(record[name])))
            open_ = True
    return found


def together(curves: Sequence[Curve]) -> list[int | None]:
    """For each curve that lies on others its place among them, from 0; None for one that can be seen by itself."""
    places: list[int | None] = []
    for n, curve in enumerate(curves):
        below = [m for m in range(n) if _same(curve, curves[m])]
        for m in below[:1]:
            places[m] = places[m] or 0
        places.append(1 + max(places[m] or 0 for m in below) if below else None)
    return places


def _same(a: Curve, b: Curve) -> bool:
    """True if two curves cannot be told apart: within 1 % of their range at all places that both have."""
    of_b = dict(zip(b.x, b.y, strict=True))
    pairs = [(y, of_b[x]) for x, y in zip(a.x, a.y, strict=True) if x in of_b]
    values = [y for pair in pairs for y in pair if math.isfinite(y)]
    span = max(values, default=0.0) - min(values, default=0.0)
    return len(pairs) > 1 and all(abs(y - z) <= 0.01 * span for y, z in pairs)

"""A run's metrics in a few numbers, read from its directory without torch."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from forgather_cli.documents.regular_files import read_text
from forgather_cli.errors import ConfigError, SetupError, did_you_mean
from forgather_cli.launch.exit_status import newest_step, read_exit_record
from forgather_cli.launch.processes import is_running
from forgather_cli.run_dir import RunDir, resume_command
from forgather_cli.runs.find import differing, settings_of
from forgather_cli.runs.records import Record, is_number, read_records, records_of, running_time
from forgather_cli.runs.slow import times_of

_HOLDER = re.compile(r"pid (\d+) on (\S+)")  # as ``launch.run_lock`` writes it


@dataclass(frozen=True)
class Summary:
    """Losses in nats per token, time in seconds; None where the run has not measured it."""

    run: str
    state: str
    """One of ``launch.exit_status.State``, or running."""
    reason: str
    step: int
    max_steps: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    best_loss: float | None = None
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_eval_step: int | None = None
    best_eval_bits_per_byte: float | None = None
    """The lowest of its evaluations, to compare runs with other tokenizers by."""
    num_evaluations: int = 0
    tokens: int | None = None
    tokens_per_second: float | None = None
    """Median over the log records."""
    seconds: float | None = None
    """From the first record to the last, without the pauses between a stop and a resume."""
    times: dict[str, float] = field(default_factory=dict)
    """Where the time went, by ``columns.TIMES`` in seconds: as told at the end, or as far as the records tell."""
    sources: dict[str, float] = field(default_factory=dict)
    """The newest ``epoch/NAME``, ``loss/NAME`` and ``eval_loss/NAME`` of each source of a mixture."""
    tasks: dict[str, float] = field(default_factory=dict)
    """The newest ``tasks/NAME/METRIC`` of each."""
    settings: dict[str, str] = field(default_factory=dict)
    """Those that differ among the runs looked at together."""


def summarize_all(runs: Sequence[RunDir]) -> list[Summary]:
    """Summaries with the settings in which the runs differ.

    One of several that has no metrics, or broken ones, has its state and the reason; a single one raises SetupError.
    """
    if len(runs) == 1:
        return [summarize(runs[0])]
    summaries = []
    for run, settings in zip(runs, differing(runs), strict=True):
        summaries.append(replace(summarize_or_state(run), settings=settings))
    return summaries


def summarize_or_state(run: RunDir) -> Summary:
    """``summarize``; of a run that has no metrics, or broken ones, its state and the reason."""
    try:
        return summarize(run)
    except SetupError as error:
        state, reason = state_of(run)
        return Summary(str(run.root), state, reason or str(error), newest_step(run), _max_steps(run))


def summarize(run: RunDir) -> Summary:
    """Read a run's metrics. Raises SetupError if there are none."""
    records = records_of(run)
    train = [float(r["loss"]) for r in records if is_number(r.get("loss"))]
    evals = [(float(r["eval_loss"]), int(r.get("step", 0))) for r in records if is_number(r.get("eval_loss"))]
    best, best_step = min(evals, default=(None, None))
    bits = (float(r["eval_bits_per_byte"]) for r in records if is_number(r.get("eval_bits_per_byte")))
    speeds = sorted(float(r["tok_per_sec"]) for r in records if is_number(r.get("tok_per_sec")))
    told = _last(records, "train_runtime")  # by the run itself, at its end
    state, reason = state_of(run)
    reports = [r for r in read_records(run.tasks) if not r.get("abandoned")] if run.tasks.exists() else []
    return Summary(
        run=str(run.root),
        state=state,
        reason=reason,
        step=max((int(record.get("step", 0)) for record in records), default=0),
        max_steps=_max_steps(run),
        first_loss=train[0] if train else None,
        last_loss=train[-1] if train else None,
        best_loss=min(train, default=None),
        first_eval_loss=evals[0][0] if evals else None,
        last_eval_loss=evals[-1][0] if evals else None,
        best_eval_loss=best,
        best_eval_step=best_step,
        best_eval_bits_per_byte=min(bits, default=None),
        num_evaluations=len(evals),
        tokens=_last(records, "total_tokens"),
        tokens_per_second=speeds[len(speeds) // 2] if speeds else None,
        seconds=float(told) if told is not None else running_time(records),
        times=times_of(records),
        tasks={k: v for r in reports for k, v in r.get("metrics", {}).items() if is_number(v)},
        sources={k: v for r in records for k, v in r.items() if k.startswith(("epoch/", "loss/", "eval_loss/"))},
    )


def state_of(run: RunDir) -> tuple[str, str]:
    """How a run stands, in one word, and why."""
    ended = read_exit_record(run)
    if ended is None:
        holder = holder_of(run)
        return ("running" if holder is not None and holder.is_running else "cut"), run.note_set_aside() or ""
    return ended.state, ended.reason


def how_it_ended(run: RunDir) -> str:
    """How the last job in a run directory ended, or that it has not: what stands behind its name in a sentence."""
    outcome, holder = read_exit_record(run), holder_of(run)
    if outcome is not None:
        return f"ended at step {outcome.step}, {outcome.state}, with exit code {outcome.code}: {outcome.reason}"
    if holder is not None and holder.is_running is None:
        return f"was started on {holder.hostname} and has not told of its end; ask there"
    if holder is not None and holder.is_running:
        return "is ending"
    return f"was cut: it wrote nothing at its end; {resume_command(run)} continues it"


@dataclass(frozen=True)
class Holder:
    """The process that has last taken a run directory."""

    pid: int
    hostname: str

    @property
    def is_running(self) -> bool | None:
        """None for one of another machine, which cannot be known here."""
        if self.hostname != socket.gethostname():
            return None
        return self.pid != os.getpid() and is_running(self.pid)


def holder_of(run: RunDir) -> Holder | None:
    """Who has last taken the directory; None if that cannot be read."""
    try:
        found = _HOLDER.match(read_text(run.lock))
    except SetupError:
        return None
    return found and Holder(int(found[1]), found[2])


def ordered(summaries: Sequence[Summary], by: str) -> list[Summary]:
    """Sorted by a number, smallest first, those without it last; ``tokens_per_second``-like ones are found by field.

    Takes the names of Summary, of the metrics they come from (``eval_loss``), of columns, and of differing settings.
    """
    settings = {key for each in summaries for key in each.settings}
    own = [it.name for it in fields(Summary) if it.name not in ("settings", "times", "sources", "tasks", "reason")]
    name = by.replace(" ", "_")
    name = by if by in settings else _SHORT.get(name, name)
    if name not in own and name not in settings:
        known = [*own, *_SHORT, *settings]
        near = did_you_mean(by, known)
        names = f"{'Known' if near else 'known'}: {', '.join(sorted(known))}"
        raise ConfigError(f"--sort: nothing to sort by is called {by!r};{near} {names}")
    values = [(getattr(each, name) if name in own else each.settings.get(name), each) for each in summaries]
    known_ones = [pair for pair in values if pair[0] is not None]
    return [*(each for _, each in sorted(known_ones, key=lambda pair: _key(pair[0]))),
            *(each for value, each in values if value is None)]  # fmt: skip


_SHORT = {
    "loss": "last_loss", "eval": "last_eval_loss", "eval_loss": "best_eval_loss", "best_eval": "best_eval_loss",
    "bits_per_byte": "best_eval_bits_per_byte", "bits/byte": "best_eval_bits_per_byte", "time": "seconds",
    "tok_per_sec": "tokens_per_second", "tok/s": "tokens_per_second",
}  # fmt: skip
"""Names that people type, of columns too, for those of ``Summary``."""


def _key(value: Any) -> tuple[int, float, str]:
    """Numbers before texts, settings among them by their number."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, str(value)


def _last(records: list[Record], key: str) -> Any:
    return next((record[key] for record in reversed(records) if key in record), None)


def _max_steps(run: RunDir) -> int | None:
    """``max_steps`` of the newest start, None if the run counts epochs or its config cannot be read."""
    steps = settings_of(run).get("max_steps")
    return int(steps) if isinstance(steps, int) and steps > 0 else None

"""Where a run's time went, and what to try where much of it went elsewhere than to steps."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from forgather_cli.callbacks.columns import TIMES
from forgather_cli.documents.regular_files import read_text
from forgather_cli.errors import SetupError
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.find import settings_of
from forgather_cli.runs.records import Record, is_number, records_of

_MUCH = 0.10  # of the time
_SMALL_BATCH = 4096  # tokens at a time, below which the host and the launches of kernels may take longest
_SHORT = 0.02  # seconds of a micro-step on a CPU
_LOW_MFU = 0.2
_SLOWER = 1.25  # times the quicker steps; those of a steady run differ by less (measured: 1.11)
_FEW = 4  # logs that tell no spread
_CORES = "top shows what else runs there; the run's own ranks and data workers count too"
_MACHINE = "top, vmstat 1 and on GPUs nvidia-smi, as it runs: others on the device, heat, swapping"
_SLOW_RANK = re.compile(r"rank \d+ is slow, and the others wait for it.*")  # as ``launch.hang`` writes it
_ATTENTION = re.compile(r"INFO attention: (.*)")  # as the trainer does


@dataclass(frozen=True)
class Bottleneck:
    """Something that takes time, and the setting to try, or what else to do."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Report:
    """What ``forgather logs slow`` prints. ``times``: seconds by ``columns.TIMES``; ``attention``: its kernel."""

    run: str
    times: dict[str, float]
    findings: list[Bottleneck]
    attention: str | None = None


def times_of(records: Sequence[Record]) -> dict[str, float]:
    """Seconds by ``columns.TIMES``, of every start of the run that came to its end; of what was logged after the last
    one, as in a run that still trains, what the records tell: steps, data and evaluations.
    """
    ends = [n for n, record in enumerate(records) if "step_seconds" in record]
    times: dict[str, float] = {}
    for n in ends:
        for name in TIMES:
            if name in records[n]:
                _add(times, name, float(records[n][name]))
    step = int(records[ends[-1]]["step"]) if ends else 0
    for record in records[ends[-1] + 1 if ends else 0 :]:
        if is_number(record.get("step_time")):  # means over the steps since the log before
            steps, data = int(record["step"]) - step, float(record.get("data_time") or 0)
            _add(times, "step_seconds", steps * (float(record["step_time"]) - data))
            _add(times, "data_seconds", steps * data)
        if is_number(record.get("eval_runtime")):
            _add(times, "evaluation_seconds", float(record["eval_runtime"]))
        elif "loss" in record:
            step = int(record["step"])
    return times


def _add(times: dict[str, float], name: str, seconds: float) -> None:
    times[name] = times.get(name, 0.0) + max(0.0, seconds)


def explain(run: RunDir) -> Report:
    """Read a run's metrics, settings and log. Raises SetupError if nothing was measured."""
    records, settings = records_of(run), settings_of(run)
    times = times_of(records)
    if not sum(times.values()):
        raise SetupError(f"{run.metrics}: tells no times yet; wait for the second log, or lower logging_steps")
    return Report(str(run.root), times, list(_findings(run, records, settings, times)), _in_log(run, _ATTENTION))


def _findings(
    run: RunDir, records: Sequence[Record], settings: dict[str, Any], times: dict[str, float]
) -> Iterator[Bottleneck]:
    total = sum(times.values())

    def share(name: str) -> float:
        return times.get(name, 0.0) / total

    def percent(name: str) -> str:
        return f"{100 * share(name):.0f} % of the time"

    if share("data_seconds") > _MUCH:
        workers = int(settings.get("dataloader_num_workers") or 0)
        yield Bottleneck(
            f"Steps wait for data, {percent('data_seconds')}.", f"dataloader_num_workers={2 * workers or 2}"
        )
    if share("first_step_seconds") > _MUCH:
        took = f"The first step took {times['first_step_seconds']:.0f} s, {percent('first_step_seconds')}"
        if settings.get("torch_compile"):
            yield Bottleneck(f"{took}: it compiles the model.", "torch_compile=false for runs as short as this one")
        else:
            yield Bottleneck(f"{took}: it warms the device up.", "a longer run, in which it does not count")
    if share("evaluation_seconds") > _MUCH:
        passes = sum(float(r["eval_runtime"]) for r in records if is_number(r.get("eval_runtime")))
        if times["evaluation_seconds"] > 2 * passes:  # the rest of it is callbacks'
            shorter = "callbacks.textgen.max_new_tokens=50, or ~callbacks.textgen"
            yield Bottleneck(
                f"Evaluations take {percent('evaluation_seconds')}, most of it in callbacks at them.", shorter
            )
        elif settings.get("eval_strategy") == "steps":
            more = f"eval_steps={2 * (settings.get('eval_steps') or 100)}, or a smaller max_eval_samples"
            yield Bottleneck(f"Evaluations take {percent('evaluation_seconds')}.", more)
        else:
            yield Bottleneck(f"Evaluations take {percent('evaluation_seconds')}.", "a smaller max_eval_samples")
    if share("save_seconds") > _MUCH:
        less = f"save_steps={2 * (settings.get('save_steps') or 500)}"
        less = less if settings.get("async_save", True) else "async_save=true, which trains on meanwhile"
        yield Bottleneck(f"Checkpoints take {percent('save_seconds')}.", less)
    if share("exchange_seconds") > _MUCH:
        less = "diloco.sync_every twice as large at the server, or diloco.overlap, which trains on meanwhile"
        yield Bottleneck(f"Exchanges with other workers take {percent('exchange_seconds')}.", less)
    if (slow := _in_log(run, _SLOW_RANK)) is not None:
        yield Bottleneck(
            f"One rank keeps the others waiting: {slow}.", f"forgather control stacks {run.root}, as it runs"
        )
    elif share("sync_seconds") > _MUCH:
        where = f"forgather control stacks {run.root}, as it runs, shows for whom"
        yield Bottleneck(f"Rank 0 waits for other ranks, {percent('sync_seconds')}.", where)
    yield from _of_pace(records)
    yield from _of_steps(records, settings)


@dataclass(frozen=True)
class _Stretch:
    """The steps between two logs."""

    first: int
    last: int
    seconds: float
    """Of all its steps, without what they waited for data."""
    pace: float
    """Seconds per token."""
    wait: float | None
    """Share of the time in which a process of the run had no core; None where that is not known."""


def _stretches(records: Sequence[Record]) -> list[_Stretch]:
    """Of the run's newest start; another one may have had other settings, or another machine."""
    found: list[_Stretch] = []
    has_ended, step = False, 0
    for record in records:
        if has_ended and "loss" in record:
            found, has_ended = [], False
        has_ended = has_ended or "step_seconds" in record
        if "loss" not in record:
            continue
        first, step = step + 1, int(record["step"])
        if is_number(record.get("step_time")) and is_number(record.get("tok_per_sec")) and record["tok_per_sec"] > 0:
            length = float(record["step_time"])
            own, tokens = length - float(record.get("data_time") or 0), float(record["tok_per_sec"]) * length
            wait = float(record["cpu_wait"]) if is_number(record.get("cpu_wait")) else None
            if own > 0:
                found.append(_Stretch(first, step, (step - first + 1) * own, own / tokens, wait))
    return found


def _of_pace(records: Sequence[Record]) -> Iterator[Bottleneck]:
    """Steps that were slower than others of the run, and steps that had no core."""
    stretches = _stretches(records)
    total = sum(each.seconds for each in stretches)
    usual = statistics.quantiles([each.pace for each in stretches], n=4)[0] if len(stretches) >= _FEW else math.inf

    def lost(some: Sequence[_Stretch]) -> float:
        """Seconds that they took longer than usual."""
        return sum(each.seconds * (1 - usual / each.pace) for each in some)

    def wait(some: Sequence[_Stretch]) -> float:
        """The share of their time in which there was no core."""
        return sum(each.seconds * (each.wait or 0.0) for each in some) / sum(each.seconds for each in some)

    groups = groupby(stretches, lambda each: each.pace > _SLOWER * usual)
    slow = [list(group) for is_slow, group in groups if is_slow]
    if sum(map(lost, slow)) > _MUCH * total:
        worst = max(slow, key=lost)
        seconds = sum(each.seconds for each in worst)
        times = seconds / (seconds - lost(worst))
        what = f"Steps {worst[0].first} to {worst[-1].last} took {times:.1f} times as long as the quicker ones"
        what += f", and {len(slow) - 1} more stretches were slow" if len(slow) > 1 else ""
        if wait(worst) > _MUCH:
            share = f"{100 * wait(worst):.0f} %"
            yield Bottleneck(
                f"{what}: other processes had the cores, and for {share} of that time there was none.", _CORES
            )
        else:
            known = "though cores were free" if worst[0].wait is not None else "and nothing here tells why"
            yield Bottleneck(f"{what}, {known}.", _MACHINE)
    elif total and wait(stretches) > _MUCH:
        share = f"{100 * wait(stretches):.0f} %"
        yield Bottleneck(f"For {share} of the steps' time there was no core: other processes had them.", _CORES)


def _of_steps(records: Sequence[Record], settings: dict[str, Any]) -> Iterator[Bottleneck]:
    """What makes the steps themselves slow."""
    mfu = [float(r["mfu"]) for r in records if is_number(r.get("mfu"))]
    lengths = [float(r["step_time"]) for r in records if is_number(r.get("step_time"))]
    bound, whole = int(settings.get("per_device_train_batch_size") or 8), settings.get("global_batch_size")
    at_once = min(bound, int(whole)) if whole else bound
    seq_len = (settings.get("data") or {}).get("seq_len")
    # without a known peak (CPU): steps so short that what is not arithmetic counts
    is_idle = statistics.median(mfu) < _LOW_MFU if mfu else bool(lengths) and statistics.median(lengths) < _SHORT
    if is_idle and isinstance(seq_len, int) and at_once * seq_len < _SMALL_BATCH:
        more = f"per_device_train_batch_size={2 * bound}"
        if whole and int(whole) <= bound:
            more += f" global_batch_size={2 * int(whole)}"
        yield Bottleneck(
            f"The batch is small: {at_once * seq_len:,} tokens at a time.",
            f"{more}; forgather plan --fit shows how far memory goes",
        )
    if mfu and statistics.median(mfu) < 2 * _LOW_MFU:  # on a device whose peak is known
        used = f"Steps use {100 * statistics.median(mfu):.0f} % of what the device can compute."
        if (settings.get("precision") or {}).get("type") == "fp32":
            yield Bottleneck(used, "precision=bf16")
        elif not settings.get("torch_compile"):
            yield Bottleneck(used, "torch_compile=true")


def _in_log(run: RunDir, pattern: re.Pattern[str]) -> str | None:
    """What the log of rank 0 says last of something."""
    try:
        found = pattern.findall(read_text(run.rank_log(0)))
    except SetupError:
        return None
    return str(found[-1]).rstrip(".") if found else None

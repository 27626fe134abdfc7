"""What a killed run must have left, and what a resumed one must have computed."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crash_draw import MAX_STEPS, STOPS, Kill, Plan

LOSS, NORM = 1e-5, 1e-4
"""Relative differences that another layout may make."""
EXACT = ("step", "epoch", "learning_rate", "tokens", "total_tokens", "total_flos")
"""Keys of a training record that are equal in every layout."""

# ------------------------------------------------------------------------------------------------------------- reading


def records(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a torn last line is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def samples(run: Path) -> list[tuple[int, str]]:
    """(step, text) of each record of samples.txt."""
    path = run / "samples.txt"
    _, *parts = re.split(r"^=== step (\d+) ===$", path.read_text() if path.exists() else "", flags=re.MULTILINE)
    return [(int(step), text) for step, text in zip(parts[::2], parts[1::2], strict=True)]


def last_step(run: Path) -> int:
    return max((record["step"] for record in records(run)), default=0)


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def saved_steps(run: Path) -> list[int]:
    """Steps of the published checkpoints, ascending."""
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step-*"))


def outcome(run: Path) -> int | None:
    """The code in exit.json."""
    path = run / "exit.json"
    return int(json.loads(path.read_text())["code"]) if path.exists() else None


def damaged(run: Path) -> list[str]:
    """What is wrong with the published checkpoints, by their own hashes."""
    found = []
    for step in saved_steps(run):
        path = checkpoint(run, step)
        try:
            files = json.loads((path / "manifest.json").read_text())["files"]
            wrong = [name for name, entry in files.items() if not _is_whole((path / name).read_bytes(), entry)]
        except (OSError, ValueError, KeyError) as error:
            wrong = [repr(error)]
        found += [f"checkpoint {step} is damaged: {', '.join(wrong)}"] if wrong else []
    return found


def _is_whole(content: bytes, entry: dict[str, Any]) -> bool:
    hashes = [hashlib.sha256(content[start:stop]).hexdigest() for start, stop, _ in entry["ranges"]]
    return len(content) == entry["size"] and hashes == [digest for _, _, digest in entry["ranges"]]


# -------------------------------------------------------------------------------------------------------- after a kill


@dataclass(frozen=True)
class Before:
    """A run as a start finds it."""

    step: int
    saved: int

    @classmethod
    def of(cls, run: Path) -> Before:
        return cls(last_step(run), max(saved_steps(run), default=0))


def lost_steps(run: Path, before: Before) -> int:
    """How many of the steps that this start has recorded are to be computed again."""
    reached, saved = last_step(run), max(saved_steps(run), default=0)
    return max(0, reached - saved) if (reached, saved) != (before.step, before.saved) else 0


def most_lost(run: Path, plan: Plan, writing: bool) -> int:
    """How many steps may be lost: those since the newest save, and those before it while that was being written: then
    it was ``writing`` when it was killed, or files are left of it (a rank that lives a moment longer removes them).
    """
    in_flight = writing or any(path.name.startswith(".tmp-step") for path in (run / "checkpoints").iterdir())
    return plan.save_steps * (2 if plan.async_save and in_flight else 1)


def after_kill(
    run: Path, plan: Plan, kill: Kill, target: str, code: int, trained: bool, before: Before, *, writing: bool = False
) -> list[str]:
    """What is wrong with a job that was killed and the run it left. ``trained``: it had made steps by then;
    ``writing``: the kill came while a checkpoint was being written.
    """
    problems = damaged(run)
    complete = MAX_STEPS in saved_steps(run)
    allowed = expected_codes(kill, target, trained=trained, complete=complete)
    if code not in allowed:
        problems.append(f"exit code {code} after {kill}, not {' or '.join(map(str, sorted(allowed)))}")
    lost = lost_steps(run, before)
    if lost > most_lost(run, plan, writing):
        problems.append(f"{lost} steps lost with save_steps={plan.save_steps}")
    if code == 75 and (lost or not saved_steps(run)):
        problems.append(f"exit code 75 without a checkpoint of the last step: {lost} steps lost")
    if code == 75 and outcome(run) != 75:
        problems.append(f"exit code 75, but exit.json says {outcome(run)}")
    return problems


def expected_codes(kill: Kill, target: str, *, trained: bool, complete: bool) -> set[int]:
    """How a job may end that was killed so. ``complete``: it left the checkpoint of the last step."""
    own = {-kill.signum, 128 + kill.signum}
    if kill.then is not None:
        codes = {-signal.SIGKILL, 75, 1, *own}
    elif kill.signum not in STOPS:
        codes = {1} if target in ("rank", "worker") else {-kill.signum}
    else:
        codes = {75} if trained else {75, 1, *own}  # 1: a rank that was killed before it could listen
    return codes | {0, 75, *own} if complete else codes


# ---------------------------------------------------------------------------------------------------- after the resume


def compare(
    run: Path, reference: Path, *, moved_after: int | None = None, discarded: Collection[int] = ()
) -> list[str]:
    """What differs from the uninterrupted run: nothing may, or after step ``moved_after`` no more than tolerances.

    ``discarded``: steps at which a stop may have discarded the evaluation.
    """
    mine, theirs = records(run), records(reference)
    exact = MAX_STEPS if moved_after is None else moved_after
    problems = _compare_training(_of(mine, "grad_norm"), _of(theirs, "grad_norm"), exact)
    problems += _compare_evaluations(_of(mine, "eval_loss"), _of(theirs, "eval_loss"), exact, discarded)
    problems += _compare_samples(samples(run), samples(reference), exact, discarded)
    if moved_after is None and not problems and _hashes(run) != _hashes(reference):
        problems.append("weights, moments or random states differ at the end")
    return problems


def _of(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [row for row in rows if key in row]


def _compare_training(mine: list[dict[str, Any]], theirs: list[dict[str, Any]], exact: int) -> list[str]:
    steps = [row["step"] for row in mine]
    if steps != [row["step"] for row in theirs]:
        return [f"training records of steps {steps}"]
    for a, b in zip(mine, theirs, strict=True):
        floats = {"loss": LOSS, "grad_norm": NORM, "max_grad_norm": NORM}
        wrong = [key for key in EXACT if a[key] != b[key]]
        wrong += [key for key, near in floats.items() if not _same(a[key], b[key], near if a["step"] > exact else 0.0)]
        if wrong:
            values = ", ".join(f"{key} {a[key]!r} is not {b[key]!r}" for key in wrong)
            return [f"step {a['step']}: {values}"]
    return []


def _compare_evaluations(
    mine: list[dict[str, Any]], theirs: list[dict[str, Any]], exact: int, discarded: Collection[int]
) -> list[str]:
    problems = []
    expected = {row["step"]: row["eval_loss"] for row in theirs}
    steps = [row["step"] for row in mine]
    if len(set(steps)) < len(steps) or not set(expected) - set(discarded) <= set(steps) <= set(expected):
        problems.append(f"evaluations at steps {steps}, not {list(expected)}")
    for row in mine:
        near = LOSS if row["step"] > exact else 0.0
        if row["step"] in expected and not _same(row["eval_loss"], expected[row["step"]], near):
            problems.append(f"eval_loss {row['eval_loss']!r} at step {row['step']}, not {expected[row['step']]!r}")
    return problems


def _compare_samples(
    mine: list[tuple[int, str]], theirs: list[tuple[int, str]], exact: int, discarded: Collection[int]
) -> list[str]:
    """In another layout other tokens may be drawn; a stop cuts a text short."""
    expected, steps = dict(theirs), [step for step, _ in mine]
    if len(set(steps)) < len(steps) or not set(expected) - set(discarded) <= set(steps) <= set(expected):
        return [f"samples at steps {steps}, not {list(expected)}"]
    wrong = [step for step, text in mine if step <= exact and step not in discarded and text != expected[step]]
    return [f"other samples at step {step}" for step in wrong]


def _same(a: float, b: float, near: float) -> bool:
    return a == b or (near > 0 and math.isclose(a, b, rel_tol=near))


def _hashes(run: Path) -> dict[str, Any]:
    """Of the final checkpoint's tensors: weights, moments, accumulators, random states."""
    manifest = json.loads((checkpoint(run, MAX_STEPS) / "manifest.json").read_text())
    return {name: entry["ranges"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


def read_as(run: Path, reference: Path) -> list[str]:
    """What is wrong with what the loaders of a run on a mixture have handed out."""
    mine, theirs = (_audit(each) for each in (run, reference))
    clean = mine == theirs and mine["lost"] == mine["repeated"] == 0
    ends = [json.loads((each / "mixture.jsonl").read_text().splitlines()[-1]) for each in (run, reference)]
    wrong = [key for key in ("position", "stretches", "order") if ends[0][key] != ends[1][key]]
    problems = [] if clean else [f"data audit says {mine}, of the uninterrupted run {theirs}"]
    return problems + [f"mixture.jsonl ends with another {key}" for key in wrong]


def other_values(run: Path, reference: Path) -> list[str]:
    """What is wrong with what a run's reference says of its pairs, in caches beside the runs."""
    mine, theirs = (
        {path.parent.name: path.read_bytes() for path in (each.parent / "cache/references").glob("[!.]*/values")}
        for each in (run, reference)
    )
    return [] if mine == theirs and mine else ["the reference has other values than that of the uninterrupted run"]


@functools.cache
def _audit(run: Path) -> dict[str, Any]:
    """Of a run that has come to its end."""
    command = [sys.executable, "-m", "forgather_cli", "data", "audit", str(run), "--json"]
    document: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    return document


def after_end(run: Path) -> list[str]:
    """What is wrong with a run that has come to its end, besides what it computed."""
    leftovers = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    leftovers += [path.name for path in run.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    problems = [f"left behind: {', '.join(leftovers)}"] if leftovers else []
    if aside := [path.name for path in run.glob("*.bak*")]:
        problems.append(f"set aside: {', '.join(aside)}")
    if outcome(run) != 0:
        problems.append(f"exit.json says {outcome(run)} at the end")
    return problems + damaged(run)

"""Kill a training run with SIGKILL at random moments, resume it, and compare it with an uninterrupted one to the bit.

    scripts/crash_campaign 100            # 100 trials
    scripts/crash_campaign 10 --seed 7 model=tiny
    scripts/crash_campaign 20 trainer=ddp nproc_per_node=2

Half of the kills wait for a save to begin and strike inside it. In a job of several ranks they strike the launcher, one
rank, or all processes at once; what is left must end by itself. Extra arguments are overrides for every run. Exit code
1 if a trial lost anything; each failure is printed with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

_LEFT_OVER = 30.0  # seconds in which the rest of a job must end once one of its processes was killed
SETTINGS = ("max_steps=60", "save_steps=7", "logging_steps=1", "eval_steps=20", "deterministic=true")
SMALL = ("model=nano", "data.seq_len=64", "max_eval_samples=16", "~callbacks.textgen", "~callbacks.tensorboard")


@dataclass
class Report:
    """What a campaign did."""

    trials: int = 0
    kills: int = 0
    kills_inside_saves: int = 0
    steps_lost: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = (
            f"{self.trials} trials, {self.kills} kills ({self.kills_inside_saves} inside a save), "
            f"{self.steps_lost} steps computed again, {len(self.failures)} failures"
        )
        return "\n".join([text, *self.failures])


def command(output_dir: Path, overrides: list[str]) -> list[str]:
    return [
        sys.executable, "-m", "forgather_cli", "train", *SETTINGS, *overrides,
        f"output_dir={output_dir}", "resume_from_checkpoint=true",
    ]  # fmt: skip


def records(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every training record; a torn last line is left out."""
    rows: list[tuple[int, float, float]] = []
    if not (run / "metrics.jsonl").exists():
        return rows
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "grad_norm" in record:
            rows.append((record["step"], record["loss"], record["grad_norm"]))
    return rows


def final_hashes(run: Path) -> dict[str, list[list[object]]]:
    """Hashes of the final checkpoint's tensors: weights, moments, accumulators, random states."""
    manifest = json.loads((run / "checkpoints" / "step-00000060" / "manifest.json").read_text())
    return {n: f["ranges"] for n, f in manifest["files"].items() if n.endswith(".safetensors")}


def kill_once(run: Path, overrides: list[str], rng: random.Random, seconds: float, report: Report) -> bool:
    """Start the run and kill it at a random moment. True if it ended by itself before."""
    inside_save = rng.random() < 0.5
    with (run.parent / "output.txt").open("ab") as output:
        process = subprocess.Popen(command(run, overrides), stdout=output, stderr=subprocess.STDOUT)
        moment = time.monotonic() + rng.uniform(0.0, seconds)
        while process.poll() is None and time.monotonic() < moment:
            time.sleep(0.002)
        if inside_save:
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline and not saving(run):
                time.sleep(0.0005)
            time.sleep(rng.uniform(0.0, 0.02))
        return strike(process, run, rng, report)


def strike(process: subprocess.Popen[bytes], run: Path, rng: random.Random, report: Report) -> bool:
    """Kill the job, or one process of it, and wait until the rest has ended. True if it had ended before."""
    job = family(process.pid)
    ranks = [pid for pid, words in job.items() if "forgather_cli.rank" in words]
    doomed = rng.choice([[process.pid], [rng.choice(ranks)], list(job)]) if ranks else [process.pid]
    if process.poll() is not None:
        return True
    report.kills += 1
    report.kills_inside_saves += saving(run)
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _LEFT_OVER
    while (left := [pid for pid in job if is_running(pid)]) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.02)
    for pid in left:
        report.failures.append(f"process {pid} ({job[pid]}) went on after {doomed} of {list(job)} were killed")
        os.kill(pid, signal.SIGKILL)
    return process.wait() == 0


def family(pid: int) -> dict[int, str]:
    """A process and all that descend from it, parents first: pid -> its command line."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = {}, [pid]
    while waiting:
        pid = waiting.pop(0)
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        waiting += children.get(pid, [])
    return found


def is_running(pid: int) -> bool:
    """False for a process that has ended, even if nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def saving(run: Path) -> bool:
    checkpoints = run / "checkpoints"
    return checkpoints.is_dir() and any(p.name.startswith(".") for p in checkpoints.iterdir())


def trial(seed: int, work: Path, reference: Path, seconds: float, overrides: list[str], report: Report) -> bool:
    """Start, kill one to three times, resume to the end, compare. False if the run was too fast to be killed."""
    rng = random.Random(seed)
    run = work / f"trial-{seed}" / "run"
    shutil.rmtree(run.parent, ignore_errors=True)
    run.parent.mkdir(parents=True)
    kills = report.kills
    for _ in range(rng.randint(1, 3)):
        if kill_once(run, overrides, rng, seconds, report):
            break
    if report.kills == kills:
        return False
    reached = (records(run) or [(0, 0.0, 0.0)])[-1][0]
    saved = max((int(p.name[5:]) for p in run.glob("checkpoints/step-*")), default=0)
    report.steps_lost += max(0, reached - saved)
    with (run.parent / "output.txt").open("ab") as output:
        subprocess.run(command(run, overrides), stdout=output, stderr=subprocess.STDOUT, check=False)
    problem = compare(run, reference)
    if problem:
        report.failures.append(f"seed {seed}: {problem} (kept in {run})")
    else:
        shutil.rmtree(run.parent)
    report.trials += 1
    return True


def compare(run: Path, reference: Path) -> str | None:
    """What differs from the uninterrupted run; None if nothing does."""
    mine, theirs = records(run), records(reference)
    if mine != theirs:
        different = [b[0] for a, b in zip(mine, theirs, strict=False) if a != b]
        return f"{len(mine)} of {len(theirs)} records, first difference at step {different[:1]}"
    leftovers = [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")]
    if leftovers:
        return f"left behind: {leftovers}"
    return None if final_hashes(run) == final_hashes(reference) else "weights, moments or random states differ"


def campaign(trials: int, seed: int, work: Path, overrides: list[str]) -> Report:
    """Run ``trials`` trials under ``work``; the reference run's duration sets the range of the kills."""
    report = Report()
    reference = work / "reference" / "run"
    start = time.monotonic()
    subprocess.run(command(reference, overrides), check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    for n in range(trials):
        while not trial(seed + n, work, reference, seconds, overrides, report):
            seconds *= 0.7  # the reference ran while the machine was slower
        print(f"{n + 1}/{trials}: {report.kills} kills, {len(report.failures)} failures", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments, overrides = parser.parse_known_args()
    work = Path(tempfile.mkdtemp(prefix="crash-campaign-"))
    report = campaign(arguments.trials, arguments.seed, work, [*SMALL, *overrides])
    print(report)
    if not report.failures:
        shutil.rmtree(work)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

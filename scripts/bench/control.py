"""What the default callbacks with control cost, how soon a job answers, and how soon it acts.

    python scripts/bench/control.py [--steps 300] [--reps 7] [--only cost,status,act]

``cost``: ``forgather train`` of the pico model on one thread with the default callbacks, with them and without control,
and without any, in interleaved and rotated runs: a step is the time between two forwards, by which text is never
generated and nothing evaluated or saved. ``status``: the time of one ``GET /status`` while such a run trains, as the
command line asks it. ``act``: steps from the moment a command is in to the moment all ranks act on it, by strategy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loop_overhead import SHAPE

from forgather_cli.control import client, registry
from forgather_cli.control.records import SAVE
from forgather_cli.control.registry import Entry

PICO = [
    "model=nano", f"model.intermediate_size={SHAPE['mlp']}", f"data.seq_len={SHAPE['seq']}",
    f"global_batch_size={SHAPE['batch']}", "logging_steps=10", "eval_strategy=no", "lr_scheduler=linear", "device=cpu",
]  # fmt: skip
PROBE = "+callbacks.probe._target_=loop_overhead.Probe"
RUNNERS: dict[str, list[str]] = {
    "no callbacks": ["~callbacks", PROBE],
    "default without control": ["~callbacks.control", PROBE],
    "default": [PROBE],
}
STRATEGIES = {
    "single": ["trainer=single"],
    "ddp": ["trainer=ddp", "nproc_per_node=2"],
    "pipeline": ["trainer=pipeline", "nproc_per_node=2", "n_microbatches=2"],
    "fsdp2": ["trainer=fsdp2", "nproc_per_node=2"],
}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "forgather_cli", "train", *PICO, *words, f"output_dir={tempfile.mkdtemp()}"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}


def measure(name: str, steps: int) -> dict[str, float]:
    """One run's median step and peak memory."""
    words = [*RUNNERS[name], f"max_steps={steps}", "save_strategy=no"]
    done = subprocess.run(command(*words), capture_output=True, text=True, env=environment(), check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{name} failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    result: dict[str, float] = json.loads(lines[-1][7:])
    return result


def cost(steps: int, reps: int) -> None:
    """Medians over repetitions, and what they are above the loop without callbacks."""
    names = list(RUNNERS)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for rep in range(reps):
        shift = rep % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(measure(name, steps))
    print("| callbacks | step, us | over none | its CPU time, us | over none | peak RSS, MB | over none |")
    print("|---" * 7 + "|")
    middle = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    bare = middle["no callbacks"]
    for name, found in middle.items():
        keys = ("step_us", "cpu_us", "rss_mb")
        cells = [f"{found[key]:.0f} | {found[key] - bare[key]:+.0f}" for key in keys]
        print(f"| {name} | {' | '.join(cells)} |")


@contextmanager
def job(*words: str) -> Iterator[Entry]:
    """A job that trains until it is told to end."""
    known = {entry.job_id for entry in registry.entries()}
    everlasting = command("max_steps=1000000", "save_steps=1000000", *words)
    with subprocess.Popen(everlasting, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()) as run:
        while not (new := [entry for entry in registry.running() if entry.job_id not in known]):
            if run.poll() is not None:
                raise SystemExit(f"the job ended with exit code {run.returncode}")
            time.sleep(0.05)
        while client.status(new[0])["step"] < 20:
            time.sleep(0.05)
        yield new[0]
        client.submit(new[0], "abort")


def status_latency(reps: int) -> None:
    with job("~callbacks.textgen") as entry:
        times = [_timed(entry) * 1e3 for _ in range(reps)]
    low, middle, high = (sorted(times)[int(part * (len(times) - 1))] for part in (0, 0.5, 0.95))
    print(f"status while training: {middle:.1f} ms (median of {reps}; fastest {low:.1f}, 95th percentile {high:.1f})")


def _timed(entry: Entry) -> float:
    time.sleep(0.01)
    start = time.perf_counter()
    client.status(entry)
    return time.perf_counter() - start


def act(reps: int) -> None:
    """A save's steps from being asked to being acted on, and its time to the answer."""
    for strategy, words in STRATEGIES.items():
        with job("~callbacks.textgen", *words) as entry:
            answers = [_saved(entry) for _ in range(reps)]
        steps = [steps for steps, _ in answers]
        seconds = statistics.median(seconds for _, seconds in answers)
        print(
            f"{strategy}: acts after {statistics.median(steps):g} steps (most {max(steps)}), saved in {seconds:.2f} s"
        )


def _saved(entry: Entry) -> tuple[int, float]:
    start = time.perf_counter()
    told: Any = client.wait(entry, client.submit(entry, SAVE), timeout=120)
    return told.applied_at_step - told.asked_at_step, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--only", default="cost,status,act")
    a = parser.parse_args()
    wanted = a.only.split(",")
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp()
    if "cost" in wanted:
        cost(a.steps, a.reps)
    if "status" in wanted:
        status_latency(a.reps * 30)
    if "act" in wanted:
        act(a.reps)


if __name__ == "__main__":
    main()

"""What the default callbacks with control cost, how soon a job answers, and how soon it acts.

    python scripts/bench/control.py [--rounds 40] [--reps 7] [--only cost,status,act]

``cost``: runs of the pico model on one thread with the default callbacks, with them and without control, and without
any, which take turns in one process, a log in each turn; nothing is evaluated or saved. ``status``: the time of one
``GET /status`` while such a run trains, as the command line asks it. ``act``: steps from the moment a command is in to
the moment all ranks act on it, by strategy.
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
from plain import PLAIN

from forgather_cli.control import client, registry
from forgather_cli.control.command_record import SAVE
from forgather_cli.control.registry import Entry

PICO = [
    "model=nano", f"model.intermediate_size={SHAPE['mlp']}", f"data.seq_len={SHAPE['seq']}", "tokenizer=bytes",
    f"global_batch_size={SHAPE['batch']}", "logging_steps=10", "eval_strategy=no", "lr_scheduler=linear", "device=cpu",
    *PLAIN,
]  # fmt: skip
SETS: dict[str, list[str]] = {
    "no callbacks": ["~callbacks"],
    "default without control": ["~callbacks.control"],
    "default": [],
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


def cost(rounds: int) -> None:
    """Means of a turn, logs included, and the median over rounds of what they are above the loop without callbacks."""
    words = [sys.executable, __file__, "--runs", "--rounds", str(rounds)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"the runs failed: {done.stdout[-500:]}{done.stderr[-1500:]}")
    blocks: dict[str, list[list[float]]] = json.loads(lines[-1][7:])
    print("| callbacks | step, us | over none (quartiles) | its CPU time, us | over none (quartiles) | peak RSS, MB |")
    print("|---" * 6 + "|")
    for name, found in blocks.items():
        cells = [name]
        for column in (0, 1):
            mine, none = ([turn[column] * 1e6 for turn in turns] for turns in (found, blocks["no callbacks"]))
            above = [one - other for one, other in zip(mine, none, strict=True)]
            low, middle, high = statistics.quantiles(above, n=4)
            cells += [f"{statistics.median(mine):.0f}", f"{middle:+.0f} ({low:+.0f} to {high:+.0f})"]
        print(f"| {' | '.join(cells)} | {peak_memory(name):.0f} |")


def run_all(rounds: int) -> None:
    """In one process, by turns: a run with each of the sets of callbacks."""
    import torch
    from turns import BLOCK, Turns, in_turns

    from forgather_cli import worker
    from forgather_cli.config.load import load_config
    from forgather_cli.run_dir import RunDir

    def run(name: str) -> None:
        torch.set_num_threads(1)
        folder = tempfile.mkdtemp()
        words = [*PICO, *SETS[name], "save_strategy=no", f"max_steps={(rounds + 1) * BLOCK}", f"output_dir={folder}"]
        worker.build(load_config(None, words).config, RunDir(Path(folder))).train()

    turns = Turns(tuple(SETS), statistics.fmean)
    in_turns(turns, run)
    print("RESULT", json.dumps({name: found[1:] for name, found in turns.blocks.items()}), flush=True)


def peak_memory(name: str) -> float:
    """MB of a run of its own."""
    python = "import sys, resource\nfrom forgather_cli.cli import app\ntry: app.main()\nexcept SystemExit: pass\n"
    python += "print('RSS', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    words = command(*SETS[name], "max_steps=50", "save_strategy=no")[3:]
    done = subprocess.run(
        [sys.executable, "-c", python, *words], capture_output=True, text=True, env=environment(), check=True
    )
    return float(done.stdout.rpartition("RSS ")[2])


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
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--runs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--only", default="cost,status,act")
    a = parser.parse_args()
    if a.runs:
        run_all(a.rounds)
        return
    wanted = a.only.split(",")
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp()
    if "cost" in wanted:
        cost(a.rounds)
    if "status" in wanted:
        status_latency(a.reps * 30)
    if "act" in wanted:
        act(a.reps)


if __name__ == "__main__":
    main()

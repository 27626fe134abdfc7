"""What it costs that ranks are watched: the flight recorder, looks at the main thread, questions to the store.

Runs of pico on two ranks, with and without it by turns in changing order; each is compared with the other of its round.
Without: the recorder's buffer is 0, and hang_report_after so long that the watching thread never wakes up.

    python scripts/bench/hang_watch.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from loop_overhead import SHAPE
from plain import PLAIN
from turns import ratio

WITH, WITHOUT = "watched", "not watched"
VARIANTS = {
    WITH: ({"TORCH_FR_BUFFER_SIZE": "1000"}, "hang_report_after=30"),
    WITHOUT: ({"TORCH_FR_BUFFER_SIZE": "0"}, "hang_report_after=1e9"),
}
WARM_UP = 2  # logs


def step_seconds(variant: str, strategy: str, steps: int) -> float:
    """Median seconds of a step over the log intervals of one run."""
    environment, setting = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = [
            "model=nano", f"model.intermediate_size={SHAPE['mlp']}", "data=synthetic", f"data.seq_len={SHAPE['seq']}",
            *PLAIN,
            "num_samples=4096", f"global_batch_size={SHAPE['batch']}", "device=cpu",
            f"trainer={strategy}", "nproc_per_node=2", f"max_steps={steps}", f"logging_steps={max(5, steps // 40)}",
            "eval_strategy=no", "save_strategy=no", "callbacks=minimal", f"output_dir={run}", setting,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, "-m", "forgather_cli", "train", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{variant} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([record["step_time"] for record in records if "step_time" in record][WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="ddp,fsdp2")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="two rounds of 60 steps under ddp: whether it works")
    a = parser.parse_args()
    if a.quick:
        a.strategies, a.rounds, a.steps = "ddp", 2, 60
    print("| strategy | watched, ms per step | not watched | over not watched (quartiles) |")
    print("|---|---|---|---|")
    for strategy in a.strategies.split(","):
        found: dict[str, list[float]] = {WITH: [], WITHOUT: []}
        for number in range(a.rounds):
            for variant in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                found[variant].append(step_seconds(variant, strategy, a.steps))
        medians = [f"{statistics.median(found[variant]) * 1e3:.2f}" for variant in VARIANTS]
        print(f"| {strategy} | {' | '.join(medians)} | {ratio(found[WITH], found[WITHOUT])} |", flush=True)


if __name__ == "__main__":
    main()

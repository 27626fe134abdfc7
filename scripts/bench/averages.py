"""Evaluation loss of the mean of a run's last checkpoints against each of them, over several seeds.

    python scripts/bench/averages.py [--seeds 1 2 3] [--steps 800] [--every 10] [--last 5] [--model nano]
        [--schedules constant cosine]

Every number is ``forgather eval`` on the same held-out samples. With a constant learning rate the last checkpoints lie
around a better point than each of them; a schedule that decays to nothing leaves less to win.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from plain import PLAIN


def forgather(*words: str) -> str:
    """Standard output of ``forgather WORDS``."""
    done = subprocess.run([sys.executable, "-m", "forgather_cli", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"forgather {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def eval_loss(source: Path, arguments: argparse.Namespace) -> float:
    words = [f"data.seq_len={arguments.seq_len}", f"max_eval_samples={arguments.samples}"]
    document: dict[str, Any] = json.loads(forgather("eval", str(source), *words, "--json"))
    return float(document["eval_loss"])


def losses_of(run: Path, seed: int, schedule: str, arguments: argparse.Namespace) -> list[float]:
    """Train; the losses of the last checkpoints, oldest first, and of their mean."""
    settings = [
        f"model={arguments.model}", f"data.seq_len={arguments.seq_len}", f"max_steps={arguments.steps}",
        f"seed={seed}", f"save_steps={arguments.every}", f"save_total_limit={arguments.last}",
        f"lr_scheduler={schedule}", "warmup_steps=20", "eval_strategy=no", "callbacks=minimal", f"output_dir={run}",
        *PLAIN,
    ]  # fmt: skip
    forgather("train", *settings)
    mean = run / "mean"
    forgather("checkpoint", "average", "--last", str(arguments.last), str(run), "-o", str(mean))
    checkpoints = sorted((run / "checkpoints").glob("step-*"))[-arguments.last :]
    return [eval_loss(source, arguments) for source in [*checkpoints, mean]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--schedules", nargs="+", default=["constant", "cosine"])
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps of a run")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--last", type=int, default=5, help="checkpoints in the mean")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--samples", type=int, default=400, help="held-out sequences")
    arguments = parser.parse_args()
    back = [f"-{arguments.every * n}" for n in range(arguments.last - 1, 0, -1)]
    print("| schedule | seed | " + " | ".join([*back, "last", "mean of them", "mean - best of them"]) + " |")
    print("|---|" + "---|" * (arguments.last + 3))
    for schedule in arguments.schedules:
        gains = []
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                *single, mean = losses_of(Path(folder) / "run", seed, schedule, arguments)
            gains.append(mean - min(single))
            shown = " | ".join(f"{loss:.4f}" for loss in (*single, mean))
            print(f"| {schedule} | {seed} | {shown} | {gains[-1]:+.4f} |", flush=True)
        median = statistics.median(gains)
        print(f"| {schedule} | median | " + " | " * (arguments.last + 1) + f"{median:+.4f} |", flush=True)


if __name__ == "__main__":
    main()

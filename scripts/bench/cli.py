"""Wall-clock of the commands that need no tensors: ``python scripts/bench/cli.py [--reps 11]``; medians, warm."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "forgather --help": ["--help"],
    "forgather train --help": ["train", "--help"],
    "a config error (learning_rte=1)": ["train", "learning_rte=1"],
    "forgather config options": ["config", "options"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=11)
    reps = parser.parse_args().reps
    program = str(Path(sys.executable).with_name("forgather"))
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for rep in range(reps + 1):
        for name, words in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([program, *words], capture_output=True, check=False)
            if rep:  # the first round warms the disk cache
                times[name].append(time.perf_counter() - start)
    print("| command | median, s | max, s |\n|---|---|---|")
    for name, seconds in times.items():
        print(f"| `{name}` | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")


if __name__ == "__main__":
    main()

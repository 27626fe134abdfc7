"""What ``forgather plan`` says of a rank's memory beside what the rank took.

    python scripts/bench/plan_memory.py [--quick] [--models nano tiny 60m 160m]

On a CPU: the peak of resident memory of the fullest rank over four steps with a save in the middle, less that of the
same command with a model of a few hundred parameters and one short sequence, which is the interpreter, its libraries
and the process groups. Prints as it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from plain import PLAIN

MIB = 2**20
LAYOUTS = {
    "single": ("trainer=single",),
    "ddp": ("trainer=ddp", "nproc_per_node=2"),
    "fsdp2": ("trainer=fsdp2", "nproc_per_node=2"),
    "pipeline": ("trainer=pipeline", "nproc_per_node=2"),
}
COMMON = (
    "data=synthetic", "global_batch_size=16", "per_device_train_batch_size=8", "max_steps=4", "logging_steps=1",
    "eval_strategy=no", "callbacks=minimal", "device=cpu",
    *PLAIN,
)  # fmt: skip
NOTHING = (
    "model=nano", "model.hidden_size=8", "model.num_attention_heads=2", "model.num_hidden_layers=2",
    "model.intermediate_size=8", "model.vocab_size=257", "data.seq_len=2",
)  # fmt: skip


def peak(words: tuple[str, ...]) -> int:
    """Bytes of the fullest rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "forgather_cli", "train", *COMMON, *words, f"output_dir={folder}/run"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
        records = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return max(int(json.loads(record).get("peak_mem_allocated") or 0) for record in records)


def planned(words: tuple[str, ...]) -> dict[str, int]:
    command = [sys.executable, "-m", "forgather_cli", "plan", "--json", *COMMON, *words]
    made = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {name: made[f"{name}_bytes"] or 0 for name in KINDS}


KINDS = ("memory", "weight", "gradient", "optimizer", "activation", "buffer", "save_copy", "fragment")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["nano", "tiny", "60m", "160m"])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--saves", nargs="+", default=["steps", "no"], help="save_strategy")
    parser.add_argument("--quick", action="store_true", help="nano alone")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("words", nargs="*", help="more overrides")
    a = parser.parse_args()
    kinds = "weights, gradients, moments, activations, rest, copy of a save, fragments"
    print(f"| trainer | model | saves | said, MiB | took | said / took | {kinds} |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for layout in a.layouts:
        base = peak((*LAYOUTS[layout], *NOTHING, *a.words))
        for model in ["nano"] if a.quick else a.models:
            for save in a.saves:
                sizes = (f"model={model}", f"model.vocab_size={a.vocabulary}", f"data.seq_len={a.seq_len}")
                words = (
                    *LAYOUTS[layout],
                    *sizes,
                    f"save_strategy={save}",
                    *(["save_steps=2"] if save == "steps" else []),
                    *a.words,
                )
                took, said = peak(words) - base, planned(words)
                parts = ", ".join(f"{said[kind] / MIB:.0f}" for kind in KINDS[1:])
                cells = [layout, model, save, f"{said['memory'] / MIB:.0f}", f"{took / MIB:.0f}"]
                print("| " + " | ".join([*cells, f"{said['memory'] / took:.2f}", parts]) + " |", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Which learning rate and which rank: LoRA against whole weights from the same base, in equal steps.

    python scripts/bench/finetune_rates.py [--ranks 4 16 64] [--rates 1e-4 3e-4 1e-3] [--whole-rates 1e-5 1e-4]
        [--seeds 1 2 3] [--steps 100] [--out finetune_rates.jsonl]

The base is trained on the standard library first; then docstrings are learned, English that is installed with the
packages of this environment (``quality.py``). A line of ``--out`` for each run, which is not made again, and a table:
mean loss of held-out text over seeds, in nats per byte, and how far seeds deviate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from quality import prose

from forgather_cli import compose
from forgather_cli.run_dir import RunDir

SHAPE = ("model=nano", "hidden_size=96", "num_hidden_layers=3", "num_attention_heads=3")
SMALL = ("callbacks=minimal", "device=cpu", "precision=fp32", "eval_steps=100000", "async_save=false")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-3, 3e-3, 1e-2, 3e-2])
    parser.add_argument("--whole-rates", type=float, nargs="*", default=[1e-4, 3e-4, 1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("finetune_rates.jsonl"))
    return parser.parse_args()


def base(folder: Path, steps: int) -> Path:
    """A model directory, trained once for each number of steps."""
    run = RunDir(folder / f"base-{steps}")
    if not run.checkpoint_steps():
        words = (*SHAPE, *SMALL, "tokenizer=bytes", f"max_steps={steps}", "save_steps=100000")
        compose("default", *words, f"output_dir={run.root}").train()
    return run.checkpoint(run.checkpoint_steps()[-1]) / "model"


def loss(folder: Path, model: Path, rank: int, rate: float, seed: int, steps: int) -> float:
    """Of held-out text after ``steps`` steps; rank 0: of whole weights."""
    recipe = ["lora_finetune", f"adapter.r={rank}"] if rank else ["chat_finetune"]
    trainer = compose(
        *recipe, *SMALL, f"model.path={model}", "data=text", f"data.files=[{prose(folder)}]", "seq_len=256",
        "packing=concat", "gradient_checkpointing=false", "global_batch_size=4", f"max_steps={steps}",
        f"learning_rate={rate}", f"seed={seed}", "max_eval_samples=256", "save_strategy=no",
        f"output_dir={folder / 'run'}", "overwrite_output_dir=true",
    )  # fmt: skip
    trainer.train()
    return float(trainer.evaluate()["eval_loss"])


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    folder = Path(tempfile.gettempdir()) / "finetune_rates"
    folder.mkdir(exist_ok=True)
    known = {}
    if args.out.exists():
        for line in args.out.read_text().splitlines():
            row = json.loads(line)
            known[row["rank"], row["rate"], row["seed"], row["steps"], row["base"]] = row["loss"]
    model = base(folder, args.base_steps)
    wanted = [(0, rate) for rate in args.whole_rates] + [(rank, rate) for rank in args.ranks for rate in args.rates]
    found = defaultdict(list)
    for seed in args.seeds:
        for rank, rate in wanted:
            key = (rank, rate, seed, args.steps, args.base_steps)
            if key not in known:
                started = time.process_time()
                known[key] = loss(folder, model, *key[:-1])
                row = dict(zip(("rank", "rate", "seed", "steps", "base"), key, strict=True))
                with args.out.open("a") as file:
                    file.write(json.dumps({**row, "loss": known[key], "cpu": time.process_time() - started}) + "\n")
            found[rank, rate].append(known[key])
    for (rank, rate), losses in found.items():
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        print(f"{f'rank {rank}' if rank else 'whole':9s} {rate:7.0e}  {statistics.mean(losses):.4f} +- {spread:.4f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Quantization-aware training, then quantized, against training without it, then quantized.

    python scripts/bench/qat.py [--recipe int8-dynamic-act-int4-weight --seeds 3 --steps 400 --from 300] [overrides]

Quantization-aware training goes on from the other run's checkpoint at step ``--from`` (0: it is a run of its own), and
sees the same data in the same order. Prints a Markdown table of evaluation losses: of the plain checkpoint, and of its
quantized form.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from plain import PLAIN

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="int8-dynamic-act-int4-weight")
    parser.add_argument("--group-size", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--from", type=int, default=300, dest="start", help="the step at which rounding begins")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--samples", type=int, default=64, help="of the evaluation")
    return parser.parse_known_args()


def losses(args: argparse.Namespace, overrides: list[str], seed: int, precision: list[str], root: Path) -> list[float]:
    """[evaluation loss of the checkpoint, of its quantized form]."""
    from forgather_cli import worker
    from forgather_cli.config.load import load_config
    from forgather_cli.finalize.quantize import quantize_directory
    from forgather_cli.inference.evaluation import evaluate_source
    from forgather_cli.run_dir import RunDir

    words = [
        f"model={args.model}", f"max_steps={args.steps}", f"seed={seed}", "callbacks=minimal",
        f"save_steps={args.start or args.steps}", "save_total_limit=5", f"output_dir={root}",
        *PLAIN, *overrides,
    ]  # fmt: skip
    run = RunDir(root)
    worker.build(load_config(None, [*words, *precision, "eval_strategy=no"]).config, run).train()
    plain = run.checkpoint(run.checkpoint_steps()[-1]) / "model"
    quantized = root / "quantized"
    shutil.copytree(plain, quantized)
    quantize_directory(quantized, args.recipe, group_size=args.group_size)
    config = load_config(None, [*words, f"max_eval_samples={args.samples}"]).config
    return [evaluate_source(path, config)["eval_loss"] for path in (plain, quantized)]


def main() -> None:
    args, overrides = arguments()
    group = [] if args.group_size is None else [f"group_size={args.group_size}"]
    qat = ["precision=qat", f"qat_recipe={args.recipe}", *group]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            without = losses(args, overrides, seed, ["precision=fp32"], Path(folder) / f"fp32-{seed}")
            checkpoint = Path(folder) / f"fp32-{seed}" / "checkpoints" / f"step-{args.start:08d}"
            goes_on = [f"resume_from_checkpoint={checkpoint}"] if args.start else []
            with_qat = losses(args, overrides, seed, [*qat, *goes_on], Path(folder) / f"qat-{seed}")
            rows.append((*without, *with_qat))
    print(f"\n{args.recipe}, model={args.model}, {args.steps} steps, rounding from step {args.start}\n")
    print("| seed | fp32 | fp32, quantized | qat, unquantized | qat, quantized | gained by qat |")
    print("|---:|---:|---:|---:|---:|---:|")
    for seed, row in enumerate(rows):
        print(f"| {seed} | " + " | ".join(f"{loss:.4f}" for loss in row) + f" | {row[1] - row[3]:+.4f} |")
    means = [statistics.mean(column) for column in zip(*rows, strict=True)]
    print("| mean | " + " | ".join(f"{loss:.4f}" for loss in means) + f" | {means[1] - means[3]:+.4f} |")


if __name__ == "__main__":
    main()

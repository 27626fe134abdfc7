#!/usr/bin/env python
"""Sizes and perplexity of quantized models: every recipe of ``finalize --quantize`` on one model.

    python scripts/bench/quantize.py [--source MODEL_DIR] [--model tiny --steps 60 --vocab 4096] [overrides]

Without ``--source`` a model is trained briefly on the standard library's sources first. Prints a Markdown table; a
recipe that this machine cannot run is listed with the reason.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import get_args

from plain import PLAIN

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a plain model directory; default: train one")
    parser.add_argument("--model", default="tiny", help="what is trained")
    parser.add_argument("--vocab", type=int, default=257, help="tokens of a BPE; 257: bytes")
    parser.add_argument("--steps", type=int, default=60, help="of the training")
    parser.add_argument("--samples", type=int, default=64, help="of the evaluation")
    return parser.parse_known_args()


def trained(args: argparse.Namespace, overrides: list[str], root: Path) -> Path:
    """Train, and return the model's directory."""
    from forgather_cli import worker
    from forgather_cli.config.load import load_config
    from forgather_cli.run_dir import RunDir

    tokenizer = [] if args.vocab == 257 else ["tokenizer=bpe", f"bpe_vocab_size={args.vocab}"]
    words = [
        f"model={args.model}", *tokenizer, f"max_steps={args.steps}", "callbacks=minimal", "eval_strategy=no",
        f"output_dir={root}", *PLAIN, *overrides,
    ]  # fmt: skip
    run = RunDir(root)
    worker.build(load_config(None, words).config, run).train()
    return run.checkpoint(run.checkpoint_steps()[-1]) / "model"


def evaluated(directory: Path, args: argparse.Namespace) -> tuple[float, int]:
    """(perplexity, bytes of the weights)."""
    from forgather_cli.config.load import load_config
    from forgather_cli.inference.evaluation import evaluate_source

    config = load_config(None, [f"tokenizer={directory}", f"max_eval_samples={args.samples}"]).config
    metrics = evaluate_source(directory, config)
    return metrics["eval_perplexity"], sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def main() -> None:
    args, overrides = arguments()
    from forgather_cli.config.schema import QuantizeRecipe
    from forgather_cli.errors import SetupError
    from forgather_cli.finalize.quantize import quantize_directory

    with tempfile.TemporaryDirectory() as folder:
        source = args.source or trained(args, overrides, Path(folder) / "run")
        plain, size = evaluated(source, args)
        print(f"\n| recipe | MB | of fp32 | perplexity | ratio |\n|---|---:|---:|---:|---:|\n"
              f"| none | {size / 1e6:.2f} | 1.000 | {plain:.4f} | 1.0000 |")  # fmt: skip
        for recipe in get_args(QuantizeRecipe):
            directory = Path(folder) / recipe
            shutil.copytree(source, directory)
            try:
                quantize_directory(directory, recipe)
            except SetupError as error:
                print(f"| {recipe} | {str(error).partition(': ')[2].partition(';')[0]} | | | |")
                continue
            found, small = evaluated(directory, args)
            print(f"| {recipe} | {small / 1e6:.2f} | {small / size:.3f} | {found:.4f} | {found / plain:.4f} |")


if __name__ == "__main__":
    main()

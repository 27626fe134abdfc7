#!/usr/bin/env python
"""Training throughput of the options of ``precision`` beside fp32, in turns in one process.

    python scripts/bench/precision.py [--model 160m --tokens 8192 --seq-len 1024 --steps 20 --compile]

Prints a Markdown table: median seconds per step, tokens per second, the ratio to fp32, and the loss after the last step
on random tokens. Without a device that multiplies in float8, fp8 is emulated: then its time says nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VARIANTS: dict[str, list[str]] = {
    "fp32": ["precision=fp32"],
    "bf16": ["precision=bf16"],
    "fp8 tensorwise": ["precision=fp8"],
    "fp8 rowwise": ["precision=fp8", "fp8_recipe=rowwise"],
    "fp8 rowwise_with_gw_hp": ["precision=fp8", "fp8_recipe=rowwise_with_gw_hp"],
    "qat int8-dynamic-act-int4-weight": ["precision=qat"],
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="an option of the group model")
    parser.add_argument("--tokens", type=int, default=2048, help="per step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each variant, after 3 that are not")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true", help="torch_compile=true")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    return parser.parse_args()


class Variant:
    """A model in training under one option."""

    def __init__(self, args: argparse.Namespace, overrides: list[str]) -> None:
        import torch

        from forgather_cli.config.load import load_config
        from forgather_cli.models.build import build_model
        from forgather_cli.models.init import init_parameters
        from forgather_cli.strategies.build import build_strategy
        from forgather_cli.trainer.build import model_spec

        compiled = ["torch_compile=true"] if args.compile else []
        words = [f"model={args.model}", "model.qk_norm=false", "model.zero_init_outputs=false", f"device={args.device}"]
        words += [*overrides, *compiled]
        config = load_config(None, words).config
        self.strategy: Any = build_strategy(config)

        def build() -> Any:
            with torch.device("meta"):
                return build_model(config.model, vocab_size=50304, seq_len=args.seq_len)

        init = partial(init_parameters, seed=0, device_generator=True)
        self.strategy.materialize(model_spec(build, config, self.strategy, init=init))
        parameters = list(self.strategy.parts[0].parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=self.strategy.device.type == "cuda")
        self.seconds: list[float] = []
        self.loss = float("nan")

    def step(self, batch: dict[str, Any]) -> None:
        import torch

        device = self.strategy.device
        batch = {key: value.to(device) for key, value in batch.items()}
        targets = (batch["labels"][:, 1:] != -100).sum()
        start = time.perf_counter()
        share = self.strategy.forward_backward([batch], targets)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds.append(time.perf_counter() - start)
        self.loss = float(share)


def main() -> None:
    args = arguments()
    import torch

    from forgather_cli.distributed import pick_device
    from forgather_cli.hardware import has_float8

    device = pick_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    emulated = "" if has_float8(device) else "; fp8 is emulated"
    print(f"{name}, torch {torch.__version__}, model={args.model}, {args.tokens} tokens per step{emulated}\n")
    variants = {variant: Variant(args, VARIANTS[variant]) for variant in args.variants}
    numbers = torch.Generator().manual_seed(0)
    for _ in range(args.steps + 3):
        tokens = torch.randint(0, 50304, (args.tokens // args.seq_len, args.seq_len), generator=numbers)
        for variant in variants.values():
            variant.step({"input_ids": tokens, "labels": tokens})
    medians = {name: statistics.median(variant.seconds[3:]) for name, variant in variants.items()}
    first = next(iter(medians.values()))
    print(f"| precision | s/step | tok/s | times {args.variants[0]} | loss |\n|---|---:|---:|---:|---:|")
    for name, seconds in medians.items():
        print(
            f"| {name} | {seconds:.4f} | {args.tokens / seconds:,.0f} | {first / seconds:.2f} | "
            f"{variants[name].loss:.4f} |"
        )


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Cached greedy generation beside transformers' ``generate``: tokens per second of the same model at the same length.

    OMP_NUM_THREADS=2 python scripts/bench/generate.py
    python scripts/bench/generate.py --shapes 60m --batch 1 8 --prompt 32 --new 128 --reps 9

The two take turns in one process, with equal weights and equal tokens; medians, and quartiles of the ratio of each
turn. Above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from forgather_cli.config.schema import DecoderSettings
from forgather_cli.loss import model_logits
from forgather_cli.models.decoder import Decoder, resolve_decoder
from forgather_cli.models.generate import generate
from forgather_cli.models.init import init_parameters
from forgather_cli.models.pretrained import hf_config

SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "tiny": ({"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}, 4096),
    "gqa": ({"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}, 4096),
    "60m": ({"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}, 32000),
}
"""Settings and vocabulary."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["tiny", "gqa", "60m"], choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences at a time")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--new", type=int, default=96, help="tokens to make")
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--padded", action="store_true", help="prompts of different lengths, padded on the left")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def pair(shape: str, args: argparse.Namespace) -> tuple[Decoder, Any]:
    """Our decoder and transformers' model of the same weights."""
    import transformers

    options, vocab = SHAPES[shape]
    settings = resolve_decoder(DecoderSettings(**options), vocab_size=vocab, seq_len=args.prompt + args.new)
    ours = Decoder(settings)
    init_parameters(ours, 0)
    config = transformers.LlamaConfig(**hf_config(settings))
    theirs = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    theirs.load_state_dict(ours.state_dict())
    return ours.to(args.device).eval(), theirs.to(args.device).eval()


def prompts(shape: str, rows: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(B, T) tokens and mask."""
    ids = torch.randint(0, SHAPES[shape][1], (rows, args.prompt), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if args.padded:
        for row in range(rows):
            mask[row, : row * args.prompt // (2 * rows)] = 0
    return ids.to(args.device), mask.to(args.device)


def timed(run: Callable[[], Tensor], device: str) -> tuple[float, Tensor]:
    """Seconds of one call, and what it made."""
    start = time.perf_counter()
    made = run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start, made


def compare(shape: str, rows: int, ours: Decoder, theirs: Any, args: argparse.Namespace) -> None:
    """One line of the table."""
    ids, mask = prompts(shape, rows, args)

    def logits(batch: dict[str, Tensor], *, last_only: bool = False, cache: Any = None) -> Tensor:
        return model_logits(ours, batch, last_only=last_only, cache=cache)

    def mine() -> Tensor:
        return generate(logits, ids, mask, max_new_tokens=args.new, do_sample=False)

    def other() -> Tensor:
        options = {"max_new_tokens": args.new, "do_sample": False, "use_cache": True, "eos_token_id": None}
        made: Tensor = theirs.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        return made

    seconds: tuple[list[float], list[float]] = ([], [])
    for rep in range(args.reps + 1):
        made: list[Tensor] = [ids, ids]
        for which in (0, 1) if rep % 2 else (1, 0):
            took, made[which] = timed((mine, other)[which], args.device)
            if rep:  # the first round warms up
                seconds[which].append(took)
        if not torch.equal(*made):
            print(f"  {shape} x {rows}: the tokens differ, at {(made[0] != made[1]).any(0).nonzero()[0].item()}")
    tokens = rows * args.new
    ratios = [other / mine for mine, other in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    rates = [tokens / statistics.median(times) for times in seconds]
    print(f"{shape:8}{rows:>6}{rates[0]:>12.0f}{rates[1]:>14.0f}{middle:>9.2f}  ({low:.2f} to {high:.2f})", flush=True)


@torch.no_grad()
def main() -> None:
    args = arguments()
    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    threads = f", {torch.get_num_threads()} threads" if args.device == "cpu" else ""
    print(f"greedy, {args.prompt} + {args.new} tokens, fp32, {args.device}{threads}, {args.reps} turns, tokens/s")
    print(f"{'shape':8}{'batch':>6}{'ours':>12}{'transformers':>14}{'ratio':>9}  (quartiles)")
    for shape in args.shapes:
        ours, theirs = pair(shape, args)
        for rows in args.batch:
            compare(shape, rows, ours, theirs, args)


if __name__ == "__main__":
    main()

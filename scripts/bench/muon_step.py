#!/usr/bin/env python
"""What Muon costs: steps of one model with AdamW, with our Muon and with torch's, in turn in one process.

    python scripts/bench/muon_step.py                             # the default recipe's step: tiny, 2,048 bytes
    python scripts/bench/muon_step.py --model 60m --vocab 16384 --seq-len 1024 --rows 4 --accumulate 16 --reps 2

Prints the medians of the whole step (forward, backward, clipping, update) and of the update alone, in the
precision that ``precision=auto`` stands for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from forgather_cli.hardware import bf16_on


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--vocab", type=int, default=257)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--reps", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


class Arm:
    """A model with its optimizer; each arm has its own, so that none finds the caches warm of another."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        from forgather_cli.config.load import load_config
        from forgather_cli.models.build import build_model, initialize
        from forgather_cli.optim.build import build_optimizer

        optimizer = "adamw" if name == "adamw" else "muon"
        config = load_config(None, [f"model={args.model}", f"optimizer={optimizer}"]).config
        device = torch.device(args.device)
        self.args, self.name = args, name
        self.model = build_model(config.model, vocab_size=args.vocab, seq_len=args.seq_len).to(device)
        initialize(config.model, self.model, 0)
        self.optimizer: Any = build_optimizer(
            config.optimizer, list(self.model.named_parameters()), lr=1e-3, weight_decay=0.1
        )
        if name == "torch.optim.Muon":
            for n, each in enumerate(self.optimizer.optimizers):
                if isinstance(each, torch.optim.Muon):
                    parameters = [p for group in each.param_groups for p in group["params"]]
                    self.optimizer.optimizers[n] = torch.optim.Muon(parameters, lr=1e-3, adjust_lr_fn="match_rms_adamw")
        generator = torch.Generator().manual_seed(0)
        shape = (args.rows, args.seq_len + 1)
        self.ids = torch.randint(0, args.vocab, shape, generator=generator).to(device)
        self.whole: list[float] = []
        self.update: list[float] = []

    def now(self) -> float:
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> None:
        begin = self.now()
        for _ in range(self.args.accumulate):
            with torch.autocast(self.args.device, dtype=torch.bfloat16, enabled=bf16_on(self.args.device)[0]):
                logits = self.model(self.ids[:, :-1])
            F.cross_entropy(logits.float().flatten(0, 1), self.ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        between = self.now()
        for each in self.optimizer.optimizers:
            each.step()
        end = self.now()
        for each in self.optimizer.optimizers:
            each.zero_grad()
        self.whole.append((end - begin) * 1e3)
        self.update.append((end - between) * 1e3)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    arms = [Arm(name, args) for name in ("adamw", "muon", "torch.optim.Muon")]
    for rep in range(args.reps + 1):
        for arm in arms[rep % 3 :] + arms[: rep % 3]:
            arm.step()
    tokens = args.rows * args.seq_len * args.accumulate
    precision = "bf16" if bf16_on(args.device)[0] else "fp32"
    print(f"{args.model}, {tokens:,} tokens per step, {precision}, {args.threads} threads, medians of {args.reps}")
    base = statistics.median(arms[0].whole[1:])
    for arm in arms:
        whole, update = statistics.median(arm.whole[1:]), statistics.median(arm.update[1:])
        share = f"update{update:8.1f} ms, {update / whole:.1%}"
        print(f"{arm.name:18}{whole:10.1f} ms{whole / base:7.2f} of AdamW's; {share}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Head and loss: time and peak memory over base of forward and backward, plain against chunked.

    python scripts/bench/loss_memory.py [--tokens 2048 --vocab 50304 --width 512 --dtype fp32 --reps 5]

Each measurement is a process of its own; repetitions run the variants in turn. Prints medians and the ratio to plain.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VARIANTS = ("plain", "linear_cross_entropy", "torch")
"""``torch`` is F.linear_cross_entropy (torch 2.13), fp32 only: it does not follow autocast."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=256, help="tokens per chunk")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reps", type=int, default=5, help="processes per variant")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per process")
    parser.add_argument("--variants", nargs="+", default=["plain", "linear_cross_entropy"], choices=VARIANTS)
    parser.add_argument("--run", choices=VARIANTS, help="measure this one in this process")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> None:
    """One variant, here: ``peak_mb`` over base, median ``ms`` of wall and ``cpu_ms`` of process time."""
    import torch
    import torch.nn.functional as F

    from forgather_cli.loss import cross_entropy_sum, linear_cross_entropy_sum

    if args.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    hidden = torch.randn(1, args.tokens, args.width, device=args.device)
    weight = torch.empty(args.vocab, args.width, device=args.device).normal_(std=0.02).requires_grad_()
    labels = torch.randint(0, args.vocab, (1, args.tokens), device=args.device)
    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": lambda x: cross_entropy_sum(F.linear(x, weight), labels),
        "linear_cross_entropy": lambda x: linear_cross_entropy_sum(x, weight, labels, chunk_size=args.chunk),
        "torch": lambda x: F.linear_cross_entropy(
            x[0, :-1],
            weight,
            labels[0, 1:],
            reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=args.chunk),
        ),
    }
    loss_of = losses[args.run]
    autocast = torch.autocast(args.device, dtype=torch.bfloat16) if args.dtype == "bf16" else nullcontext()
    # load the matrix library and start autograd before the base is read
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()
    base, walls, cpus = memory_mb(args.device, peak=False), [], []
    for _ in range(args.steps + 1):
        x = hidden.clone().requires_grad_()
        weight.grad = None
        wall, cpu = time.perf_counter(), time.process_time()
        with autocast:
            loss = loss_of(x) / args.tokens
        loss.backward()
        if args.device == "cuda":
            torch.cuda.synchronize()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    print(
        f"RESULT peak_mb={memory_mb(args.device, peak=True) - base:.1f} ms={statistics.median(walls[1:]) * 1e3:.1f} "
        f"cpu_ms={statistics.median(cpus[1:]) * 1e3:.1f} loss={loss.item():.5f}"
    )


def memory_mb(device: str, *, peak: bool) -> float:
    """Now, or at the peak so far: resident memory of the process, or what is allocated on the GPU."""
    if device == "cuda":
        import torch

        return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:" if peak else "VmRSS:")[1].split()[0]) / 1024
    # elsewhere only the peak is known; it can begin with what the parent process had
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def compare(args: argparse.Namespace) -> None:
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.variants}
    shape = ("tokens", "vocab", "width", "chunk", "dtype", "device", "steps")
    options = [word for key in shape for word in (f"--{key}", str(getattr(args, key)))]
    for rep in range(args.reps):
        turn = rep % len(args.variants)
        for name in args.variants[turn:] + args.variants[:turn]:
            command = [sys.executable, __file__, "--run", name, *options]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
            results[name].append({k: float(v) for k, v in (pair.split("=") for pair in line.split()[1:])})
    print(f"{args.tokens} tokens, vocabulary {args.vocab}, width {args.width}, {args.dtype}, {args.device}")
    print(
        f"{'loss':22}{'runs':>5}{'peak over base MB':>19}"
        f"{'wall ms':>10}{'cpu ms':>10}{'wall ratio':>12}{'cpu ratio':>11}"
    )
    medians = {n: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for n, rs in results.items()}
    base = medians[args.variants[0]]
    for name, m in medians.items():
        ratios = f"{m['ms'] / base['ms']:>12.2f}{m['cpu_ms'] / base['cpu_ms']:>11.2f}"
        print(f"{name:22}{args.reps:>5}{m['peak_mb']:>19.0f}{m['ms']:>10.0f}{m['cpu_ms']:>10.0f}{ratios}")


if __name__ == "__main__":
    parsed = arguments()
    measure(parsed) if parsed.run else compare(parsed)

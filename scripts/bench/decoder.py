#!/usr/bin/env python
"""The decoder's speed: forward and backward beside transformers' Llama, and on CUDA beside a plain PyTorch loop.

    python scripts/bench/decoder.py                    # forward + backward, ours against transformers, fp32 and bf16
    python scripts/bench/decoder.py --train 160m 1b    # CUDA: tokens/s, MFU, peak memory of steps, bf16, compiled

Repetitions run the two models in turn in one process; medians and the ratio to the other model are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather_cli.config.schema import CrossEntropySettings, DecoderSettings, LinearCrossEntropySettings, RunSettings
from forgather_cli.loss.base import ModelWithLoss
from forgather_cli.loss.build import build_loss
from forgather_cli.models.decoder import Decoder, resolve_decoder
from forgather_cli.models.init import init_parameters
from forgather_cli.models.pretrained import hf_config
from forgather_cli.models.transform import compile_blocks

SHAPES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "pico": ({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}, 256, 4, 64),
    "tiny": ({"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}, 4096, 8, 256),
    "gqa": (
        {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2},
        4096,
        4,
        256,
    ),
    "160m": ({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}, 50304, 32, 1024),
    "1b": ({"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16}, 50304, 8, 2048),
}
"""Settings, vocabulary, sequences per step, tokens per sequence."""

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "4090": 165e12, "L40": 181e12}
"""Dense bf16 FLOP/s by part of the device's name (vendors' data sheets)."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["pico", "tiny", "gqa"], choices=SHAPES)
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--train", nargs="+", default=[], choices=SHAPES, help="time whole steps instead (CUDA)")
    parser.add_argument("--batch", type=int, help="sequences per step, instead of the shape's")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of --train")
    return parser.parse_args()


def settings_of(shape: str) -> DecoderSettings:
    options, vocab, _, seq_len = SHAPES[shape]
    return resolve_decoder(DecoderSettings(**options), vocab_size=vocab, seq_len=seq_len)


def tokens_of(shape: str, device: str, batch: int | None = None) -> Tensor:
    _, vocab, sequences, seq_len = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab, (batch or sequences, seq_len), generator=generator).to(device)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def autocast(device: str, bf16: bool) -> Any:
    return torch.autocast(device, dtype=torch.bfloat16) if bf16 else nullcontext()


def timed(step: Callable[[], None], device: str) -> tuple[float, float]:
    """Wall and process time of one call, in ms."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    synchronize(device)
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def beside_transformers(args: argparse.Namespace) -> None:
    import transformers

    print(f"forward + backward, {args.device}, {torch.get_num_threads()} threads, medians of {args.reps}")
    print(f"{'shape':8}{'dtype':6}{'ours ms':>10}{'theirs ms':>11}{'wall ratio':>12}{'cpu ratio':>11}{'of minima':>11}")
    for shape in args.shapes:
        settings, ids = settings_of(shape), tokens_of(shape, args.device, args.batch)
        ours = Decoder(settings).to(args.device)
        config = transformers.LlamaConfig(**{**hf_config(settings), "use_cache": False})
        theirs = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(args.device)
        theirs.load_state_dict(ours.state_dict())
        for bf16 in (False, True):

            def step(model: nn.Module, read: Callable[[Any], Tensor], bf16: bool = bf16, ids: Tensor = ids) -> None:
                model.zero_grad()
                with autocast(args.device, bf16):
                    logits = read(model(ids))
                logits.float().mean().backward()

            pair = (lambda: step(ours, lambda o: o), lambda: step(theirs, lambda o: o.logits))  # noqa: B023
            times: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
            for rep in range(args.reps + 2):
                for which in (0, 1) if rep % 2 else (1, 0):
                    times[which].append(timed(pair[which], args.device))
            (mine, my_cpu), (other, other_cpu) = ([[t[i] for t in ts[2:]] for i in (0, 1)] for ts in times)
            print(
                f"{shape:8}{'bf16' if bf16 else 'fp32':6}{statistics.median(mine):>10.2f}"
                f"{statistics.median(other):>11.2f}"
                f"{statistics.median(mine) / statistics.median(other):>12.2f}"
                f"{statistics.median(my_cpu) / statistics.median(other_cpu):>11.2f}{min(mine) / min(other):>11.2f}",
                flush=True,
            )


class PlainBlock(nn.Module):
    """A block as one writes it by hand: fused qkv and gate-up matrices."""

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        assert s.intermediate_size is not None
        d, self.heads = s.hidden_size, s.num_attention_heads
        self.n1, self.n2 = nn.RMSNorm(d, eps=s.rms_norm_eps), nn.RMSNorm(d, eps=s.rms_norm_eps)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate_up = nn.Linear(d, 2 * s.intermediate_size, bias=False)
        self.down = nn.Linear(s.intermediate_size, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PlainModel(nn.Module):
    """The same architecture in plain PyTorch, loss included."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        assert s.vocab_size is not None
        assert s.head_dim is not None
        assert s.max_position_embeddings is not None
        self.embed = nn.Embedding(s.vocab_size, s.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(s) for _ in range(s.num_hidden_layers))
        self.norm = nn.RMSNorm(s.hidden_size, eps=s.rms_norm_eps)
        self.head = nn.Linear(s.hidden_size, s.vocab_size, bias=False)
        freqs = 1.0 / s.rope_theta ** (torch.arange(0, s.head_dim, 2) / s.head_dim)
        angles = torch.outer(torch.arange(s.max_position_embeddings), freqs).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=s.initializer_range)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, labels = self.embed(batch["input_ids"]), batch["labels"]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets, reduction="sum")


def contestants(settings: DecoderSettings, device: str) -> dict[str, Callable[[], nn.Module]]:
    def own(option: Any) -> nn.Module:
        model = Decoder(settings).to(device)
        init_parameters(model, 0, device_generator=True)
        compile_blocks(model, RunSettings())
        return ModelWithLoss(model, build_loss(option))

    def plain() -> nn.Module:
        model = PlainModel(settings).to(device)
        for block in model.blocks:
            block.compile()
        return model

    return {
        "plain PyTorch": plain,
        "decoder": lambda: own(CrossEntropySettings()),
        "decoder, linear_cross_entropy": lambda: own(LinearCrossEntropySettings(chunk_size=2048)),
    }


def whole_steps(args: argparse.Namespace) -> None:
    if args.device != "cuda":
        sys.exit("--train needs CUDA")
    name = torch.cuda.get_device_name()
    peak = next((flops for part, flops in PEAK_BF16.items() if part in name), float("nan"))
    print(f"{name}, bf16 autocast, blocks compiled, fused AdamW, clipping, {args.steps} steps")
    print(f"{'shape':7}{'model':31}{'parameters':>12}{'ms/step':>9}{'tokens/s':>11}{'MFU':>7}{'peak GB':>9}{'loss':>8}")
    for shape in args.train:
        settings, ids = settings_of(shape), tokens_of(shape, args.device, args.batch)
        for label, build in contestants(settings, args.device).items():
            report(shape, label, build(), settings, ids, peak, args.steps)
            torch.cuda.empty_cache()


def report(shape: str, label: str, model: nn.Module, s: DecoderSettings, ids: Tensor, peak: float, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parameters = list(model.parameters())

    def step() -> Tensor:
        with autocast("cuda", True):
            total = model({"input_ids": ids, "labels": ids})
        loss: Tensor = total / ids[:, 1:].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    count = sum(p.numel() for p in parameters)
    # 6 (N - input embedding) + 12 L H T per token (PaLM, arXiv:2204.02311, appendix B)
    assert s.vocab_size is not None
    per_token = 6 * (count - s.vocab_size * s.hidden_size) + 12 * s.num_hidden_layers * s.hidden_size * ids.shape[1]
    rate = ids.numel() / seconds
    print(
        f"{shape:7}{label:31}{count / 1e6:>11.0f}M{seconds * 1e3:>9.1f}{rate:>11,.0f}{per_token * rate / peak:>7.1%}"
        f"{torch.cuda.max_memory_allocated() / 2**30:>9.1f}{loss.item():>8.3f}",
        flush=True,
    )


if __name__ == "__main__":
    parsed = arguments()
    if parsed.device == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    whole_steps(parsed) if parsed.train else beside_transformers(parsed)

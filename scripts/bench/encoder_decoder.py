"""The encoder-decoder: its rows' padding, how fast they are made, and a step beside transformers' T5 and T5Gemma.

    python scripts/bench/encoder_decoder.py data     # the standard library by the shipped mixture, one core
    python scripts/bench/encoder_decoder.py model    # forward + backward, one thread, fp32

``data``: padding of both sides over an epoch, and text tokens per second that become rows of tensors. ``model``:
repetitions run the models in turn in one process. They have one shape, but T5's layers have no norms of queries and
keys, and what counts is the ratio per FLOP: of the matrices and of the scores, forward and backward.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
VOCAB, ROWS, ENCODER, DECODER = 4096, 4, 256, 192
"""``ROWS`` of that many tokens on either side."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "model"))
    parser.add_argument("--reps", type=int, default=15, help="of model")
    parser.add_argument("overrides", nargs="*", default=[], help="of data: settings of data=ul2, as NAME=VALUE")
    return parser.parse_args()


def data(overrides: list[str]) -> None:
    from forgather_cli.config.load import load_config
    from forgather_cli.data.build import load_data
    from forgather_cli.models.pretrained import num_sentinels

    config = load_config(None, ["model=qwen3_encdec", "data=ul2", *overrides]).config
    rows = load_data(config.data, seed=0, num_sentinels=num_sentinels(config.model)).train
    filled, room, tokens, count = [0, 0], [0, 0], 0, 0
    wall, cpu = time.perf_counter(), time.process_time()
    for row in rows:
        for side, ids in enumerate(("document_ids", "decoder_document_ids")):
            filled[side] += int((row[ids] >= 0).sum())
            room[side] += row[ids].numel()
        count += 1
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = sum(filled)
    print(f"{count:,} rows of {room[0] // count:,} and {room[1] // count:,} tokens")
    print(
        f"padding {1 - filled[0] / room[0]:.1%} of the encoder's side, {1 - filled[1] / room[1]:.1%} of the decoder's"
    )
    print(f"{tokens / cpu / 1e6:.1f} million tokens per second and core ({tokens / wall / 1e6:.1f} by the clock)")


def model(reps: int) -> None:
    import torch
    import transformers
    from torch import Tensor, nn

    from forgather_cli.config.schema import EncoderDecoderSettings
    from forgather_cli.models.build import build_model
    from forgather_cli.models.init import init_parameters

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    generator = torch.Generator().manual_seed(0)
    ids, decoder_ids = (torch.randint(3, VOCAB, (ROWS, size), generator=generator) for size in (ENCODER, DECODER))
    ours = build_model(EncoderDecoderSettings(**SHAPE), vocab_size=VOCAB, seq_len=max(ENCODER, DECODER))
    init_parameters(ours, 0)
    width, heads, layers = SHAPE["hidden_size"], SHAPE["num_attention_heads"], SHAPE["num_hidden_layers"]
    t5 = transformers.T5Config(
        vocab_size=VOCAB, d_model=width, d_kv=width // heads, d_ff=SHAPE["intermediate_size"], num_layers=layers,
        num_heads=heads, dropout_rate=0.0, feed_forward_proj="gated-silu", use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    stack = transformers.T5GemmaModuleConfig(
        vocab_size=VOCAB, **SHAPE, num_key_value_heads=heads, head_dim=width // heads, hidden_activation="silu",
        query_pre_attn_scalar=width // heads, attn_logit_softcapping=None, final_logit_softcapping=None,
        layer_types=["full_attention"] * layers, use_cache=False,
    )  # fmt: skip
    gemma = transformers.T5GemmaConfig(encoder=stack.to_dict(), decoder=stack.to_dict(), vocab_size=VOCAB)
    models: dict[str, tuple[nn.Module, Callable[[Any], Tensor]]] = {
        "ours": (ours, lambda found: found),
        "T5": (transformers.T5ForConditionalGeneration(t5), lambda found: found.logits),
        "T5Gemma": (transformers.T5GemmaForConditionalGeneration(gemma), lambda found: found.logits),
    }

    def step(name: str) -> float:
        module, logits = models[name]
        module.zero_grad()
        start = time.perf_counter()
        logits(module(input_ids=ids, decoder_input_ids=decoder_ids)).float().mean().backward()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in models}
    order = list(models)
    for rep in range(reps + 2):
        for name in order[rep % len(order) :] + order[: rep % len(order)]:
            times[name].append(step(name))
    print(f"{ROWS} x ({ENCODER} + {DECODER}) tokens, fp32, {torch.get_num_threads()} threads, medians of {reps}")
    print(f"{'model':10}{'parameters':>12}{'GFLOP':>8}{'ms':>9}{'GFLOP/s':>9}{'ours over it, per FLOP':>24}")
    rates = {}
    for name, (module, _) in models.items():
        median = statistics.median(times[name][2:])
        rates[name] = flops(module, layers, width) / median / 1e9
        count = sum(p.numel() for p in module.parameters())
        print(
            f"{name:10}{count / 1e6:>11.2f}M{flops(module, layers, width) / 1e9:>8.1f}{median * 1e3:>9.1f}"
            f"{rates[name]:>9.1f}{rates[name] / rates['ours']:>24.2f}"
        )


def flops(module: Any, layers: int, width: int) -> float:
    """6 for each number of a linear layer and token of its side, 12 for each score and width (PaLM, arXiv:2204.02311,
    appendix B)."""
    from torch import nn

    total = 12 * layers * width * ROWS * (ENCODER**2 + DECODER**2 + ENCODER * DECODER)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            encodes = "encoder." in name or re.search(r"(cross_attn|EncDecAttention)\.[kv]", name)
            total += 6 * layer.weight.numel() * ROWS * (ENCODER if encodes else DECODER)
    return float(total)


if __name__ == "__main__":
    args = arguments()
    data(args.overrides) if args.what == "data" else model(args.reps)

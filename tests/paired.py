"""Small encoder-decoders and what they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from forgather_cli.config.schema import EncoderDecoderSettings, Ul2Settings
from forgather_cli.data.paired.denoise import Denoising, Example
from forgather_cli.data.tokens import ArrayFile, Tokens
from forgather_cli.models.build import build_model, initialize
from forgather_cli.models.encoder_decoder import Qwen3ForSeq2SeqLM
from forgather_cli.models.init import allocate

SHAPE = [
    "model=qwen3_encdec", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "num_key_value_heads=1",
    "num_sentinel_tokens=16",
]  # fmt: skip
WORDS = [
    *SHAPE, "global_batch_size=4", "per_device_train_batch_size=2", "per_device_eval_batch_size=2", "device=cpu",
    "callbacks=minimal", "logging_steps=1", "warmup_steps=1", "optimizer=adamw", "learning_rate=1e-3", "precision=fp32",
    "dataloader_drop_last=false", "cache_dir=cache",
]  # fmt: skip
UL2 = [
    "data=ul2", "source=text", "data.files=[corpus/*.txt]", "max_seq_length=96", "max_encoder_length=96",
    "max_decoder_length=64", "pack_encoder=128", "pack_decoder=96", "block_windows=8",
]  # fmt: skip


def model(vocab_size: int = 64, **settings: Any) -> Qwen3ForSeq2SeqLM:
    """Fresh or ``init_from`` a directory, in eval mode."""
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    option = EncoderDecoderSettings(**(settings if "init_from" in settings else shape | settings))
    with torch.device("meta"):
        made = build_model(option, vocab_size=vocab_size, seq_len=64)
    allocate(made, "cpu")
    initialize(option, made, 0)
    return made.eval()


def mixture(num_sentinels: int = 16, **settings: Any) -> Denoising:
    """Denoisers whose prefixes are tokens 90 to 94, sentinels 100 and on, the end 99."""
    values: dict[str, Any] = {"max_seq_length": 96, "max_encoder_length": 96, "max_decoder_length": 64} | settings
    option = Ul2Settings(**values)
    prefixes = [[90 + number] for number in range(len(option.mixture_of()))]
    return Denoising(option, prefixes=prefixes, first_sentinel=100, num_sentinels=num_sentinels, end=99)


def tokens(count: int) -> Tokens:
    """Ids 0 to 88."""
    drawn = torch.randint(0, 89, (count,), generator=torch.Generator().manual_seed(1))
    return Tokens([ArrayFile.of(drawn.numpy())])


def lists(example: Example) -> tuple[list[int], list[int]]:
    return example.source.tolist(), example.target.tolist()


def write_corpus() -> None:
    """Twelve texts in ./corpus, and pairs in ./pairs.jsonl."""
    Path("corpus").mkdir()
    for number in range(12):
        lines = [
            f"Line {line} of text {number}: {line * number} apples and {line + number} pears.\n" for line in range(12)
        ]
        Path(f"corpus/{number}.txt").write_text("".join(lines))
    pairs = [{"input": f"{a} plus {b}", "target": f"is {a + b}"} for a in range(12) for b in range(a, 12)]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))

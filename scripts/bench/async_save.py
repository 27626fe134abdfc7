"""Step times around a save: only the copy to host memory may hold training up.

    python scripts/bench/async_save.py

Trains a 60-million-parameter decoder for a few steps with two asynchronous and then two synchronous saves and prints
what steps take before, with and after the save. The first copy also takes the memory it goes to.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch

from forgather_cli import Trainer, TrainerCallback, TrainingArguments
from forgather_cli.config.schema import DecoderSettings
from forgather_cli.models.build import build_model
from forgather_cli.models.init import init_parameters

STEPS, SAVE_AT = 150, (10, 90)


class Trace(TrainerCallback):
    """Start of every step and the moment a publication is seen."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.published: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step in SAVE_AT

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.published.append(state.global_step)


class Samples:
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 8192, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def run(async_save: bool) -> Trace:
    settings = DecoderSettings(hidden_size=768, num_hidden_layers=7, num_attention_heads=12)
    model = build_model(settings, vocab_size=8192, seq_len=32)
    init_parameters(model, 0)
    trace = Trace()
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=1, save_strategy="steps", save_steps=10_000,
        async_save=async_save, logging_strategy="no", load_best_model_at_end=False,
    )  # fmt: skip
    Trainer(model, args, None, Samples(), callbacks=[trace]).train()
    return trace


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for async_save in (True, False):
        trace = run(async_save)
        times = [(b - a) * 1e3 for a, b in zip(trace.starts, trace.starts[1:], strict=False)]
        starts, ends = SAVE_AT, trace.published[: len(SAVE_AT)]
        saving = {step for a, b in zip(starts, ends, strict=True) for step in range(a + 1, b + 1)}
        usual = [t for n, t in enumerate(times, 1) if n not in saving and n not in starts]
        during = [t for n, t in enumerate(times, 1) if n in saving]
        print(f"async_save={str(async_save).lower()}: a usual step takes {statistics.median(usual):.0f} ms (median)")
        for a, b in zip(starts, ends, strict=True):
            print(f"  with the save after step {a}: {times[a - 1]:.0f} ms; published by the end of step {b}")
        if during:
            print(f"  while it is written: {statistics.median(during):.0f} ms (median), {max(during):.0f} ms (largest)")


if __name__ == "__main__":
    main()

"""Step times around a save: what training notices of it.

    python scripts/bench/async_save.py [--rows 4] [--length 128]

Trains a 60-million-parameter decoder with asynchronous and then with synchronous saves, ROWS sequences of LENGTH tokens
a step, and prints how long the step with the save and each of the ten behind it take, by the median over the saves, as
multiples of the steps farther from one. The first copy also takes the memory it goes to. Published: seconds after that
step began.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

import torch

from forgather_cli import Trainer, TrainerCallback, TrainingArguments
from forgather_cli.checkpoint import save
from forgather_cli.config.schema import DecoderSettings
from forgather_cli.models.build import build_model
from forgather_cli.models.init import init_parameters

EVERY, NEAR, FAR = 44, 10, 34
"""A save after so many steps; the steps behind it that are looked at; the first one that it cannot reach."""
save.PATIENCE = 60.0  # seconds that writing may take, as where saves are four minutes apart


class Trace(TrainerCallback):
    """Start of every step and the moment a publication is seen."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.published: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.starts.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step % EVERY == 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.published.append(time.perf_counter())


class Samples:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 8192, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def run(async_save: bool, saves: int, rows: int, length: int) -> Trace:
    settings = DecoderSettings(hidden_size=768, num_hidden_layers=7, num_attention_heads=12)
    model = build_model(settings, vocab_size=8192, seq_len=length)
    init_parameters(model, 0)
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=(saves + 1) * EVERY - 1, per_device_train_batch_size=rows, save_strategy="steps",
            save_steps=10_000, save_total_limit=1, async_save=async_save, logging_strategy="no",
            load_best_model_at_end=False,
        )  # fmt: skip
        Trainer(model, args, None, Samples(length), callbacks=[trace]).train()
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    for async_save, saves in ((True, 6), (False, 3)):
        trace = run(async_save, saves, given.rows, given.length)
        times = {n: b - a for n, (a, b) in enumerate(itertools.pairwise(trace.starts), 1)}
        usual = statistics.median(time for n, time in times.items() if n > EVERY and n % EVERY >= FAR)
        behind = [statistics.median(times[n * EVERY + k] / usual for n in range(1, saves + 1)) for k in range(NEAR + 1)]
        taken = statistics.median(
            seen - trace.starts[n * EVERY - 1] for n, seen in enumerate(trace.published[:saves], 1)
        )
        print(
            f"async_save={str(async_save).lower()}: a usual step takes {usual * 1e3:.0f} ms; as multiples of it, the "
            f"step with a save {behind[0]:.2f} (the first {times[EVERY] / usual:.2f}), the longest of the ten behind "
            f"{max(behind[1:]):.2f}, the mean of all {statistics.mean(behind):.2f}; published after {taken:.0f} s"
        )


if __name__ == "__main__":
    main()

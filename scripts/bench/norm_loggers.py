"""What GradNormLogger and ParameterNormLogger (L2) add to a training step when both measure and write at every step.

    python scripts/bench/norm_loggers.py [--models nano,tiny] [--blocks 12] [--steps 10] [--ranks 2 trainer=fsdp2]

In one run per model, blocks of steps with and without the loggers alternate; 8 sequences of 256 tokens per step, one
thread per rank, gloo. A step is the time from one on_step_begin to the next, on rank 0; its CPU time leaves out what
the machine does for others meanwhile. Medians over blocks of each kind, and of the ratios of neighbouring blocks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plain import PLAIN

WARM_UP = 5  # steps left out
VOCABULARY = 257


def run_rank(model: str, blocks: int, steps: int, overrides: list[str]) -> None:
    """In a rank: train, and print what rank 0 measured."""
    import torch

    from forgather_cli import Trainer
    from forgather_cli.callbacks.base import TrainerCallback
    from forgather_cli.callbacks.grad_norms import GradNormLogger
    from forgather_cli.callbacks.parameter_norms import ParameterNormLogger
    from forgather_cli.config.load import load_config
    from forgather_cli.config.schema import GradNormSettings, ParameterNormSettings
    from forgather_cli.models.build import build_model
    from forgather_cli.models.init import init_parameters
    from forgather_cli.run_dir import RunDir

    class Alternately(TrainerCallback):
        """The loggers in every second block, and the times of all steps."""

        def __init__(self, run: RunDir) -> None:
            self.gradients = GradNormLogger(GradNormSettings(every=1), run)
            self.parameters = ParameterNormLogger(ParameterNormSettings(log_spectral_norms=False), run)
            self.marks: list[tuple[float, float]] = []

        def on_train_begin(self, *event: Any, **kwargs: Any) -> None:
            self.gradients.on_train_begin(*event, **kwargs)
            self.parameters.on_train_begin(*event, **kwargs)

        def on_step_begin(self, *event: Any, **kwargs: Any) -> None:
            self.marks.append((time.perf_counter(), time.process_time()))
            self.active = (len(self.marks) - 1 - WARM_UP) // steps % 2 == 1

        def on_pre_optimizer_step(self, *event: Any, **kwargs: Any) -> None:
            if self.active:
                self.gradients.on_pre_optimizer_step(*event, **kwargs)

        def on_step_end(self, *event: Any, **kwargs: Any) -> None:
            if self.active:
                self.gradients.on_step_end(*event, **kwargs)
                self.parameters.on_evaluate(*event, **kwargs)

    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        last = WARM_UP + 2 * blocks * steps + 1
        words = [
            f"model={model}", "data=synthetic", "callbacks=minimal", "eval_strategy=no", "save_strategy=no",
            *PLAIN,
            "device=cpu", "global_batch_size=8", f"max_steps={last}", f"output_dir={folder}", *overrides,
        ]  # fmt: skip
        config = load_config(None, words).config
        alternately = Alternately(RunDir(Path(folder)))
        tokens = torch.randint(0, VOCABULARY, (512, 256), generator=torch.Generator().manual_seed(0))
        trainer = Trainer(
            model_init=lambda: build_model(config.model, vocab_size=VOCABULARY, seq_len=256),
            init_weights=init_parameters,
            args=config,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[alternately],
        )
        trainer.train()
    if trainer.run.world.rank == 0:
        name = " ".join([model, *overrides])
        print("RESULT", row(name, trainer.num_parameters[0], alternately.marks[WARM_UP:], blocks, steps), flush=True)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def row(name: str, parameters: int, marks: list[tuple[float, float]], blocks: int, steps: int) -> str:
    """Of the first 2 x blocks x steps steps between ``marks``, (wall clock, CPU) in seconds."""
    cells = [name, f"{parameters / 1e6:.2f} M"]
    for clock in (0, 1):
        times = [(b[clock] - a[clock]) * 1e3 for a, b in itertools.pairwise(marks)]
        each = [statistics.median(times[n * steps : (n + 1) * steps]) for n in range(2 * blocks)]
        ratios = [each[n + 1] / each[n] for n in range(0, 2 * blocks, 2)]
        cells += [f"{statistics.median(each[kind::2]):.2f}" for kind in (0, 1)]
        cells.append(f"{(statistics.median(ratios) - 1) * 100:+.1f} %")
    return "| " + " | ".join(cells) + " |"


def measure(model: str, a: argparse.Namespace) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {
        **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(a.ranks), "LOCAL_WORLD_SIZE": str(a.ranks),
    }  # fmt: skip
    command = [sys.executable, __file__, "--run", model, "--blocks", str(a.blocks), "--steps", str(a.steps)]
    processes = [
        subprocess.Popen(
            [*command, *a.overrides], stdout=None if rank else subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(a.ranks)
    ]  # fmt: skip
    output = processes[0].communicate()[0]
    for process in processes:
        process.wait()
    found = [line[7:] for line in output.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise SystemExit(f"{model} on {a.ranks} ranks failed")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="nano,tiny")
    parser.add_argument("--blocks", type=int, default=12, help="of each kind")
    parser.add_argument("--steps", type=int, default=10, help="per block")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of the recipe, for example trainer=ddp")
    a = parser.parse_args()
    if a.run:
        run_rank(a.run, a.blocks, a.steps, a.overrides)
        return
    print("| model | parameters | step, ms | with both | over it | its CPU time, ms | with both | over it |")
    print("|---|---|---|---|---|---|---|---|")
    for model in a.models.split(","):
        print(measure(model, a), flush=True)


if __name__ == "__main__":
    main()

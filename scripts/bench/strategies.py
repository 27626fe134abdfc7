"""What a step of the Trainer costs under ddp, fsdp2 and pipeline on gloo ranks, beside plain PyTorch loops.

    python scripts/bench/strategies.py [--only ddp,fsdp2,pipeline] [--steps 60] [--reps 7] [--ranks 2]

All train the same decoder on the same global batch: forward, backward, clipping to 1.0 by the global norm, fused AdamW,
a linear schedule, a loss read every 10 steps; no evaluation, no checkpoint, no progress display. The peers are loops of
a page each: DDP, ``fully_shard`` per layer, ``PipelineStage`` with ``Schedule1F1B``; for ddp also accelerate and
transformers' Trainer, where they are installed.

A step is the time between two steps of rank 0's optimizer; every rank is a process with one thread. Runs of a strategy
are interleaved and rotated; the table has medians over repetitions, and the median of each repetition's ratio to plain.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

SHAPE = {"layers": 4, "width": 256, "heads": 4, "mlp": 688, "seq": 64, "batch": 8, "vocab": 257}
"""``batch``: sequences of a step over all ranks."""
MICRO_BATCHES = 4  # of a pipeline's step
WARM_UP = 10  # steps left out
LOG_EVERY = 10
RUNNERS = {
    "ddp": ("plain", "forgather", "accelerate", "hf-trainer"),
    "fsdp2": ("plain", "forgather"),
    "pipeline": ("plain", "forgather"),
}
NEEDS = {"accelerate": "accelerate", "hf-trainer": "transformers"}


class Clock:
    """Times of this process's optimizer steps."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.times: list[float] = []
        self.cpu_times: list[float] = []
        register_optimizer_step_post_hook(self._tick)

    def _tick(self, *_: Any) -> None:
        self.times.append(time.perf_counter())
        self.cpu_times.append(time.process_time())

    def report(self) -> None:
        gaps, cpu = (
            statistics.median(b - a for a, b in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False))
            for times in (self.times, self.cpu_times)
        )
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print("RESULT", json.dumps({"step_ms": gaps * 1e3, "cpu_ms": cpu * 1e3, "rss_mb": rss}), flush=True)


class Samples:
    """Map-style dicts, as a user's dataset would be; repeats 64 batches of random tokens."""

    def __init__(self, length: int, seed: int = 1) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, SHAPE["vocab"], (64 * SHAPE["batch"], SHAPE["seq"]), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.tokens[index % len(self.tokens)]
        return {"input_ids": row, "labels": row}


def decoder() -> Any:
    from forgather_cli.config.schema import DecoderSettings
    from forgather_cli.models.build import build_model

    settings = DecoderSettings(
        hidden_size=SHAPE["width"],
        intermediate_size=SHAPE["mlp"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
    )
    return build_model(settings, vocab_size=SHAPE["vocab"], seq_len=SHAPE["seq"])


def filled(model: Any) -> Any:
    from forgather_cli.models.init import init_parameters

    init_parameters(model, 0)
    return model


def loss_of(logits: Any, labels: Any) -> Any:
    """Shifts the labels rather than the logits, which saves every peer a copy of them."""
    from torch.nn.functional import cross_entropy, pad

    return cross_entropy(logits.flatten(0, 1), pad(labels[:, 1:], (0, 1), value=-100).flatten())


class WithLoss:
    """Builds a module that returns the loss itself, which a wrapper, accelerate and transformers' Trainer can train."""

    def __new__(cls, model: Any) -> Any:
        from torch import nn

        class Module(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
                return {"loss": loss_of(self.model(input_ids), labels)}

        return Module()


def plain_optimizer(model: Any, steps: int) -> tuple[Any, Any]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def batches(steps: int, size: int, seed: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(Samples(steps * size, seed), batch_size=size, shuffle=True)


# ------------------------------------------------------------------------------------------------------------ peers


def run_plain_ddp(steps: int) -> None:
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(WithLoss(filled(decoder())), gradient_as_bucket_view=True)
    data_parallel_loop(model, steps, dist.get_world_size(), dist.get_rank())


def run_plain_fsdp2(steps: int) -> None:
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = WithLoss(filled(decoder()))
    for layer in model.model.model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    data_parallel_loop(model, steps, dist.get_world_size(), dist.get_rank())


def data_parallel_loop(model: Any, steps: int, ranks: int, rank: int) -> None:
    import torch

    optimizer, scheduler = plain_optimizer(model, steps)
    model.train()
    total: Any = 0.0
    for n, batch in enumerate(batches(steps, SHAPE["batch"] // ranks, rank), 1):
        loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = total + loss.detach()
        if n % LOG_EVERY == 0:
            float(total)
            total = 0.0


def run_plain_pipeline(steps: int) -> None:
    import torch
    from torch import distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == ranks - 1
    model = filled(decoder())
    ends = [SHAPE["layers"] * stage // ranks for stage in range(ranks + 1)]
    model.cut(ends[rank], ends[rank + 1] - 1, is_first=is_first, is_last=is_last)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer, scheduler = plain_optimizer(model, steps)
    model.train()
    total: Any = 0.0
    for n, batch in enumerate(batches(steps, SHAPE["batch"], 0), 1):
        losses: list[Any] = []
        schedule.step(
            *([batch["input_ids"]] if is_first else []),
            **({"target": batch["labels"], "losses": losses} if is_last else {}),
        )
        clip_over_stages(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = total + sum(losses)
        if n % LOG_EVERY == 0:
            float(total)
            total = 0.0


def clip_over_stages(model: Any, max_norm: float) -> None:
    import torch
    from torch import distributed as dist

    parameters = list(model.parameters())
    square = torch.nn.utils.get_total_norm([p.grad for p in parameters]).square()
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, square.sqrt())


def run_accelerate_ddp(steps: int) -> None:
    import torch
    from accelerate import Accelerator
    from torch import distributed as dist

    accelerator = Accelerator(cpu=True)
    model = WithLoss(filled(decoder()))
    optimizer, scheduler = plain_optimizer(model, steps)
    loader = batches(steps * dist.get_world_size(), SHAPE["batch"] // dist.get_world_size(), 1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    total: Any = 0.0
    for n, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total = total + loss.detach()
        if n % LOG_EVERY == 0:
            float(total)
            total = torch.zeros(())


def run_hf_trainer_ddp(steps: int) -> None:
    import contextlib
    import io

    from torch import distributed as dist
    from transformers import Trainer, TrainingArguments, default_data_collator

    ranks = dist.get_world_size()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=SHAPE["batch"] // ranks,
        learning_rate=1e-3, logging_steps=LOG_EVERY, save_strategy="no", eval_strategy="no", max_grad_norm=1.0,
        lr_scheduler_type="linear", optim="adamw_torch_fused", use_cpu=True, disable_tqdm=True, report_to=[],
        dataloader_pin_memory=False, ddp_backend="gloo", ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(
        model=WithLoss(filled(decoder())), args=arguments, train_dataset=Samples(steps * SHAPE["batch"]),
        data_collator=default_data_collator,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()


# ------------------------------------------------------------------------------------------------------------- ours


def run_forgather(strategy: str, steps: int, ranks: int) -> None:
    from forgather_cli import Trainer
    from forgather_cli.config.load import load_config
    from forgather_cli.models.init import init_parameters

    overrides = [
        f"trainer={strategy}", f"nproc_per_node={ranks}", f"global_batch_size={SHAPE['batch']}", f"max_steps={steps}",
        f"output_dir={tempfile.mkdtemp()}", "eval_strategy=no", "save_strategy=no", "lr_scheduler=linear",
        f"logging_steps={LOG_EVERY}", "learning_rate=1e-3", "max_grad_norm=1.0", "callbacks=minimal", "data=synthetic",
    ]  # fmt: skip
    if strategy == "pipeline":
        overrides += [f"n_microbatches={MICRO_BATCHES}", f"model.num_hidden_layers={SHAPE['layers']}"]
    trainer = Trainer(
        model_init=decoder,
        init_weights=init_parameters,
        args=load_config(None, overrides).config,
        train_dataset=Samples(steps * SHAPE["batch"]),
    )
    trainer.train()


# -------------------------------------------------------------------------------------------------------- measuring


def run_one(strategy: str, runner: str, steps: int) -> None:
    """In a rank: train, and tell what rank 0 measured."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    clock = Clock()
    if runner == "forgather":
        run_forgather(strategy, steps, dist.get_world_size())
    else:
        globals()[f"run_{runner.replace('-', '_')}_{strategy}"](steps)
    if dist.get_rank() == 0:
        clock.report()
    dist.barrier()
    dist.destroy_process_group()


def measure(strategy: str, runner: str, steps: int, ranks: int) -> dict[str, float] | None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    command = [sys.executable, __file__, "--run", f"{strategy}:{runner}", "--steps", str(steps)]
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            output = processes[0].communicate(timeout=600)[0]
        except subprocess.TimeoutExpired:
            output = ""
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        for process in processes:
            if not lines:
                process.kill()
            process.communicate()
        if not lines:
            errors.seek(0)
            print(f"{strategy} {runner} failed: {errors.read()[-1500:]}", file=sys.stderr)
            return None
    result: dict[str, float] = json.loads(lines[-1][7:])
    return result


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> None:
    """Medians, and the median over repetitions of the ratio to the plain loop of the same repetition."""
    print("| strategy | runner | step, ms | over plain | its CPU time, ms | over plain | peak RSS of rank 0, MB |")
    print("|---|---|---|---|---|---|---|")
    for strategy, runners in results.items():
        for runner, runs in runners.items():
            plain = runners.get("plain", [])
            cells = [strategy, runner]
            for key in ("step_ms", "cpu_ms"):
                cells += [f"{statistics.median(run[key] for run in runs):.2f}", ratio(runs, plain, key)]
            print("| " + " | ".join([*cells, f"{statistics.median(run['rss_mb'] for run in runs):.0f}"]) + " |")


def ratio(runs: list[dict[str, float]], plain: list[dict[str, float]], key: str) -> str:
    if runs is plain or not plain:
        return ""
    ratios: Iterable[float] = (run[key] / base[key] for run, base in zip(runs, plain, strict=False))
    return f"{(statistics.median(ratios) - 1) * 100:+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RUNNERS))
    parser.add_argument("--runners", default="plain,forgather,accelerate,hf-trainer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.run:
        run_one(*a.run.split(":"), a.steps)
        return
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for strategy in a.only.split(","):
        names = [n for n in RUNNERS[strategy] if n in a.runners.split(",")]
        names = [n for n in names if n not in NEEDS or importlib.util.find_spec(NEEDS[n])]
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for rep in range(a.reps):
            shift = rep % len(names)
            for name in names[shift:] + names[:shift]:
                result = measure(strategy, name, a.steps, a.ranks)
                if result:
                    runs[name].append(result)
        results[strategy] = {name: each for name, each in runs.items() if each}
    table(results)


if __name__ == "__main__":
    main()

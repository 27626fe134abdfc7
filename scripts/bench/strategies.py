"""What a step of the Trainer costs under ddp, fsdp2 and pipeline on gloo ranks, beside plain PyTorch loops.

    python scripts/bench/strategies.py [--only ddp,fsdp2,pipeline] [--blocks 20] [--reps 3] [--ranks 2] [--quick]

All train the same decoder on the same global batch: forward, backward, clipping to 1.0 by the global norm, fused AdamW,
a linear schedule, a loss read every 10 steps; no evaluation, no checkpoint, no progress display. The peers are loops of
a page each: DDP, ``fully_shard`` per layer, ``PipelineStage`` with ``Schedule1F1B``; for ddp also accelerate and
transformers' Trainer, where they are installed.

Machines slow down for seconds and minutes, so all runners of a strategy live in the same rank processes, as threads
that take turns, ten steps each. A step is the time between two steps of an optimizer on rank 0, one thread per process;
the ratio is that of a block to the plain loop's block of the same round, its median over all rounds, and the quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from turns import BLOCK, Turns, in_turns, ratio

SHAPE = {"layers": 4, "width": 256, "heads": 4, "mlp": 688, "seq": 64, "batch": 8, "vocab": 257}
"""``batch``: sequences of a step over all ranks."""
MICRO_BATCHES = 4  # of a pipeline's step
WARM_UP = 2  # rounds left out
LOG_EVERY = 10
RUNNERS = {
    "ddp": ("plain", "forgather", "accelerate", "hf-trainer"),
    "fsdp2": ("plain", "forgather"),
    "pipeline": ("plain", "forgather"),
}
NEEDS = {"accelerate": "accelerate", "hf-trainer": "transformers"}


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
        "callbacks.progress=null", "optimizer=adamw", "precision=fp32",
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


def run_all(strategy: str, names: tuple[str, ...], blocks: int) -> None:
    """In a rank: all runners by turns; rank 0 tells what it measured."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = (blocks + WARM_UP) * BLOCK

    def run(name: str) -> None:
        torch.set_num_threads(1)  # the setting is each thread's own
        if name == "forgather":
            run_forgather(strategy, steps, dist.get_world_size())
        else:
            globals()[f"run_{name.replace('-', '_')}_{strategy}"](steps)

    turns = Turns(names)
    in_turns(turns, run)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps({name: found[WARM_UP:] for name, found in turns.blocks.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(strategy: str, names: tuple[str, ...], blocks: int, ranks: int) -> dict[str, list[list[float]]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    command = [sys.executable, __file__, "--run", strategy, "--runners", ",".join(names), "--blocks", str(blocks)]
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                command, stdout=None if rank else subprocess.PIPE, stderr=errors, text=True,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        output = processes[0].communicate()[0]
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        for process in processes:
            if not lines:
                process.kill()
            process.wait()
        if not lines:
            errors.seek(0)
            raise SystemExit(f"{strategy} failed: {errors.read()[-3000:]}")
    result: dict[str, list[list[float]]] = json.loads(lines[-1][7:])
    return result


def print_rows(strategy: str, runners: dict[str, list[list[float]]]) -> None:
    for runner, rounds in runners.items():
        cells = [strategy, runner]
        for column in (0, 1):
            mine, plain = ([each[column] for each in found] for found in (rounds, runners["plain"]))
            cells += [f"{statistics.median(mine) * 1e3:.2f}", "" if runner == "plain" else ratio(mine, plain)]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RUNNERS))
    parser.add_argument("--runners", default="plain,forgather,accelerate,hf-trainer")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two blocks of each: whether it works")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    a = parser.parse_args()
    wanted = tuple(a.runners.split(","))
    if a.run:
        run_all(a.run, wanted, a.blocks)
        return
    if a.quick:
        a.blocks, a.reps = 2, 1
    print("| strategy | runner | step, ms | over plain (quartiles) | CPU time of rank 0, ms | over plain (quartiles) |")
    print("|---|---|---|---|---|---|", flush=True)
    for strategy in a.only.split(","):
        names = tuple(
            n for n in RUNNERS[strategy] if n in wanted and (n not in NEEDS or importlib.util.find_spec(NEEDS[n]))
        )
        runs: dict[str, list[list[float]]] = {name: [] for name in names}
        for rep in range(a.reps):
            order = names[rep % len(names) :] + names[: rep % len(names)]
            for name, rounds in measure(strategy, order, a.blocks, a.ranks).items():
                runs[name] += rounds
            print(f"{strategy}: {rep + 1} of {a.reps} done", file=sys.stderr, flush=True)
        print_rows(strategy, {name: runs[name] for name in RUNNERS[strategy] if name in runs})


if __name__ == "__main__":
    main()

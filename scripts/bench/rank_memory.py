"""What each rank holds under fsdp2 and pipeline in the second step: weights, gradients, moments, by their storage.

    python scripts/bench/rank_memory.py [--model 60m]

Storages are counted once, whatever views them. fsdp2 is compared with the whole model's bytes divided by the ranks, a
pipeline with the bytes of the rank's own layers in the whole model, a tied embedding at both of its ends.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from plain import PLAIN

MIB = 2**20
VOCABULARY = 32000
LAYOUTS = (
    ("fsdp2", 2, ()),
    ("fsdp2", 4, ()),
    ("pipeline", 2, ("schedule=1F1B",)),
    ("pipeline", 4, ("schedule=1F1B",)),
    ("pipeline", 2, ("schedule=ZBVZeroBubble",)),
)


def storage_bytes(tensors: Iterable[Any]) -> int:
    from forgather_cli.shards import local

    storages = {local(t).untyped_storage().data_ptr(): local(t).untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def run_rank(model: str, trainer_type: str, settings: list[str]) -> None:
    """In a rank: train two steps and tell what is held."""
    import torch
    from torch import distributed as dist

    from forgather_cli import Trainer
    from forgather_cli.callbacks.base import TrainerCallback
    from forgather_cli.config.load import load_config
    from forgather_cli.models.build import build_model
    from forgather_cli.models.init import init_parameters

    held: dict[str, int] = {}

    class Weighs(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            parameters = [p for part in kwargs["trainer"].strategy.parts for p in part.parameters()]
            held["weights"] = storage_bytes(parameters)
            held["gradients"] = storage_bytes(p.grad for p in parameters if p.grad is not None)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            held["moments"] = storage_bytes(t for t in kwargs["optimizer"].state_tensors().values() if t.ndim)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    overrides = [
        f"model={model}", "data=synthetic", "global_batch_size=8", "max_steps=2", f"output_dir={tempfile.mkdtemp()}",
        f"trainer={trainer_type}", *settings, f"nproc_per_node={dist.get_world_size()}",
        "eval_strategy=no", "save_strategy=no", "callbacks=minimal",
        *PLAIN,
    ]  # fmt: skip
    config = load_config(None, overrides).config
    tokens = torch.randint(0, VOCABULARY, (16, 32), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model_init=lambda: build_model(config.model, vocab_size=VOCABULARY, seq_len=32),
        init_weights=init_parameters,
        args=config,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Weighs()],
    )
    trainer.train()
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (held, shapes(trainer)))
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(shares), flush=True)
    dist.destroy_process_group()


def shapes(trainer: Any) -> dict[str, int]:
    """Bytes of each full tensor that this rank holds a part of."""
    return {n: p.numel() * p.element_size() for part in trainer.strategy.parts for n, p in part.state_dict().items()}


def measure(model: str, trainer: str, ranks: int, settings: tuple[str, ...]) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--model", model, "--run", trainer, *settings]
    processes = [
        subprocess.Popen(
            command, stdout=None if rank else subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    output = processes[0].communicate()[0]
    for process in processes:
        process.wait()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{trainer} on {ranks} ranks failed")
    result: list[Any] = json.loads(lines[-1][7:])
    return result


def report(trainer: str, settings: tuple[str, ...], shares: list[Any]) -> None:
    whole = {name: size for _, full in shares for name, size in full.items()}
    for rank, (held, full) in enumerate(shares):
        share = sum(whole.values()) / len(shares) if trainer == "fsdp2" else sum(full.values())
        sizes = [held["weights"], held["gradients"], held["moments"]]
        expected = 4 * share  # weights, gradients and AdamW's two moments
        cells = [f"{trainer} {' '.join(settings)}".strip(), str(len(shares)), str(rank)]
        cells += [f"{size / MIB:.1f}" for size in (*sizes, sum(sizes), expected)]
        print("| " + " | ".join([*cells, f"{(sum(sizes) / expected - 1) * 100:+.1f} %"]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="60m")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.run:
        run_rank(a.model, a.run[0], a.run[1:])
        return
    print("| strategy | ranks | rank | weights, MiB | gradients | moments | together | its share | over it |")
    print("|---|---|---|---|---|---|---|---|---|")
    for trainer, ranks, settings in LAYOUTS:
        report(trainer, settings, measure(a.model, trainer, ranks, settings))


if __name__ == "__main__":
    main()

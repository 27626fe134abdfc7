"""What training an adapter costs, beside peft with transformers' Trainer: the same model, batches and settings.

    python scripts/bench/adapters.py [--shapes tiny 135m] [--kinds lora dora] [--tokens 128] [--rounds 12] [--reps 3]

Both read a random Llama from a directory and train LoRA or DoRA of rank 16 beside all linear layers but the head, in
fp32, with fused AdamW, clipping to 1.0 by the global norm, a linear schedule and a loss read every 10 steps, on batches
that are in memory; ``--checkpointing`` recomputes activations in both. Ours has the loss of the recipe
``lora_finetune``, linear_cross_entropy; transformers' has none like it for a CPU.

Step times: both live in one process, as threads that take turns of some steps, since machines slow down for seconds and
minutes; the ratio is that of a turn to the other's turn of the same round, its median over all rounds, and the
quartiles. Start, memory and files: a process of its own for each, by turns, medians: seconds from the start of the
process to the end of the first step, the peak of its resident memory, and the bytes of the checkpoint that it leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import Turns, in_turns, ratio

MIB = 2**20
WARM_UP = 2  # rounds left out
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip
NAMES = ("peft", "forgather")


class Samples:
    """Map-style dicts; repeats 64 sequences of random tokens."""

    def __init__(self, a: argparse.Namespace) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, SHAPES[a.shape]["vocab_size"], (64, a.tokens), generator=generator)
        self.length = a.steps * a.batch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.tokens[index % len(self.tokens)]
        return {"input_ids": row, "labels": row}


def run_peft(a: argparse.Namespace, out: str) -> None:
    for package in ("torchao", "bitsandbytes"):  # it imports all formats that are installed, needed or not
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    base = AutoModelForCausalLM.from_pretrained(a.base, dtype=torch.float32, attn_implementation="sdpa")
    base.config.use_cache = False
    settings = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", use_dora=a.kind == "dora", task_type="CAUSAL_LM"
    )
    arguments = TrainingArguments(
        output_dir=out, max_steps=a.steps, per_device_train_batch_size=a.batch, learning_rate=2e-4, logging_steps=10,
        save_strategy="steps" if a.saves else "no", save_steps=a.steps, eval_strategy="no", max_grad_norm=1.0,
        lr_scheduler_type="linear", optim="adamw_torch_fused", use_cpu=True, disable_tqdm=True, report_to=[],
        dataloader_pin_memory=False, gradient_checkpointing=a.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if a.checkpointing else None,
    )  # fmt: skip
    trainer = Trainer(
        model=get_peft_model(base, settings), args=arguments, train_dataset=Samples(a),
        data_collator=default_data_collator,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()


def run_forgather(a: argparse.Namespace, out: str) -> None:
    import torch

    from forgather_cli import Trainer
    from forgather_cli.config.load import load_config
    from forgather_cli.models.build import build_model, initialize

    config = load_config(None, [
        "model=pretrained", f"model.path={a.base}", f"adapter={a.kind}", "trainer=single", "data=synthetic",
        f"global_batch_size={a.batch}", f"per_device_train_batch_size={a.batch}", f"max_steps={a.steps}",
        "learning_rate=2e-4", "lr_scheduler=linear", "optimizer=adamw", "weight_decay=0", "max_grad_norm=1.0",
        "precision=fp32", "loss=linear_cross_entropy", "eval_strategy=no", "logging_steps=10",
        f"save_strategy={'steps' if a.saves else 'no'}",
        *([f"save_steps={a.steps}"] if a.saves else []), f"gradient_checkpointing={a.checkpointing}".lower(),
        "callbacks=minimal", "callbacks.progress=null", f"output_dir={out}", "device=cpu",
    ]).config  # fmt: skip

    def model() -> Any:
        with torch.device("meta"):
            return build_model(config.model, vocab_size=SHAPES[a.shape]["vocab_size"], seq_len=a.tokens)

    Trainer(
        model_init=model,
        init_weights=lambda part, seed: initialize(config.model, part, seed),
        args=config,
        train_dataset=Samples(a),
    ).train()


RUN: dict[str, Callable[[argparse.Namespace, str], None]] = {"peft": run_peft, "forgather": run_forgather}

# -------------------------------------------------------------------------------------------------------- measuring


def both(a: argparse.Namespace) -> None:
    """In a process: both by turns."""
    import torch

    a.steps = (a.rounds + WARM_UP) * a.block
    turns = Turns(NAMES if a.seed % 2 else NAMES[::-1], block=a.block)

    def run(name: str) -> None:
        torch.set_num_threads(1)  # the setting is each thread's own
        with tempfile.TemporaryDirectory() as out:
            RUN[name](a, f"{out}/run")

    in_turns(turns, run)
    print("RESULT", json.dumps({name: found[WARM_UP:] for name, found in turns.blocks.items()}), flush=True)


def alone(a: argparse.Namespace) -> None:
    """In a process: one of them, a few steps and a save."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[float] = []
    register_optimizer_step_post_hook(lambda *_: first.append(since_start()) if not first else None)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        RUN[a.run](a, f"{out}/run")
        found = [path for path in Path(out).rglob("checkpoint*") if path.is_dir() and any(path.iterdir())]
        files = [path for path in found[0].rglob("*") if path.is_file()]
        # transformers' keeps no tokenizer here, ours neither; what both write is counted
        size = sum(path.stat().st_size for path in files)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    print("RESULT", json.dumps({"start": first[0], "peak": peak, "checkpoint": size}), flush=True)


def since_start() -> float:
    """Seconds since the kernel started this process."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    return up - ticks / os.sysconf("SC_CLK_TCK")


def child(a: argparse.Namespace, run: str, **changes: Any) -> dict[str, Any]:
    values = {**vars(a), **changes, "run": run}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ADAPTERS_BENCH": json.dumps(values)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{run} failed: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1][7:])
    return found


def write_base(shape: str, path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=2048)).save_pretrained(path)


def measure_steps(a: argparse.Namespace) -> None:
    runs: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    for rep in range(a.reps):
        for name, rounds in child(a, "both", seed=rep).items():
            runs[name] += rounds
    for name in NAMES:
        cells = [f"{a.shape}, {a.kind}", name]
        for column in (0, 1):
            mine, other = ([each[column] for each in found] for found in (runs[name], runs["peft"]))
            cells += [f"{statistics.median(mine) * 1e3:.1f}", "" if name == "peft" else ratio(mine, other)]
        print("| " + " | ".join(cells) + " |", flush=True)


def measure_processes(a: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for rep in range(a.reps + 1):
        for name in NAMES:
            one = child(a, name, steps=5, saves=True)
            if rep:  # the first one warms the disk's cache, and hashes the base
                found[name].append(one)
    for name, each in found.items():
        start, peak, size = (statistics.median(one[key] for one in each) for key in ("start", "peak", "checkpoint"))
        cells = [f"{a.shape}, {a.kind}", name, f"{start:.2f}", f"{peak / MIB:.0f}", f"{size / MIB:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    if (given := os.environ.get("ADAPTERS_BENCH")) is not None:
        a = argparse.Namespace(**json.loads(given))
        both(a) if a.run == "both" else alone(a)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", default=["lora", "dora"], choices=["lora", "dora"])
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=10, help="steps of a turn")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--only", choices=["steps", "processes"])
    a = parser.parse_args()
    a.saves, a.seed = False, 0
    load = os.getloadavg()
    print(f"load before: {load[0]:.1f} on {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory() as folder:
        cases = [(shape, kind) for shape in a.shapes for kind in a.kinds]
        for shape in a.shapes:
            write_base(shape, Path(folder) / shape)
        if a.only != "processes":
            print("\n| model | runner | step, ms | over peft (quartiles) | CPU time, ms | over peft (quartiles) |")
            print("|---|---|---|---|---|---|", flush=True)
            for a.shape, a.kind in cases:
                a.base = f"{folder}/{a.shape}"
                measure_steps(a)
        if a.only != "steps":
            print("\n| model | runner | start to first step, s | peak, MiB | checkpoint, MiB |")
            print("|---|---|---|---|---|", flush=True)
            for a.shape, a.kind in cases:
                a.base = f"{folder}/{a.shape}"
                measure_processes(a)


if __name__ == "__main__":
    main()

"""What a trainer costs per step, at start and in memory, beside a bare PyTorch loop of the same model.

    python scripts/bench/loop_overhead.py [--steps 300] [--reps 7] [--only bare,forgather,...] [--quick]

Every runner is a process of its own with one thread and does the same work per step: a batch of dicts, forward,
backward, clipping to 1.0, fused AdamW, a linear schedule, a loss logged every 10 steps; no evaluation, no checkpoint,
no progress display. ``bare``, ``forgather`` and ``forgather-cli`` train Forgather's decoder; ``bare-hf`` and the peers
transformers' Llama of the same shape, so each trainer's overhead is against the bare loop of its own model.
``forgather-cli`` is the command ``forgather train`` on a recipe with its default callbacks except text generation.

A step is the time between two forwards: the median, and the mean, in which a log every tenth step counts. Its CPU time
leaves out what the machine does for others meanwhile. Page faults are the minor ones of a step, in the mean: an
allocator that gives memory back takes it again by these. Runs are interleaved and rotated; a line for each run as it
ends, then the table of medians over repetitions.
Lightning and accelerate take part where they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plain import PLAIN

SHAPE = {"layers": 2, "width": 64, "heads": 2, "mlp": 172, "seq": 64, "batch": 4, "vocab": 257}
WARM_UP = 50  # steps left out
RUNNERS = ("bare", "forgather", "forgather-cli", "bare-hf", "accelerate", "hf-trainer", "lightning")
BARE_OF = {
    "forgather": "bare",
    "forgather-cli": "bare",
    "accelerate": "bare-hf",
    "hf-trainer": "bare-hf",
    "lightning": "bare-hf",
}


def process_age() -> float:
    """Seconds since the kernel started this process."""
    start = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - start / os.sysconf("SC_CLK_TCK")


class Clock:
    """Times of the forwards of a model."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.faults: list[int] = []
        self.first_age = 0.0

    def tick(self, *_: Any, **__: Any) -> None:
        if not self.times:
            self.first_age = process_age()
        self._note()

    def _note(self) -> None:
        self.times.append(time.perf_counter())
        self.cpu_times.append(time.process_time())
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

    def watch(self, model: Any) -> Any:
        model.register_forward_pre_hook(self.tick, with_kwargs=True)
        return model

    def report(self) -> None:
        self._note()
        cpu = [(b - a) * 1e6 for a, b in zip(self.cpu_times[WARM_UP:], self.cpu_times[WARM_UP + 1 :], strict=False)]
        gaps = [(b - a) * 1e6 for a, b in zip(self.times[WARM_UP:], self.times[WARM_UP + 1 :], strict=False)]
        print("RESULT", json.dumps({
            "step_us": statistics.median(gaps), "mean_us": statistics.mean(gaps), "cpu_us": statistics.median(cpu),
            "faults": (self.faults[-1] - self.faults[WARM_UP]) / len(gaps), "first_step_s": self.first_age,
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }))  # fmt: skip


class Samples:
    """Map-style dicts, as a user's dataset would be; repeats 64 batches of random tokens."""

    def __init__(self, length: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, SHAPE["vocab"], (64 * SHAPE["batch"], SHAPE["seq"]), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.tokens[index % len(self.tokens)]
        return {"input_ids": row, "labels": row}


def own_model() -> Any:
    from forgather_cli.config.schema import DecoderSettings
    from forgather_cli.models.build import build_model
    from forgather_cli.models.init import init_parameters

    settings = DecoderSettings(
        hidden_size=SHAPE["width"],
        intermediate_size=SHAPE["mlp"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"],
    )
    model = build_model(settings, vocab_size=SHAPE["vocab"], seq_len=SHAPE["seq"])
    init_parameters(model, 0)
    return model


def llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=SHAPE["width"], intermediate_size=SHAPE["mlp"], num_hidden_layers=SHAPE["layers"],
            num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["heads"], vocab_size=SHAPE["vocab"],
            max_position_embeddings=SHAPE["seq"], use_cache=False, attn_implementation="sdpa",
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def bare_loop(model: Any, loss_of: Any, steps: int, clock: Clock, prepare: Any = lambda *parts: parts) -> None:
    """The loop that every trainer is measured against."""
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(Samples(steps * SHAPE["batch"]), batch_size=SHAPE["batch"], shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / steps))
    model, optimizer, loader, scheduler = prepare(model, optimizer, loader, scheduler)
    model.train()
    total: Any = 0.0
    for n, batch in enumerate(loader, 1):
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = total + loss.detach()
        if n % 10 == 0:
            float(total)
            total = 0.0
    clock.report()


def run_bare(steps: int, clock: Clock) -> None:
    from torch.nn.functional import cross_entropy

    def loss_of(model: Any, batch: Any) -> Any:
        logits = model(batch["input_ids"])[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    bare_loop(clock.watch(own_model()), loss_of, steps, clock)


def run_bare_hf(steps: int, clock: Clock) -> None:
    bare_loop(clock.watch(llama()), lambda model, batch: model(**batch).loss, steps, clock)


def run_accelerate(steps: int, clock: Clock) -> None:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    model = clock.watch(llama())
    loader = DataLoader(Samples(steps * SHAPE["batch"]), batch_size=SHAPE["batch"], shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / steps))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    total: Any = 0.0
    for n, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total = total + loss.detach()
        if n % 10 == 0:
            float(total)
            total = 0.0
    clock.report()


def _settings(steps: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(), "max_steps": steps, "per_device_train_batch_size": SHAPE["batch"],
        "learning_rate": 1e-3, "logging_steps": 10, "save_strategy": "no", "eval_strategy": "no", "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear", "optim": "adamw_torch_fused", "use_cpu": True, "disable_tqdm": True,
        "report_to": [], "dataloader_pin_memory": False,
    }  # fmt: skip


def run_hf_trainer(steps: int, clock: Clock) -> None:
    import contextlib
    import io

    from transformers import Trainer, TrainingArguments, default_data_collator

    trainer = Trainer(
        model=clock.watch(llama()), args=TrainingArguments(**_settings(steps)),
        train_dataset=Samples(steps * SHAPE["batch"]), data_collator=default_data_collator,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    clock.report()


def run_forgather(steps: int, clock: Clock) -> None:
    from forgather_cli import Trainer, TrainingArguments

    arguments = TrainingArguments(**_settings(steps))
    Trainer(clock.watch(own_model()), arguments, None, Samples(steps * SHAPE["batch"])).train()
    clock.report()


class Probe:
    """A callback that ticks before each forward of a run that the command line started."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_forward_backward_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.tick()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.report()


def run_forgather_cli(steps: int, clock: Clock) -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    overrides = [
        "model=nano", f"model.intermediate_size={SHAPE['mlp']}", "data.seq_len=64", "global_batch_size=4",
        *PLAIN, "tokenizer=bytes",
        f"max_steps={steps}", "logging_steps=10",
        "eval_strategy=no", "save_strategy=no", "lr_scheduler=linear", "~callbacks.textgen",
        "+callbacks.probe._target_=loop_overhead.Probe", f"output_dir={tempfile.mkdtemp()}",
    ]  # fmt: skip
    os.execv(sys.executable, [sys.executable, "-m", "forgather_cli", "train", *overrides])


def run_lightning(steps: int, clock: Clock) -> None:
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    import lightning
    import torch
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from torch.utils.data import DataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = clock.watch(llama())

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # fused AdamW refuses Lightning's own clipping
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = lightning.Trainer(
        max_steps=steps, logger=CSVLogger(tempfile.mkdtemp()), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=10, strategy=SingleDeviceStrategy(device=torch.device("cpu")),
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(Samples(steps * SHAPE["batch"]), batch_size=SHAPE["batch"], shuffle=True))
    clock.report()


def run_one(name: str, steps: int) -> None:
    clock = Clock()
    if name != "forgather-cli":
        import torch

        torch.set_num_threads(1)
    globals()["run_" + name.replace("-", "_")](steps, clock)


def measure(name: str, steps: int) -> dict[str, float] | None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, __file__, "--run", name, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{name} failed: {done.stderr[-500:]}", file=sys.stderr)
        return None
    result: dict[str, float] = json.loads(lines[-1][7:])
    return result


COLUMNS = {
    "step_us": ("step, us", 0),
    "mean_us": ("mean, us", 0),
    "cpu_us": ("CPU time, us", 0),
    "faults": ("page faults", 1),
    "first_step_s": ("first step, s", 2),
    "rss_mb": ("peak RSS, MB", 0),
}


def table(results: dict[str, list[dict[str, float]]]) -> None:
    """Medians, and differences to the bare loop of the same model."""
    print("| runner | " + " | ".join(f"{label} | over bare" for label, _ in COLUMNS.values()) + " |")
    print("|---" * (1 + 2 * len(COLUMNS)) + "|")
    for name, runs in results.items():
        bare = results.get(BARE_OF.get(name, ""))
        cells = [name]
        for key, (_, digits) in COLUMNS.items():
            value = statistics.median(run[key] for run in runs)
            over = value - statistics.median(run[key] for run in bare) if bare else None
            cells += [f"{value:.{digits}f}", "" if over is None else f"{over:+.{digits}f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--only", default=",".join(RUNNERS))
    parser.add_argument("--quick", action="store_true", help="one run of 100 steps each: whether it works")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.run:
        run_one(a.run, a.steps)
        return
    if a.quick:
        a.steps, a.reps = 100, 1
    needs = {
        "accelerate": "accelerate",
        "lightning": "lightning",
        "hf-trainer": "transformers",
        "bare-hf": "transformers",
    }
    names = [n for n in a.only.split(",") if n not in needs or importlib.util.find_spec(needs[n])]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for rep in range(a.reps):
        shift = rep % len(names)
        for name in names[shift:] + names[:shift]:
            result = measure(name, a.steps)
            if result:
                results[name].append(result)
                print(f"{rep + 1}/{a.reps} {name}: {result['step_us']:.0f} us", file=sys.stderr, flush=True)
    table({name: runs for name, runs in results.items() if runs})


if __name__ == "__main__":
    main()

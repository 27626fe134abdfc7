"""From the command to its answer, beside an import of torch; and to the first optimizer step, on one device beside a
bare script, on two ranks beside torchrun of it.

    python scripts/bench/cold_start.py [--reps 5] [--trainers single,ddp,fsdp2,pipeline]

The bare script imports torch, makes the same decoder and takes one step; two ranks join a process group and wrap it in
DDP. All are timed by the line that rank 0 prints after its first step, the others to their end; runs are interleaved,
medians. Seconds of computing are those of all processes, to their end.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plain import PLAIN

BARE = """
import os, torch, torch.distributed as dist
from forgather_cli.config.schema import DecoderSettings
from forgather_cli.models.decoder import Decoder, resolve_decoder
shape = DecoderSettings(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
model = Decoder(resolve_decoder(shape, vocab_size=257, seq_len=64))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 257, (4, 64))
logits = model(ids)
torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
optimizer.step()
if os.environ.get("RANK", "0") == "0":
    print("step 1/1", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
"""


_STEP = "step 1/1"


def measure(command: list[str], folder: Path) -> tuple[float, float]:
    """(seconds until the line of the first step, to the end where there is none; seconds of computing)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    )
    assert process.stdout is not None
    seen, seconds = [], None
    for line in process.stdout:
        seen.append(line)
        if _STEP in line and seconds is None:
            seconds = time.perf_counter() - start
    process.wait()
    seconds = seconds or time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode != (2 if MISTAKE in command else 0):
        raise SystemExit("".join(seen))
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


MISTAKE = "learning_rte=1"
TORCH = "import torch"


def commands(trainers: list[str], folder: Path, rep: int) -> dict[str, dict[str, list[str]]]:
    """What is compared with what: with the first of each group."""
    script = folder / "bare.py"
    script.write_text(BARE)
    python = sys.executable
    ours = [
        python, "-m", "forgather_cli", "train", "model=nano", "data=synthetic", "data.seq_len=64", "max_steps=1",
        "global_batch_size=8", "eval_strategy=no", "save_strategy=no", "~callbacks.textgen",
        *PLAIN,
    ]  # fmt: skip
    alone = {"python of a bare script": [python, str(script)]}
    launched = {"torchrun of a bare script": [python, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]}
    for trainer in trainers:
        group, ranks = (alone, []) if trainer == "single" else (launched, ["nproc_per_node=2"])
        words = [*ours, *ranks, f"trainer={trainer}", f"output_dir={folder}/{trainer}-{rep}"]
        group[f"forgather train trainer={trainer}"] = words
    answers = {
        TORCH: [python, "-c", TORCH],
        "forgather --help": [python, "-m", "forgather_cli", "--help"],
        "a config error": [python, "-m", "forgather_cli", "train", MISTAKE],
    }
    return {"an answer": answers, "first step, one device": alone, "first step, two ranks": launched}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--trainers", default="single,ddp,fsdp2,pipeline")
    args = parser.parse_args()
    times: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for rep in range(args.reps + 1):
            for group, compared in commands(args.trainers.split(","), Path(name), rep).items():
                for what, command in compared.items():
                    measured = measure(command, Path(name))
                    if rep:  # the first round warms the disk cache
                        times.setdefault(group, {}).setdefault(what, []).append(measured)
    medians = {
        group: {what: tuple(map(statistics.median, zip(*each, strict=True))) for what, each in measured.items()}
        for group, measured in times.items()
    }
    torch = medians["an answer"][TORCH][0]
    for group, rows in medians.items():
        ranks = 2 if "two" in group else 1
        first = next(iter(rows.values()))[0]
        print(f"\n| {group} | s | over the first, s | over {ranks} x `{TORCH}`, s | of computing, s |")
        print("|---|---|---|---|---|")
        for what, (seconds, computing) in rows.items():
            over = f"{seconds - first:+.2f} | {seconds - ranks * torch:+.2f}"
            print(f"| `{what}` | {seconds:.2f} | {over} | {computing:.2f} |")


if __name__ == "__main__":
    main()

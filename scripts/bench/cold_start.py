"""From the command to the first optimizer step of a 2-rank run, beside torchrun of a bare script.

    python scripts/bench/cold_start.py [--reps 5] [--trainers ddp,fsdp2,pipeline]

The bare script imports torch, joins the process group, makes the same decoder, wraps it in DDP and
takes one step. Both are timed by the line that rank 0 prints after its first step; runs are interleaved, medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = '''
import torch, torch.distributed as dist
dist.init_process_group("gloo")
from forgather_cli.config.schema import DecoderSettings
from forgather_cli.models.decoder import Decoder, resolve_decoder
shape = DecoderSettings(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
model = torch.nn.parallel.DistributedDataParallel(Decoder(resolve_decoder(shape, vocab_size=257, seq_len=64)))
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 257, (4, 64))
logits = model(ids)
torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
optimizer.step()
if dist.get_rank() == 0:
    print("step 1/1", flush=True)
dist.destroy_process_group()
'''  # fmt: skip


def first_step(command: list[str], folder: Path) -> float:
    """Seconds until the line of the first step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    )
    assert process.stdout is not None
    seen, seconds = [], None
    for line in process.stdout:
        seen.append(line)
        if "step 1/1" in line and seconds is None:
            seconds = time.perf_counter() - start
    process.wait()
    if seconds is None:
        raise SystemExit("".join(seen))
    return seconds


def commands(trainers: list[str], folder: Path, rep: int) -> dict[str, list[str]]:
    script = folder / "bare.py"
    script.write_text(BARE)
    python = sys.executable
    ours = [
        python, "-m", "forgather_cli", "train", "model=nano", "data=synthetic", "data.seq_len=64", "max_steps=1",
        "global_batch_size=8", "nproc_per_node=2", "eval_strategy=no", "save_strategy=no", "~callbacks.textgen",
    ]  # fmt: skip
    found = {"torchrun of a bare script": [python, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]}
    for trainer in trainers:
        found[f"forgather train trainer={trainer}"] = [
            *ours,
            f"trainer={trainer}",
            f"output_dir={folder}/{trainer}-{rep}",
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--trainers", default="ddp,fsdp2,pipeline")
    args = parser.parse_args()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for rep in range(args.reps + 1):
            for what, command in commands(args.trainers.split(","), Path(name), rep).items():
                seconds = first_step(command, Path(name))
                if rep:  # the first round warms the disk cache
                    times.setdefault(what, []).append(seconds)
    bare = statistics.median(next(iter(times.values())))
    print("| command | first step, s | over bare, s |\n|---|---|---|")
    for what, seconds in times.items():
        median = statistics.median(seconds)
        print(f"| `{what}` | {median:.2f} | {median - bare:+.2f} |")


if __name__ == "__main__":
    main()

"""What DiLoCo costs in time, memory and bytes, and what it does to the loss.

    python scripts/bench/diloco.py stall|server|bytes|link [--model 60m]
    python scripts/bench/diloco.py loss [--seeds 1 2 3] [--steps 300] [--out diloco.jsonl]
    python scripts/bench/diloco.py plot PICTURE.png [--out diloco.jsonl]

``stall``: how long a worker stands still for an exchange over loopback, whole and blocking, and in four fragments that
are exchanged beside training: what it counts itself, and how much longer than the median step those around exchanges
take, which the save before an exchange is part of.
``server``: a round of workers that have their parts ready, and the peak memory of the server's process over the weights
in fp32, with what a server of a few parameters takes and without.
``bytes``: all that goes over the wire, messages included, over what ``forgather plan`` says of the weights.
``link``: a worker behind a proxy of 100 Mbit/s each way and 50 ms there and back, beside ddp on two ranks over such a
link, which is computed: the worker's step without the link, and a ring's bytes and turns.
``loss``: held-out loss at equal tokens, in one process that plays the workers in turn (``tests/diloco/reference.py``,
to which real workers are equal bit for bit): nano, AdamW, 8 x 128 bytes of the standard library's sources per worker
and step, against one device with the workers' batches together, which is what ddp computes. Adds a line to ``--out``
for each run that is not there yet; ``plot`` draws them and prints their ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/diloco")]

COMPRESSIONS = ("fp32", "bf16", "int8", "int4")
COMMON = (
    "data=synthetic", "data.seq_len=64", "global_batch_size=2", "per_device_train_batch_size=2", "logging_steps=1",
    "optimizer=adamw", "learning_rate=2e-3", "eval_strategy=no", "save_steps=1000000", "callbacks=minimal",
    "device=cpu",
)  # fmt: skip


def sized(model: str) -> tuple[str, ...]:
    """60m has 58 million parameters with this vocabulary."""
    return (*COMMON, f"model={model}", "model.vocab_size=32000")


# -------------------------------------------------------------------------------------------------- a worker, the wire


def work(server: Any, port: int, run: Path, *words: str) -> list[dict[str, Any]]:
    """Train a worker of ``server``, which it reaches at ``port``, to its end; returns its records, one per step."""
    command = [sys.executable, "-m", "forgather_cli", "diloco", "worker", *words, f"output_dir={run}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DILOCO_TOKEN": server.client.token}
    done = subprocess.run(
        [*command, "--server", f"127.0.0.1:{port}"], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"the worker failed: {done.stderr[-2000:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "diloco/total_sync_time" in record]


class Wire:
    """A proxy on a thread that passes ``rate`` bytes per second each way, each ``delay`` seconds later, and counts."""

    def __init__(self, target: int, rate: float | None = None, delay: float = 0.0) -> None:
        self._target, self._rate, self._delay = target, rate, delay
        self._free = {"up": 0.0, "down": 0.0}
        self.passed = {"up": 0, "down": 0}
        self.port = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[Wire]:
        loop, ended, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

        async def listen() -> None:
            server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await ended.wait()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(listen())

        thread = threading.Thread(target=run)
        thread.start()
        ready.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other, there = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._pass(reader, there, "up"), self._pass(other, writer, "down"))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, chunk = await under_way.get()
                await asyncio.sleep(due - loop.time())
                if not chunk:
                    writer.close()
                    return
                writer.write(chunk)
                await writer.drain()

        async def take() -> None:
            chunk = b"-"
            while chunk:
                with contextlib.suppress(ConnectionError):
                    chunk = await reader.read(1 << 16)
                self.passed[way] += len(chunk)
                if self._rate is not None:
                    self._free[way] = max(self._free[way], loop.time()) + len(chunk) / self._rate
                    await asyncio.sleep(self._free[way] - loop.time())
                under_way.put_nowait((loop.time() + self._delay, chunk))

        with contextlib.suppress(ConnectionError):
            await asyncio.gather(take(), deliver())


def planned(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "forgather_cli", "plan", "--json", *words]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def seconds_of_steps(records: list[dict[str, Any]]) -> list[float]:
    """From one record to the next."""
    times = [datetime.fromisoformat(record["time"]).timestamp() for record in records]
    return [after - before for before, after in itertools.pairwise(times)]


# ------------------------------------------------------------------------------------------------ stall, server, bytes


def stall(a: argparse.Namespace) -> None:
    from client import serving

    print(f"| {a.model}, H = {a.sync_every} | exchanges | a step, s | stands still for one, s | share of time | "
          "with the save before it, s | share of time |")  # fmt: skip
    print("|---" * 7 + "|", flush=True)
    ways = {
        "whole, blocking": (),
        "4 fragments, overlap": ("diloco.num_fragments=4", f"diloco.overlap={a.sync_every // 8}"),
    }
    for name, settings in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            fixed = (*sized(a.model), "diloco.workers=1", f"diloco.sync_every={a.sync_every}", "diloco.save_every=1000")
            with serving(Path(folder) / "server", *fixed, *settings) as server:
                words = (*sized(a.model), f"max_steps={2 * a.sync_every + 2}")
                records = work(server, server.client.port, Path(folder) / "run", *words)
        steps = seconds_of_steps(records)
        step, total = statistics.median(steps), sum(steps)
        first, last = records[0], records[-1]
        count = int(last["diloco/sync_count"] - first["diloco/sync_count"])
        counted = last["diloco/total_sync_time"] - first["diloco/total_sync_time"]
        beyond = total - step * len(steps)
        cells = [name, str(count), f"{step:.2f}", f"{counted / count:.2f}", f"{counted / total:.2%}",
                 f"{beyond / count:.2f}", f"{beyond / total:.2%}"]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


def server(a: argparse.Namespace) -> None:
    import torch
    from client import FakeWorker, serving

    from forgather_cli.diloco.encoding import encode

    made = planned(*sized(a.model), "max_steps=1", "--params")
    shapes = {row["name"]: tuple(row["shape"]) for row in made["parameters"]}
    weights = 4 * made["num_parameters"]
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensors |= encode(name, torch.randn(shape) / 1000, "bf16")
    rows = json.dumps({name: [0, shape[0]] for name, shape in shapes.items()})
    base = _peak_of_a_small_server()
    print(f"| {a.model}, workers | a round, s | its outer step, s | peak memory over the weights | without the "
          "interpreter's |")  # fmt: skip
    print("|---" * 5 + "|", flush=True)
    for count in a.workers:
        with tempfile.TemporaryDirectory() as folder:
            settings = (f"diloco.workers={count}", "diloco.sync_every=1", "diloco.compression=bf16")
            with serving(Path(folder) / "server", *sized(a.model), *settings) as served:
                players = [FakeWorker(served.client, f"worker-{n}", "bf16", 2) for n in range(count)]
                for player in players:
                    player.register(shapes)
                for player in players:
                    player.next(-1)
                times = [_round(players, tensors, rows, number) for number in range(3)]
                peak = _peak(served.process.pid)
                lines = (served.run.root / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["outer_step_time"] for line in lines]
        cells = [str(count), f"{statistics.median(times):.1f}", f"{statistics.median(steps):.1f}",
                 f"{peak / weights:.2f}", f"{(peak - base) / weights:.2f}"]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


def _round(players: list[Any], tensors: dict[str, Any], rows: str, number: int) -> float:
    """Seconds from the first byte sent to the last worker that has heard of the next round."""
    import safetensors.torch

    parts = [safetensors.torch.save(tensors, {"rows": rows, "of": f"{p.name} {number}"}) for p in players]
    digests = [hashlib.sha256(part).hexdigest() for part in parts]

    def play(at: int) -> None:
        player, offer = players[at], players[at].offer
        assert player.client.ask("PUT", f"/parts/{digests[at]}", parts[at]).status == 202
        told = {"generation": player.generation, "round": number, "hash": offer["hash"], "parts": [digests[at]],
                "targets": 100, "ranges": offer["ranges"], "norm": None, "leaves": False, "speed": None}  # fmt: skip
        player.client.post("/submit", **told)
        while player.next(number)["state"] != "open":
            pass

    threads = [threading.Thread(target=play, args=(at,)) for at in range(len(players))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def _peak_of_a_small_server() -> int:
    from client import TINY, FakeWorker, serving

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "server", *TINY, "diloco.workers=1") as served:
        FakeWorker(served.client, "a")  # a server answers, so its libraries are there
        served.client.status()
        return _peak(served.process.pid)


def _peak(pid: int) -> int:
    """Bytes of resident memory at most so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def bytes_(a: argparse.Namespace) -> None:
    from client import serving

    print(f"| {a.model}, up and down | sent, MB | over planned | received, MB | over planned |")
    print("|---" * 5 + "|", flush=True)
    for up, down, count in [*((up, "fp32", 1) for up in COMPRESSIONS), ("int4", "int8", 2)]:
        settings = (f"diloco.compression={up}", f"diloco.compression_down={down}", f"diloco.num_fragments={count}",
                    "diloco.sync_every=2", "diloco.workers=1")  # fmt: skip
        words = (*sized(a.model), "max_steps=5")
        said = planned(*words, *settings)["diloco"]
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder) / "server", *words, *settings) as server,
            Wire(server.client.port).open() as wire,
        ):
            work(server, wire.port, Path(folder) / "run", *words)
        told = f"{up}, {down}" + (f", {count} fragments" if count > 1 else "")
        cells = [told]
        for way, of in (("up", said["sent_in_all"]), ("down", said["received_in_all"])):
            cells += [f"{wire.passed[way] / 1e6:.1f}", f"{wire.passed[way] / of - 1:+.2%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def link(a: argparse.Namespace) -> None:
    from client import serving

    rate, turn, steps = 100e6 / 8, 0.05, a.steps
    print(f"| {a.model}, {steps} steps | seconds | over training alone |")
    print("|---|---|---|", flush=True)
    words = (*sized(a.model), f"max_steps={steps}")
    for name, settings in {
        "DiLoCo, H = 50, bf16": (),
        "DiLoCo, H = 50, int4 and int8 down, overlap 20": (
            "diloco.compression=int4", "diloco.compression_down=int8", "diloco.overlap=20",
        ),
    }.items():  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            fixed = ("diloco.workers=1", "diloco.sync_every=50", "diloco.save_every=1000")
            with (
                serving(Path(folder) / "server", *words, *fixed, *settings) as server,
                Wire(server.client.port, rate, turn / 2).open() as wire,
            ):
                records = work(server, wire.port, Path(folder) / "run", *words)
                last = time.time() - datetime.fromisoformat(records[-1]["time"]).timestamp()  # the last exchange
        spent = seconds_of_steps(records)
        step, total = statistics.median(spent), sum(spent) + last
        cells = [name, f"{total:.0f}", f"{total / (steps * step):.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    gradients = 4 * planned(*words)["num_parameters"]
    exchange = gradients / rate + 2 * turn  # two ranks: each sends half of them twice, and receives as much meanwhile
    cells = ["ddp on 2 ranks, computed", f"{steps * (step + exchange):.0f}", f"{(step + exchange) / step:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


# ---------------------------------------------------------------------------------------------------------------- loss

BATCH, SEQ_LEN, EVERY = 8, 128, 50  # sequences of a worker's step, their tokens, steps between two evaluations
MOMENTUM = 0.5  # of the outer step: 0.9, which multiplies the changes by 10, overshoots in a short run from scratch
NANO = (
    "model=nano", f"data.seq_len={SEQ_LEN}", "tokenizer=bytes", "optimizer=adamw", "learning_rate=2e-3",
    "warmup_steps=20", "eval_strategy=no", "save_strategy=no", "callbacks=minimal", "device=cpu",
)  # fmt: skip


def loss(a: argparse.Namespace) -> None:
    """Run what is not in ``--out`` yet, what says most first."""
    known = {json.dumps(each["job"]) for each in read(a.out)}
    first = [[(n, 1, "ddp"), (n, 50, "fp32"), (n, 10, "fp32")] for n in (2, 4)]
    wires = [[(n, length, wire) for wire in ("int4", "int8", "bf16")] for n in (2, 4) for length in (50, 10)]
    for cells in (first[0], wires[0], first[1], *wires[1:]):
        for seed, (workers, sync_every, wire) in itertools.product(a.seeds, cells):
            job = {"workers": workers, "sync_every": sync_every, "wire": wire, "seed": seed, "steps": a.steps}
            if json.dumps(job) in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                points = trained(Path(folder), **job)
            with a.out.open("a") as file:
                file.write(json.dumps({"job": job, "points": points}) + "\n")
            print(*job.values(), f"{points[-1]['loss']:.4f}", flush=True)


def trained(folder: Path, *, workers: int, sync_every: int, wire: str, seed: int, steps: int) -> list[dict[str, float]]:
    """Tokens of all workers, held-out loss in nats per byte, and the bytes that one worker has sent and received; every
    ``EVERY`` steps.
    """
    import torch
    from reference import Weights, final_weights

    from forgather_cli.config.load import load_config
    from forgather_cli.data.build import load_data
    from forgather_cli.diloco.encoding import decode, encode, is_lossy, num_bytes
    from forgather_cli.models.build import build_model

    torch.set_num_threads(1)
    is_ddp = wire == "ddp"
    batch = BATCH * workers if is_ddp else BATCH
    words = [*NANO, f"global_batch_size={batch}", f"per_device_train_batch_size={batch}", f"max_steps={steps}"]
    config = load_config(None, [*words, f"seed={seed}", f"output_dir={folder / 'run'}"]).config
    data = load_data(config.data, seed=seed)
    model = build_model(config.model, vocab_size=data.vocab_size, seq_len=SEQ_LEN)
    held_out = data.eval.__getitems__(list(range(128)))
    ids, labels = held_out["input_ids"].long(), held_out["labels"].long()
    lost: dict[tuple[int, str], torch.Tensor] = {}
    points: list[dict[str, float]] = []
    length = EVERY if is_ddp else sync_every

    def sent(slot: int, name: str, change: torch.Tensor) -> torch.Tensor:
        if is_ddp:
            return change
        change = change + lost.get((slot, name), torch.zeros(()))
        understood = decode(name, encode(name, change, wire), change.shape, wire)
        if is_lossy(wire):
            lost[slot, name] = change - understood
        return understood

    def evaluate(rounds: int, weights: Weights) -> None:
        done = rounds * length
        if done % EVERY:
            return
        shapes = [values.shape for values in weights.values()]
        whole = sum(num_bytes(shape, "fp32") for shape in shapes)
        up = sum(num_bytes(shape, "fp32" if is_ddp else wire) for shape in shapes)
        ring = 2 * whole * (workers - 1) / workers  # of a rank in each all-reduce, both ways
        model.load_state_dict(weights)
        with torch.inference_mode():
            logits = torch.cat([model(part) for part in ids.split(16)])
        found = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        points.append(
            {
                "tokens": done * workers * BATCH * SEQ_LEN,
                "loss": float(found),
                "sent": done * ring if is_ddp else rounds * up,
                "received": done * ring if is_ddp else rounds * whole,
            }
        )

    # one worker whose outer step is the plain average is the plain run
    outer: Any = {"lr": 1.0, "momentum": 0.0} if is_ddp else {"lr": 0.7, "momentum": MOMENTUM}
    final_weights(
        [config] * (1 if is_ddp else workers), folder, rounds=steps // length, steps=length, sent=sent,
        published_by=evaluate, **outer,
    )  # fmt: skip
    return points


def plot(a: argparse.Namespace) -> None:
    """Loss over the tokens of all workers, and over the bytes that one has sent and received; means of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[tuple[int, int, str], list[list[dict[str, float]]]] = defaultdict(list)
    for record in read(a.out):
        job = record["job"]
        curves[job["workers"], job["sync_every"], job["wire"]].append(record["points"])
    counts = sorted({workers for workers, _, _ in curves})
    figure, axes = pyplot.subplots(len(counts), 2, figsize=(10, 3.6 * len(counts)), squeeze=False, sharey=True)
    print("| workers | H | wire | seeds | loss (least and most) | MB of a worker |")
    print("|---" * 6 + "|")
    for (workers, sync_every, wire), runs in sorted(curves.items()):
        ends = [points[-1]["loss"] for points in runs]
        points = [
            {name: statistics.mean(each[name] for each in same) for name in same[0]} for same in zip(*runs, strict=True)
        ]
        traffic = [each["sent"] + each["received"] for each in points]
        loss = f"{statistics.mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"
        length = "" if wire == "ddp" else str(sync_every)
        cells = [str(workers), length, wire, str(len(runs)), loss, f"{traffic[-1] / 1e6:.1f}"]
        print(f"| {' | '.join(cells)} |")
        color = "black" if wire == "ddp" else f"C{COMPRESSIONS.index(wire)}"
        style = {"color": color, "linestyle": "--" if sync_every == 10 else "-", "marker": "."}
        label = "ddp" if wire == "ddp" else f"{wire}, H = {sync_every}"
        left, right = axes[counts.index(workers)]
        left.plot([each["tokens"] / 1e6 for each in points[1:]], [each["loss"] for each in points[1:]], **style)
        right.plot([each / 1e6 for each in traffic[1:]], [each["loss"] for each in points[1:]], label=label, **style)
    for workers, (left, right) in zip(counts, axes, strict=True):
        left.set(title=f"{workers} workers", xlabel="million tokens of all", ylabel="nats per byte, held out")
        right.set(title=f"{workers} workers", xlabel="MB sent and received by one", xscale="log")
        right.legend(fontsize="x-small", loc="lower left")
    figure.tight_layout()
    figure.savefig(a.picture, dpi=120)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parts = {name: commands.add_parser(name) for name in ("stall", "server", "bytes", "link", "loss", "plot")}
    for name in ("stall", "server", "bytes", "link"):
        parts[name].add_argument("--model", default="60m")
    parts["stall"].add_argument("--sync-every", type=int, default=48)
    parts["server"].add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parts["link"].add_argument("--steps", type=int, default=100)
    parts["loss"].add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parts["loss"].add_argument("--steps", type=int, default=300)
    parts["plot"].add_argument("picture", type=Path)
    for name in ("loss", "plot"):
        parts[name].add_argument("--out", type=Path, default=Path("diloco.jsonl"))
    a = parser.parse_args()
    command = {"stall": stall, "server": server, "bytes": bytes_, "link": link, "loss": loss, "plot": plot}[a.command]
    command(a)


if __name__ == "__main__":
    main()

"""How the servers' runs in ``tests/golden/diloco-*`` were made, by commit 7b8eec5: never again.

    cd tests && ../.venv/bin/python -m diloco.golden_ledgers     # those that are not there

Four members of a tiny model, one of which now and then sends a change that was rejected for its size, as was done then;
the server was ended with a round open. ``test_golden_ledgers.py`` replays them, and goes on with them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from diloco.client import Client, FakeWorker
from torch import Tensor

from forgather_cli.diloco.fragments import fragments
from forgather_cli.run_dir import RunDir

GOLDEN = Path(__file__).parents[1] / "golden"
ROUNDS = 5
MODEL = (
    "model=nano", "precision=fp32", "data=synthetic", "num_hidden_layers=2", "hidden_size=8", "intermediate_size=8",
    "num_attention_heads=1", "num_key_value_heads=1", "head_dim=8", "seq_len=16", "num_samples=64",
    "diloco.workers=4", "diloco.compression=int4", "diloco.keep_submissions=true", "diloco.save_every=100",
)  # fmt: skip
CASES = {
    "diloco-fragments": ("diloco.num_fragments=2", "diloco.sync_every=4"),
    "diloco-async": ("diloco.mode=async", "diloco.sync_every=2"),
}


def play(worker: FakeWorker, times: float = 0.1) -> None:
    """Send a change for the round that the worker stands in."""
    number, count = worker.offer["round"], len(worker.offer["weights"])
    names = fragments(worker.client.shapes, count)[number % count]
    change: dict[str, Tensor] = {name: worker.change(number)[name] * times for name in sorted(names)}
    worker.submit(change, 16 + 16 * (worker.name == "b"))


def team(client: Client) -> list[FakeWorker]:
    """Registered, each in its round."""
    workers = [FakeWorker(client, name, "int4", num_parts=1) for name in "abcd"]
    for worker in workers:
        worker.register()
    for worker in workers:
        worker.next(-1)
    return workers


def train(workers: list[FakeWorker], rounds: int, *, large: bool = False) -> None:
    for number in range(rounds):
        before = [worker.offer["round"] for worker in workers]
        for worker in workers:
            play(worker, 50.0 if large and worker.name == "d" and number % 2 else 0.1)
        for worker, round in zip(workers, before, strict=True):
            worker.next(round)


def main() -> None:
    for name in CASES:
        if (GOLDEN / name).exists():
            continue
        root = Path(tempfile.mkdtemp()) / name
        words = ["diloco", "server", "default", *MODEL, *CASES[name], f"output_dir={root}", "diloco.port=0"]
        run, server = RunDir(root), subprocess.Popen([sys.executable, "-m", "forgather_cli", *words])
        while not run.diloco_address.exists():
            time.sleep(0.1)
        workers = team(Client(json.loads(run.diloco_address.read_text())["port"], run.diloco_token.read_text().strip()))
        train(workers, ROUNDS, large=True)
        if name != "diloco-async":
            play(workers[0])  # the open round has one
        server.terminate()
        server.wait()
        for path in (run.diloco_token, root / "logs"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(root, GOLDEN / name)


if __name__ == "__main__":
    main()

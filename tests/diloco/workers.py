"""Real workers of a small model under a real server, and what their ledger says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diloco.client import Served, serving
from program import Process
from torch import Tensor

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.diloco.ledger import Line
from forgather_cli.diloco.samples import merge, total
from forgather_cli.run_dir import RunDir

ROUNDS, STEPS, BATCH = 3, 3, 4
RECIPE = (
    "model=nano", "precision=fp32", "num_hidden_layers=2", "hidden_size=16", "intermediate_size=32",
    "num_attention_heads=2",
    "optimizer=adamw", "learning_rate=2e-3", "warmup_steps=2", "data=synthetic", "seq_len=16", "data.num_samples=33",
    "data.num_eval_samples=4", "callbacks=minimal", f"global_batch_size={BATCH}", "per_device_train_batch_size=2",
    "deterministic=true", "device=cpu", "eval_strategy=no", "save_steps=2",
)  # fmt: skip
ALL = f"max_steps={ROUNDS * STEPS}"


def served(root: Path, *settings: str, workers: int = 2, recipe: Sequence[str] = RECIPE) -> Served:
    fixed = ("diloco.compression=fp32", f"diloco.sync_every={STEPS}", f"diloco.workers={workers}")
    return serving(root / "server", *recipe, *fixed, *settings)


def worker(server: Served, name: str, *settings: str, address: str = "", recipe: Sequence[str] = RECIPE) -> Process:
    """A start of this worker, which goes on where its run directory beside the server's is."""
    root = server.run.root.with_name(name)
    words = ("diloco", "worker", "default", *recipe, f"output_dir={root}", f"callbacks.diloco.worker_id={name}",
             "callbacks.diloco.heartbeat_interval=1", *settings)  # fmt: skip
    resumes = ("resume_from_checkpoint=true",) if (root / "config.yaml").exists() else ()
    address = address or f"127.0.0.1:{server.client.port}"
    return Process(*words, *resumes, "--server", address, cwd=root.parent, env={"DILOCO_TOKEN": server.client.token})


def composed(*settings: str) -> Config:
    return load_config("default", [*RECIPE, *settings]).config


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def is_audited(run: RunDir) -> bool:
    """Every sample that was given out is used once, with a worker, or to be given out again."""
    used: list[tuple[int, int]] = []
    for line in map(Line.from_json, run.rounds.read_text().splitlines()):
        used += [each for sent, _ in (line.closed.submissions if line.closed else ()) for each in sent.ranges]
        everything = [*used, *(each for member in line.members for each in member.ranges), *line.pool]
        if merge(everything) != ((0, line.cursor),) or total(everything) != line.cursor:
            return False
    return True


def finish(*processes: Process) -> None:
    """Wait for workers, which must end well."""
    for process in processes:
        assert process.finish() == 0, process.output

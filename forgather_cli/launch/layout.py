"""How many ranks a config asks for on this machine and in all, and how they are started. Needs no torch."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forgather_cli.config.batch import BatchPlan, batch_plan
from forgather_cli.config.rules import world_problems
from forgather_cli.config.schema import Config, value_at
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from forgather_cli.launch.place import Place

_ONE_JOB = "forgather"  # rdzv_id, which has to be the same on all nodes
_ON_CPU = 2  # ranks of nproc_per_node=auto


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a run are."""

    ranks_per_node: int = 1
    nodes: int = 1
    node: int = 0
    restarts: int = 0
    endpoint: str | None = None
    backend: str = "static"
    job_id: str = _ONE_JOB
    joined: str = ""
    """What has started the ranks already; empty if we do."""

    @property
    def world(self) -> int:
        """Ranks of the whole run."""
        return self.ranks_per_node * self.nodes

    @property
    def in_process(self) -> bool:
        """True if this process trains itself, and nothing is started."""
        return bool(self.joined) or (self.world == 1 and not self.restarts)

    def describe(self) -> str:
        """For people: who trains."""
        if self.joined:
            return f"{self.world} ranks that {self.joined} has started"
        if self.in_process:
            return "this process alone"
        each = "" if self.nodes == 1 else f" on each of {self.nodes} nodes, this being node {self.node}"
        restarts = f", restarted up to {self.restarts} times" if self.restarts else ""
        return f"{self.ranks_per_node} ranks{each}, started by torchrun{restarts}"


def plan_layout(config: Config, given: frozenset[str] = frozenset(), place: Place | None = None) -> Layout:
    """The layout of a run that is to begin. Raises ConfigError where settings do not fit the number of ranks.

    ``given`` are the paths that recipe and command line set, ``place`` the one in a world that exists already.
    """
    if place is not None:
        layout = _joined(config, given, place)
    else:
        layout = Layout(
            ranks_per_node=ranks_per_node(config),
            nodes=config.nnodes,
            node=config.node_rank,
            restarts=config.max_restarts,
            endpoint=config.rdzv_endpoint,
            # c10d alone lets nodes meet again, but unpickles what anybody writes into its store (torch 2.13)
            backend=config.rdzv_backend or ("c10d" if config.max_restarts else "static"),
            job_id=config.rdzv_id or _ONE_JOB,
        )
    problems = world_problems(config, layout.world)
    if layout.nodes > 1 and layout.endpoint is None:
        problems.append(
            f"rdzv_endpoint: nnodes={layout.nodes} have to meet somewhere; set rdzv_endpoint=HOST:PORT, of node 0"
        )
    if problems:
        raise ConfigError(problems)
    return layout


def ranks_per_node(config: Config) -> int:
    """Ranks that a launch here would start on each node."""
    if config.trainer.is_one_process:
        return 1
    if config.nproc_per_node != "auto":
        return config.nproc_per_node
    if config.trainer.is_one_process is None:
        return 1
    return (len(gpus()) if config.device in ("auto", "cuda") else 0) or _ON_CPU


def _joined(config: Config, given: frozenset[str], place: Place) -> Layout:
    problems = []
    if config.trainer.is_one_process and place.size > 1:
        problems.append(
            f"trainer: {value_at(config, 'trainer')} trains in one process, but {place.by} has started {place.size}; "
            "choose trainer=ddp, fsdp2 or pipeline, or start one process"
        )
    asked = config.nproc_per_node
    if "nproc_per_node" in given and asked != "auto" and asked * config.nnodes != place.size:
        problems.append(
            f"nproc_per_node: {asked} on {config.nnodes} nodes are asked for, but {place.by} has started {place.size} "
            "ranks; leave it out"
        )
    if "max_restarts" in given and config.max_restarts:
        problems.append(
            f"max_restarts: the ranks were started by {place.by}, and cannot be started again from here; leave it out"
        )
    if config.auto_find_batch_size:
        problems.append(
            f"auto_find_batch_size: the ranks were started by {place.by}, and cannot be started again from here; "
            "set auto_find_batch_size=false"
        )
    if problems:
        raise ConfigError(problems)
    return Layout(ranks_per_node=place.size, joined=place.by)


def gpus() -> list[str]:
    """GPUs that processes of this machine may use, as CUDA_VISIBLE_DEVICES names them: found without torch, whose
    import takes seconds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",")]
        return [name for name in named if name and not name.startswith("-")]
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return [str(n) for n, _ in enumerate(listed.iterdir())]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        found = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(n) for n in range(sum(line.startswith("GPU ") for line in found.stdout.splitlines()))]


def batch_and_steps(config: Config, samples: int | None) -> tuple[BatchPlan, int | None]:
    """Of a run with so many training samples. Its optimizer steps are None where the length of an epoch is unknown."""
    ranks = config.trainer.shard if config.trainer.cuts_layers else plan_layout(config).world
    batch = batch_plan(config, ranks, multiple_of=config.trainer.n_microbatches)
    if config.max_steps > 0:
        return batch, config.max_steps
    per_epoch, size = config.epoch_train_steps, batch.global_batch
    if per_epoch is None and samples is not None:
        per_epoch = samples // size if config.dataloader_drop_last else -(-samples // size)
    if per_epoch is None or config.num_train_epochs < 0:
        return batch, None
    return batch, math.ceil(per_epoch * config.num_train_epochs - 1e-9)

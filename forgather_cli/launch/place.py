"""Where a process stands among all that train together, as its environment tells it: torchrun's variables, or Slurm's.

Needs no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from forgather_cli.errors import ConfigError

_SLURM_PORT = 20_000
"""First port, and number of ports, for the rank 0 of a Slurm job that names none."""


@dataclass(frozen=True)
class Place:
    """One process among ``size``. The default is a process alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Processes on this node, which have consecutive ranks."""
    address: str = ""
    port: int = 0
    """Of the store through which the ranks find each other."""
    agent_store: bool = False
    """True if torchrun's agent offers that store; else rank 0 does."""
    attempt: int = 0
    """How often the ranks have been restarted."""
    by: str = ""
    """What started the ranks; empty alone."""


def joined(words: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Place | None:
    """The world this process was started into by torchrun, ``accelerate launch`` or Slurm; None if it was not.

    ``words`` are those of the command line: in a Slurm job ``rdzv_endpoint=HOST:PORT`` there is where the ranks meet,
    since only one of them reads a config. Raises ConfigError for an environment that is not whole.
    """
    if "RANK" in environ:
        return _from_torchrun(environ)
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or (
        environ.get("SLURM_NTASKS") if "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ else None
    )  # the batch script has SLURM_NTASKS too and is one process
    if "SLURM_PROCID" in environ and tasks and int(tasks) > 1:
        return _from_slurm(int(tasks), words, environ)
    return None


def launched(node: int, attempt: int, environ: MutableMapping[str, str] = os.environ) -> Place:
    """The place of a rank that our launcher started on node ``node``, ``attempt`` times before.

    torchrun's c10d rendezvous numbers nodes by their addresses (torch 2.13, ``dynamic_rendezvous.py``), we by
    ``node_rank``: rank 0 is to run where the command said so.
    """
    place = _from_torchrun(environ)
    environ["GROUP_RANK"] = str(node)
    rank = node * place.local_size + place.local_rank
    return replace(place, rank=rank, attempt=attempt, by="")


def _from_torchrun(environ: Mapping[str, str]) -> Place:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment (RANK is set)"
    tasks = environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS")
    if by != "torchrun" and tasks == (str(rank), str(size)):  # a script has set RANK by them
        by = "Slurm"
    return Place(
        rank=rank,
        size=size,
        local_rank=_number(environ, "LOCAL_RANK", 0),
        local_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
        address=environ.get("MASTER_ADDR") or ("" if size == 1 else _missing("MASTER_ADDR")),
        port=_number(environ, "MASTER_PORT", 0 if size == 1 else None),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        by=by,
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if value is None and default is None:
        _missing(name)
    try:
        return int(value) if value is not None else default or 0
    except ValueError:
        raise ConfigError(f"{name}: must be a whole number in the environment, got {value!r}") from None


def _missing(name: str) -> str:
    raise ConfigError(f"{name}: missing in the environment, which has RANK; start with torchrun, or unset RANK")


def _from_slurm(size: int, words: Sequence[str], environ: Mapping[str, str]) -> Place:
    named = next((word.partition("=")[2] for word in words if word.startswith("rdzv_endpoint=")), "")
    host, _, port = named.rpartition(":")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or host or first_host(nodes)
    if not address:
        raise ConfigError("rdzv_endpoint: Slurm names no nodes to meet on; set rdzv_endpoint=HOST:PORT, of rank 0")
    made_up = _SLURM_PORT + _number(environ, "SLURM_JOB_ID", 0) % _SLURM_PORT
    tasks: list[int] = []  # of each node: 4(x2),3 is 4, 4, 3
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        tasks += [int(count)] * int(times or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    sees_one_gpu = "," not in environ.get("CUDA_VISIBLE_DEVICES", ",")  # --gpus-per-task
    return Place(
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_rank=0 if sees_one_gpu else _number(environ, "SLURM_LOCALID", 0),
        local_size=tasks[node] if node < len(tasks) else 1,
        address=address,
        port=int(environ.get("MASTER_PORT") or (port if port.isdigit() else made_up)),
        by="Slurm",
    )


def first_host(nodes: str) -> str:
    """The first of a Slurm list of nodes: ``gpu[03-05,9],cpu1`` -> ``gpu03``."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


def enter(place: Place, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell libraries and users' code in this process what torchrun would have told them."""
    environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
    )
    if place.address:
        environ.update(MASTER_ADDR=place.address, MASTER_PORT=str(place.port))

"""torchrun's elastic agent in this process: it lets the nodes meet, starts this node's ranks and restarts them."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from forgather_cli.errors import SetupError
from forgather_cli.launch.job import Job
from forgather_cli.launch.layout import Layout
from forgather_cli.launch.processes import available_cores

_MEETING = 600  # seconds in which all nodes must have come
_ONE_NODE = "forgather-one-node"


def run_agent(layout: Layout, job: Job, config: Path | None) -> dict[int, int]:
    """Run the ranks of this node to their end; returns the exit codes of those that failed, by rank on this node.

    ``config`` is what the ranks are to read, None where rank 0 will tell them. Call it outside the main thread: there
    the agent handles no signals (torch 2.13, ``PContext.start``). Raises SetupError if the nodes do not meet, at the
    start or any more.
    """
    if layout.nodes > 1 and layout.restarts:  # a store for each attempt, since nodes may count attempts differently
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    alone = layout.nodes == 1
    launch = LaunchConfig(
        min_nodes=layout.nodes,
        max_nodes=layout.nodes,
        nproc_per_node=layout.ranks_per_node,
        run_id=layout.job_id,
        rdzv_endpoint="" if alone else layout.endpoint or "",
        rdzv_backend=_ONE_NODE if alone else layout.backend,
        rdzv_configs={
            "timeout": _MEETING,
            "read_timeout": _MEETING,
            "rank": layout.node,
            "is_host": layout.node == 0,
        },
        local_addr="localhost" if alone else None,  # a laptop's own name need not resolve
        max_restarts=layout.restarts,
        logs_specs=_Environment(job, layout.ranks_per_node),
    )
    # -P where this process does not find modules in the working directory first: a random.py there
    flags = [] if sys.path[:1] in ([""], [str(Path.cwd())]) else ["-P"]
    told = [] if config is None else ["--config", str(config)]
    try:
        elastic_launch(launch, sys.executable)(*flags, "-m", "forgather_cli.worker", *told)
    except ChildFailedError as error:
        return {failure.local_rank: failure.exitcode for failure in error.failures.values()}
    except (RendezvousError, RuntimeError, ValueError, TimeoutError) as error:  # what rendezvous backends raise
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        where = f"{layout.endpoint} ({layout.backend})"
        raise SetupError(f"rdzv_endpoint: the nodes do not meet at {where}: {reason}") from error
    return {}


def exit_code(pid: int) -> int | None:
    """Of a rank that the agent has waited for, of whichever start: what holds the process knows it (torch 2.13)."""
    handlers = [each for each in gc.get_objects() if type(each) is SubprocessHandler]
    started = (each.proc for each in handlers if hasattr(each, "proc"))  # another may be starting in the agent's thread
    return next((process.wait() for process in started if process.pid == pid), None)


class _OneNode(RendezvousHandler):
    """The rendezvous of a node that waits for no other one: without a socket.

    torch's own opens a store on all interfaces, to which anybody may write, and unpickles what it finds there (2.13,
    ``dynamic_rendezvous.py``).
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._job_id = parameters.run_id

    def get_backend(self) -> str:
        return _ONE_NODE

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))  # ranks meet in the job's folder

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._job_id

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_ONE_NODE, _OneNode)


class _Environment(DefaultLogsSpecs):
    """Output stays where it is, ranks write their logs themselves; but this is where their environment can be set."""

    def __init__(self, job: Job, ranks: int) -> None:
        super().__init__(log_dir=os.devnull)
        defaults = {
            "OMP_NUM_THREADS": str(max(1, available_cores() // ranks)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # the store warns of ranks that are gone
        }
        self._own = {name: os.environ.get(name, value) for name, value in defaults.items()}
        self._job, self._starts = job, 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called for each start of this node's ranks.

        They are counted here: torchrun's own count leaves out restarts that another node began (torch 2.13,
        ``_invoke_run``), and nodes would disagree on whether they go on or begin.
        """
        for environment in envs.values():
            environment.update({**self._own, **self._job.environment(self._starts)})
        self._starts += 1
        return super().reify(envs)

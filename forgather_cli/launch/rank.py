"""One rank from start to end: its log, signals, the other ranks, the process group and errors, around the work.

The work is a callable (``worker.work``). ``trainer=single`` and ranks that torchrun or Slurm has started do it in the
process of the command (``start.py``); ranks that our launcher starts are ``python -m forgather_cli.worker --config
RUN/config.yaml``, without --config on nodes that do not hold the run directory.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import Config
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.launch import failures, hang
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.exit_status import FAILED, MISTAKE, ExitStatus
from forgather_cli.launch.job import Job
from forgather_cli.launch.place import enter, launched
from forgather_cli.launch.processes import end_with_parent, leave_now
from forgather_cli.launch.rank_log import lasting_output, rank_log
from forgather_cli.launch.rendezvous import FAREWELL, within
from forgather_cli.launch.stacks import record_collectives
from forgather_cli.run_dir import RunDir
from forgather_cli.terminal.bars import doing

Work = Callable[[Config, RunDir, RankContext], ExitStatus]
"""Trains, and returns how that ended."""

_WAIT_FOR_CONFIG = 600.0  # seconds
_FAILED_FAREWELL = 5.0  # seconds that a rank waits for others to disconnect after a failure; killed ones never do
_SEES_DIRECTORY = 10.0  # seconds that a network file system gets to show what another node has written
_TEAR_DOWN = 10.0  # seconds


@dataclass(frozen=True)
class Start:
    """What a rank is to train, and where."""

    run: RunDir
    config: Config | Path
    """A file is read once there is a rank log, since reading it may print warnings."""
    going_on: bool | None = None
    """True: resume from the newest checkpoint whatever the config says. None: only after a restart."""


def run_rank(rank: RankContext, find: Start | Callable[[RankContext], Start], work: Work) -> ExitStatus:
    """Do ``work`` on ``find``, or what it returns. Never raises: an error is announced, shown and returned."""
    with ExitStack() as stack:
        try:
            stack.enter_context(failures.watch_signals_and_ranks(rank))
            if rank.rendezvous_folder:  # connecting waits for nobody, and other ranks hear even of a wrong config
                rank.connect()
            start = find if isinstance(find, Start) else find(rank)
            rank.run = run = start.run
            try:
                log = rank_log(run.rank_log(rank.place.rank), terminal=rank.place.rank == 0)
                rank.log = stack.enter_context(log)
            except OSError as error:
                raise SetupError(f"output_dir: {error.filename} cannot be written: {error.strerror}") from error
            rendezvous, config = rank.connect(), start.config
            if isinstance(config, Path):
                from forgather_cli.config.decode import load_saved

                config = replace(load_saved(config), output_dir=str(run.root))
            going_on = start.going_on
            if going_on is None:
                # a run that began from another run's checkpoint begins there again until it has its own
                has_own = bool(run.checkpoint_steps()) or not isinstance(config.resume_from_checkpoint, str)
                going_on = rank.place.attempt > 0 and has_own
            if rendezvous is not None and rank.place.rank == 0:
                rendezvous.share(run, going_on=going_on)
            if going_on:
                config = replace(config, resume_from_checkpoint=True, resume_components="all")
            with _process_group(config, rank), hang.watch_progress(rank, config):
                status = work(config, run, rank)
        except (Exception, SystemExit) as error:  # the edge of the process
            status = failures.status_of(rank, error)
        rank.ended.set()
        failures.announce(rank, status)
        failures.leave_store(rank, patience=_FAILED_FAREWELL if status.failed else FAREWELL)
        if rank.place.rank == 0 and rank.run is not None and not status.failed:  # a restart needs it
            rank.run.secret.unlink(missing_ok=True)
    return status


@contextmanager
def _process_group(config: Config, rank: RankContext) -> Iterator[None]:
    """Collective. A process group of all ranks inside; of one rank too, except for trainer=single, which needs none.

    Collectives that wait longer than ``hang_timeout`` raise. After an error the group is left as it is: to tear it
    down may wait for ranks that are gone, and the process ends anyway.
    """
    if config.trainer.is_one_process:
        yield
        return
    with doing("importing torch"):
        import torch
        import torch.distributed as dist

        from forgather_cli.distributed import init_process_group

        record_collectives()
        place, rendezvous = rank.place, rank.rendezvous
        store: Any = dist.HashStore() if rendezvous is None else rendezvous.group_store()  # type: ignore[attr-defined]
        on_cuda = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
        one_node = place.local_size == place.size
        with doing(rank.meet("connecting the ranks")):
            init_process_group(
                on_cuda, config.hang_timeout, one_node=one_node, store=store, rank=place.rank, world_size=place.size
            )
    if rendezvous is not None:
        rendezvous.all_here()
    try:
        yield
    except BaseException:
        if place.size == 1:
            dist.destroy_process_group()
        raise
    within(_TEAR_DOWN, dist.destroy_process_group)


# ------------------------------------------------------------------------------------------------ what rank 0 shares


@doing("waiting for rank 0 to say what to train")
def wait_for_start(rank: RankContext) -> Start:
    """Wait for the run directory and config that rank 0 shares. Raises SetupError if this node does not see them."""
    rendezvous = rank.connect()
    assert rendezvous is not None
    begun = time.monotonic()
    unseen_since: float | None = None
    while (answer := rendezvous.shared())[0] is None:
        now, problem = time.monotonic(), answer[1]
        unseen_since = now if unseen_since is None and problem else unseen_since
        if unseen_since is not None and now > unseen_since + _SEES_DIRECTORY:
            raise SetupError(problem)
        if now > begun + _WAIT_FOR_CONFIG:
            raise SetupError(f"rank 0 has not told what to train within {_WAIT_FOR_CONFIG:g} s; see its output")
        time.sleep(0.05)
    found = answer[0]
    assert found is not None
    run = RunDir(Path(found.root))
    return Start(run, run.root / found.config, going_on=found.going_on)


# ---------------------------------------------------------------------------------------------------------- the process


@lasting_output()
def main(work: Work) -> int:
    """Main of a rank that our launcher started."""
    job = Job.from_environment()
    if job is None:
        print("forgather_cli.worker is started by forgather train", file=sys.stderr)
        return MISTAKE
    end_with_parent(job.launcher)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until there is a log, to which SIGUSR2 prints stacks
    place = launched(job.node, job.number)
    enter(place)
    try:
        job.attempt(job.number).write_pid(place.rank)
    except FileNotFoundError:  # the launcher was stopped and has removed its folder
        return FAILED
    rank = RankContext(place, job)
    path = Path(sys.argv[2]) if sys.argv[1:2] == ["--config"] else None

    def find(rank: RankContext) -> Start:
        if place.size != place.local_size * job.nodes:  # ranks are numbered by nodes of one size
            here = f"got {place.local_size} here of {place.size} ranks"
            raise ConfigError(f"nproc_per_node: must be the same on every node, {here}; set it")
        if path is None:
            return wait_for_start(rank)
        root = path.parent.resolve() if job.nodes > 1 else path.parent  # nodes' working directories may differ
        return Start(RunDir(root), path)

    status = run_rank(rank, find, work)
    code = rank.exit_code(status)
    if status.failed:  # other ranks may be gone, and a normal exit might wait for them
        leave_now(code)
    return code

"""Saving checkpoints: copy to host memory, write in the background, publish, thin out."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import forgather_cli
from forgather_cli.checkpoint import retention
from forgather_cli.checkpoint.components import Component, LocalShard
from forgather_cli.checkpoint.format import MAX_SHARD_BYTES
from forgather_cli.checkpoint.manifest import BestBy, Manifest
from forgather_cli.checkpoint.publish import Publication, reason
from forgather_cli.checkpoint.snapshot import Snapshots
from forgather_cli.checkpoint.trial import try_save
from forgather_cli.config.schema import RunSettings
from forgather_cli.distributed import cpu_group, gather, joined
from forgather_cli.errors import SetupError
from forgather_cli.messages import sent
from forgather_cli.run_dir import RunDir

log = logging.getLogger(__name__)

_SMALL_FILES = 1 << 18  # bytes of a checkpoint besides its tensors, on disk
_MUST_BE_FINITE = ("loss", "grad_norm", "max_grad_norm")


@sent
@dataclass(frozen=True)
class _Ending:
    """How a save ended on one rank."""

    published: bool
    failure: str | None
    unanswered: bool
    """It failed for want of an answer, so that another rank knows better why."""
    group_is_lost: bool


class Checkpointer:
    """Writes one run's checkpoints. One save is in flight at most. Construction is collective.

    ``group``: a CPU process group of all ranks, None where there is one rank. Methods named collective are called by
    all ranks in the same order, from the thread that ``group`` belongs to; writers have a group of their own. After
    start-up nothing here raises because of a checkpoint that cannot be written: it is an error in the log and in
    ``failures``, on all ranks alike, the checkpoints before it stand, and training goes on.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        args: RunSettings,
        group: Any = None,
        rank: int = 0,
        world_size: int = 1,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.run = run
        self.failures: list[tuple[int, str]] = []
        """(step, reason) of every save that was not published."""
        self.best_by = BestBy(args.metric_for_best_model, args.greater_is_better)
        self._args = args
        self._group, self._rank, self._world_size = group, rank, world_size
        self._snapshots = Snapshots(
            group=group,
            rank=rank,
            world_size=world_size,
            check=args.replication_check,
            max_shard_bytes=max_shard_bytes,
        )
        self._writers_group = None if group is None else cpu_group()
        self._job: Publication | None = None
        self._thread: threading.Thread | None = None
        self._stuck: threading.Thread | None = None
        """A writer that was left to itself."""
        self._published: list[Path] = []

    # ----------------------------------------------------------------------------------------------------- at start

    def clean(self) -> None:
        """Remove what a killed job left in the run directory, which this job holds. Call it before ``newest_valid``."""
        self.wait()
        if self._rank == 0:
            retention.clean(self.run)

    def trial(
        self, components: Iterable[Component], *, rows: Mapping[str, LocalShard] | None = None, num_bytes: int = 0
    ) -> None:
        """Collective. Try what a save does, before the first step: encode every state, write, look at free space.

        A checkpoint is taken to need the full tensors of all ranks' ``rows``, and in proportion ``num_bytes`` beside
        this rank's for what does not exist yet. With save_strategy=no, where a signal saves all the same, what is wrong
        with the directory is a warning. Raises SetupError on all ranks alike.
        """
        planned = self._args.save_strategy != "no"
        spare = sum(old.size_bytes for old in self._expendable(coming=1)) if self._rank == 0 else 0
        try_save(
            self.run,
            components,
            rows or {},
            num_bytes,
            group=self._group,
            rank=self._rank,
            planned=planned,
            spare=spare,
        )

    # --------------------------------------------------------------------------------------------------------- saving

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, LocalShard],
        optimizer: Mapping[str, LocalShard],
        components: Iterable[Component],
        write_model_files: Callable[[Path], None],
        info: Mapping[str, Any],
        metrics: Mapping[str, float],
        healthy: bool = True,
    ) -> bool:
        """Collective. Save this step; returns when the state is copied (async_save) or published.

        Waits for the save before. False: it failed already; with async_save a later failure is seen in ``failures``.
        ``write_model_files`` puts config and tokenizer into the directory it is given, on rank 0 and from another
        thread. ``info`` has strategy, config_fingerprint, final (training ends here), versions, and what else is worth
        keeping (JSON). Raises ReplicationError, on all ranks, where they differ in what must be equal, and
        NotFiniteError where weights or moments are void.
        """
        self.wait()
        failures, components = len(self.failures), list(components)
        try:
            snapshot = self._snapshots.take(
                step,
                {"model/model": model, "optimizer/optimizer": optimizer},
                components,
                failure=self._obstacle(metrics),
                share=not self._args.async_save,
            )
        except SetupError as error:
            self._failed(step, reason(error))
            return False
        more = dict(info)
        manifest = Manifest(
            step=step,
            strategy=more.pop("strategy", ""),
            world_size=self._world_size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config_fingerprint=more.pop("config_fingerprint", None),
            versions={
                "forgather": forgather_cli.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                **more.pop("versions", {}),
            },
            metrics={key: float(value) for key, value in metrics.items()},
            healthy=healthy,
            final=bool(more.pop("final", False)),
            rollbacks=int(more.pop("rollbacks", 0)),
            best_by=self.best_by,
            info=more,
            components={component.key: component.sharing.value for component in components},
            holders=snapshot.holders,
        )
        if self._writers_group is None and self._group is not None:
            self._writers_group = cpu_group()
        self._job = Publication(
            self.run.checkpoint(step),
            snapshot=snapshot,
            manifest=manifest,
            write_model_files=write_model_files,
            timeout=self._args.save_timeout,
            group=self._writers_group,
            rank=self._rank,
        )
        if self._args.async_save:
            # the thread is a daemon: a disk that hangs must not hang the interpreter's exit
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._thread = threading.Thread(target=self._write, args=(self._job,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(self._job)
            self._collect(self._group)
        return len(self.failures) == failures

    def _obstacle(self, metrics: Mapping[str, float]) -> str | None:
        """Why this rank cannot save now."""
        for key in _MUST_BE_FINITE:
            if key in metrics and not math.isfinite(metrics[key]):
                return f"{key} is {metrics[key]}, so the weights are not worth keeping"
        if self._stuck is not None and self._stuck.is_alive():  # it holds a whole share in host memory
            return "the writer of a save before still hangs"
        self._stuck = None
        return None

    def _write(self, job: Publication) -> None:
        """Publish, in the writer thread where there is one. Training on a CPU keeps its cores: Linux takes a priority
        for each thread. Hashing at equal priority stalls OpenMP's barriers: steps of 0.2 s took up to 1.4 s on two
        cores (torch 2.13).
        """
        if sys.platform == "linux" and threading.current_thread() is self._thread:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        if self._rank == 0 and self.failures:
            with contextlib.suppress(OSError):
                retention.clean(self.run)  # what a rank was still writing when its save was given up
        if self._rank == 0 and not job.target.exists():
            with contextlib.suppress(OSError):  # no directory yet
                if shutil.disk_usage(self.run.checkpoints).free < 1.02 * job.num_bytes + _SMALL_FILES:
                    self._thin_out(coming=1)
        job.run()
        if self._rank == 0 and job.path is not None:
            self._thin_out(coming=0, protected={job.step})

    def _thin_out(self, *, coming: int, protected: Collection[int] = ()) -> None:
        try:
            retention.delete_all(self._expendable(coming=coming, protected=protected))
        except Exception as error:  # the edge of the thread
            log.error("old checkpoints were not deleted: %s", reason(error))

    def _expendable(self, *, coming: int, protected: Collection[int] = ()) -> list[retention.CheckpointInfo]:
        """What retention does not keep, with ``coming`` more to come: never the newest that is there, nor the best."""
        limit = self._args.save_total_limit
        if limit is None:
            return []
        return retention.expendable(
            retention.list_checkpoints(self.run),
            limit=max(1, limit - coming),
            num_best=max(self._args.preserve_n_best, int(self._args.load_best_model_at_end)),
            best_by=self.best_by,
            protected=protected,
        )

    # ---------------------------------------------------------------------------------------------------------- results

    @property
    def is_done(self) -> bool:
        """True if no save is in flight on this rank, or its writer is past all patience. Costs nothing."""
        job, thread = self._job, self._thread  # also asked for in other threads than the one that sets them
        if job is None or thread is None or not thread.is_alive():
            return True
        return time.monotonic() > job.give_up_at

    def poll(self) -> list[Path]:
        """Checkpoints published since the last call. Never waits on one rank.

        With several ranks collective: call it where all ranks know that all of them are done (``is_done``), else it
        waits for the last one.
        """
        if self._job is not None and (self._group is not None or self.is_done):
            self.wait()
        published, self._published = self._published, []
        return published

    def wait(self) -> None:
        """Collective. Wait for the save in flight, at most until save_timeout and a little; agree on how it ended."""
        if self._job is not None:
            self._join(self._job)
            self._collect(self._group)

    def close(self, patience: float | None = None) -> None:
        """Wait for the save in flight and give the host memory back. Also called when the interpreter exits.

        Asks no other rank, as it may be called while an error ends this one. After ``patience`` seconds the writer goes
        on by itself until the process ends.
        """
        if patience is not None and self._thread is not None:
            self._thread.join(patience)
            if self._job is not None and self._thread.is_alive():
                log.warning("the checkpoint of step %d is not finished as this run ends", self._job.step)
                self._job = self._thread = None
        if self._job is not None:
            self._join(self._job)
            self._collect(None)
        self._snapshots.free()
        atexit.unregister(self.close)

    def _join(self, job: Publication) -> None:
        """Wait for the writer; then see to it that one that is still at it publishes nothing."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, job.give_up_at - time.monotonic()))
        if self._thread.is_alive():
            self._stuck = self._thread
            self._snapshots.free()  # the stuck thread still reads that memory
            if job.abandon():
                job.failure = job.too_long

    def _collect(self, group: Any) -> None:
        """Collective in ``group``. Rank 0 knows whether the checkpoint is published; why not, any rank may know."""
        job, self._job, self._thread = self._job, None, None
        assert job is not None
        failure = job.failure or (None if job.path else "the writer ended without an answer")
        ending = _Ending(job.path is not None, failure, job.unanswered, job.group_is_lost or self._stuck is not None)
        endings = gather(ending, group)
        if any(other.group_is_lost for other in endings):
            self._writers_group = None
        if not endings[0].published:
            known = [None if other.unanswered else other.failure for other in endings]
            self._failed(job.step, joined(known) or joined([other.failure for other in endings]) or "no rank knows why")
            return
        self._published.append(job.target)
        if endings[0].failure is not None:
            log.warning("%s: is published, but %s", job.target, endings[0].failure)

    def _failed(self, step: int, why: str) -> None:
        self.failures.append((step, why))
        steps = self.run.checkpoint_steps()
        stands = f"the newest one is {self.run.checkpoint(steps[-1])}" if steps else "the run has none"
        log.error("the checkpoint of step %d was not saved: %s; %s", step, why, stands)

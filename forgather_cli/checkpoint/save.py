"""Saving checkpoints: copy to host memory, write in the background, publish, delete old ones.

``Checkpointer.save`` takes a ``Snapshot`` and starts a thread, in which a ``Publication`` writes and publishes it and
``save_total_limit`` is applied. ``newly_published`` lets all ranks agree on the result.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import platform
import shutil
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
from forgather_cli.documents.messages import sent
from forgather_cli.errors import SetupError
from forgather_cli.run_dir import RunDir

log = logging.getLogger(__name__)

_SMALL_FILES = 1 << 18  # bytes of a checkpoint besides its tensors, on disk
PATIENCE = 5.0
"""Seconds in which a save is not late, at least."""
_PATIENCE = 0.25  # of the time between saves: so much more may be lost, and training waits as seldom as that allows
_MUST_BE_FINITE = ("loss", "grad_norm", "max_grad_norm")


@sent
@dataclass(frozen=True)
class _Result:
    """How a save ended, as one rank knows it."""

    published: bool
    failure: str | None
    unanswered: bool
    """It failed because another rank did not answer, and that one knows better why."""
    group_is_lost: bool


class Checkpointer:
    """Writes one run's checkpoints, at most one at a time. Construction is collective.

    ``group``: a CPU process group of all ranks, None where there is one rank. Collective methods are called by all
    ranks in the same order, in the main thread; writer threads have a group of their own. After start-up nothing here
    raises because a checkpoint cannot be written: that is an error in the log and in ``failures``, on all ranks alike,
    earlier checkpoints stay, and training continues.
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
        self._publication: Publication | None = None
        self._thread: threading.Thread | None = None
        self._stuck: threading.Thread | None = None
        """A writer that was given up and still runs."""
        self._published: list[Path] = []
        self._begun = time.monotonic()
        """When the newest save began, or training."""

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

        The space that a checkpoint needs is estimated as the full tensors of all ranks' ``rows``, plus ``num_bytes``
        for each rank's tensors that do not exist yet. With save_strategy=no, where only a signal or a command saves, a
        problem with the directory is a warning. Raises SetupError on all ranks alike.
        """
        planned = self._args.save_strategy != "no"
        spare = sum(old.size_bytes for old in self._deletable(coming=1)) if self._rank == 0 else 0
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
        stem: str = "model/model",
        write_model_files: Callable[[Path], None],
        info: Mapping[str, Any],
        metrics: Mapping[str, float],
        healthy: bool = True,
    ) -> bool:
        """Collective. Save this step; returns when the state is copied (async_save) or published.

        Waits for the previous save. False: it failed already; with async_save a later failure is seen in ``failures``.
        ``stem``: of the files of ``model``. ``write_model_files(directory)`` writes config and tokenizer, on rank 0 and
        in another thread. ``info``: strategy, config_fingerprint, final (training ends here), versions, and anything
        else for the manifest (JSON).
        Raises, on all ranks, ReplicationError where they differ in what must be equal, and NotFiniteError where
        weights or moments are not finite.
        """
        self.wait()
        since, self._begun = self._begun, time.monotonic()
        failures, components = len(self.failures), list(components)
        try:
            snapshot = self._snapshots.take(
                step,
                {stem: model, "optimizer/optimizer": optimizer},
                components,
                failure=self._reason_not_to_save(metrics),
                copy_host_tensors=self._args.async_save,
            )
        except SetupError as error:
            self._record_failure(step, reason(error))
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
            metrics={key: float(value) for key, value in metrics.items() if hasattr(value, "__float__")},
            healthy=healthy,
            final=bool(more.pop("final", False)),
            rollbacks=int(more.pop("rollbacks", 0)),
            best_by=self.best_by,
            info=more,
            components={component.key: component.sharing.value for component in snapshot.components},
            holders=snapshot.holders,
            buffers=snapshot.unchecked,
        )
        if self._writers_group is None and self._group is not None:
            self._writers_group = cpu_group()
        self._publication = Publication(
            self.run.checkpoint(step),
            snapshot=snapshot,
            manifest=manifest,
            write_model_files=write_model_files,
            timeout=self._args.save_timeout,
            patience=max(PATIENCE, _PATIENCE * (self._begun - since)) if self._args.async_save else 0.0,
            group=self._writers_group,
            rank=self._rank,
        )
        if self._args.async_save:
            # the thread is a daemon: a disk that hangs must not hang the interpreter's exit
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._thread = threading.Thread(
                target=self._publish, args=(self._publication,), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._publish(self._publication)
            self._agree_on_result(self._group)
        return len(self.failures) == failures

    def _reason_not_to_save(self, metrics: Mapping[str, float]) -> str | None:
        """Why this rank cannot save now; None if it can."""
        for key in _MUST_BE_FINITE:
            if key in metrics and not math.isfinite(metrics[key]):
                return f"{key} is {metrics[key]}, so the weights are not worth keeping"
        if self._stuck is not None and self._stuck.is_alive():  # it holds a whole share in host memory
            return "the writer of a save before still hangs"
        self._stuck = None
        return None

    def _publish(self, publication: Publication) -> None:
        """Write and publish a checkpoint and apply save_total_limit, in the writer thread if there is one."""
        if self._rank == 0 and self.failures:
            with contextlib.suppress(OSError):
                retention.clean(self.run)  # files of a save that was given up
        if self._rank == 0 and not publication.target.exists():
            # short of space: delete what the limit would delete afterwards
            with contextlib.suppress(OSError):  # no directory yet
                if shutil.disk_usage(self.run.checkpoints).free < 1.02 * publication.num_bytes + _SMALL_FILES:
                    self._delete_old(coming=1)
        publication.run()
        if self._rank == 0 and publication.path is not None:
            self._delete_old(coming=0, protected={publication.step})

    def _delete_old(self, *, coming: int, protected: Collection[int] = ()) -> None:
        try:
            retention.delete_checkpoints(self._deletable(coming=coming, protected=protected))
        except Exception as error:  # the edge of the thread
            log.error("old checkpoints were not deleted: %s", reason(error))

    def _deletable(self, *, coming: int, protected: Collection[int] = ()) -> list[retention.CheckpointInfo]:
        """Checkpoints over save_total_limit once ``coming`` more are there; never the newest one, nor the best."""
        limit = self._args.save_total_limit
        if limit is None:
            return []
        return retention.deletable(
            retention.list_checkpoints(self.run),
            limit=max(1, limit - coming),
            num_best=max(self._args.preserve_n_best, int(self._args.load_best_model_at_end)),
            best_by=self.best_by,
            protected=protected,
        )

    # ---------------------------------------------------------------------------------------------------------- results

    @property
    def is_done(self) -> bool:
        """True if this rank writes no checkpoint, or its writer has been given up. Waits for nobody."""
        publication, thread = self._publication, self._thread  # read once: other threads call this too
        if publication is None or thread is None or not thread.is_alive():
            return True
        return time.monotonic() > publication.give_up_at

    def newly_published(self) -> list[Path]:
        """Checkpoints published since the last call. With one rank it never waits.

        Collective with several ranks: it waits for the last writer, unless all ranks are done (``is_done``).
        """
        if self._publication is not None and (self._group is not None or self.is_done):
            self.wait()
        published, self._published = self._published, []
        return published

    def wait_if_late(self) -> None:
        """Wait for this rank's writer if it is late, as those of the others are by then: steps that training would do
        meanwhile could be lost. Nothing here waits for another rank's main thread.
        """
        if self._publication is not None and self._publication.is_late:
            self.wait_for_writer(self._publication)

    def wait(self) -> None:
        """Collective. Wait for the save in flight, until its ``give_up_at`` at most; agree on how it ended."""
        if self._publication is not None:
            self.wait_for_writer(self._publication)
            self._agree_on_result(self._group)

    def close(self, patience: float | None = None) -> None:
        """Wait for the save in flight and free the host memory. Also called when the interpreter exits.

        Does not communicate, as an error may be ending this rank. After ``patience`` seconds it waits no longer, and
        the writer continues until the process ends.
        """
        if self._publication is not None:
            self._publication.hurry()
        if patience is not None and self._thread is not None:
            self._thread.join(patience)
            if self._publication is not None and self._thread.is_alive():
                log.warning("the checkpoint of step %d is not finished as this run ends", self._publication.step)
                self._publication = self._thread = None
        if self._publication is not None:
            self.wait_for_writer(self._publication)
            self._agree_on_result(None)
        self._snapshots.free()
        atexit.unregister(self.close)

    def wait_for_writer(self, publication: Publication) -> None:
        """Wait for the writer thread until its ``give_up_at``; if it still runs then, keep it from publishing.

        ``launch.stacks`` knows this method by its name, and shows the writer's stack instead.
        """
        if self._thread is None:
            return
        publication.hurry()
        self._thread.join(max(0.0, publication.give_up_at - time.monotonic()))
        if self._thread.is_alive():
            self._stuck = self._thread
            self._snapshots.free()  # the stuck thread still reads that memory
            if publication.abandon():
                publication.failure = publication.too_long

    def _agree_on_result(self, group: Any) -> None:
        """Collective in ``group``. Rank 0 knows whether the checkpoint is published; any rank may know why not."""
        publication, self._publication, self._thread = self._publication, None, None
        assert publication is not None
        failure = publication.failure or (None if publication.path else "the writer ended without an answer")
        lost = publication.group_is_lost or self._stuck is not None
        result = _Result(publication.path is not None, failure, publication.unanswered, lost)
        results = gather(result, group)
        if any(other.group_is_lost for other in results):
            self._writers_group = None
        if not results[0].published:
            known = [None if other.unanswered else other.failure for other in results]
            self._record_failure(
                publication.step, joined(known) or joined([other.failure for other in results]) or "no rank knows why"
            )
            return
        self._published.append(publication.target)
        if results[0].failure is not None:
            log.warning("%s: is published, but %s", publication.target, results[0].failure)

    def _record_failure(self, step: int, why: str) -> None:
        self.failures.append((step, why))
        if not self.run.root.is_dir():  # that it was removed, who holds it will say
            return
        steps = self.run.checkpoint_steps()
        stands = f"the newest one is {self.run.checkpoint(steps[-1])}" if steps else "the run has none"
        log.error("the checkpoint of step %d was not saved: %s; %s", step, why, stands)

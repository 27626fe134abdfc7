"""Saving checkpoints: copy to host memory, write in the background, publish, thin out."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import forgather_cli
from forgather_cli.checkpoint import retention
from forgather_cli.checkpoint.components import Component, Rows, encode_components, total_bytes
from forgather_cli.checkpoint.encoding import Encoded
from forgather_cli.checkpoint.files import remove, write_file
from forgather_cli.checkpoint.gather import gather
from forgather_cli.checkpoint.layout import MAX_SHARD_BYTES, Piece, plan
from forgather_cli.checkpoint.manifest import BestBy, Manifest, now
from forgather_cli.checkpoint.publish import Publication, reason
from forgather_cli.checkpoint.snapshot import HostBuffers, Snapshot, copy_events
from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import ForgatherError, SetupError
from forgather_cli.run_dir import RunDir

log = logging.getLogger(__name__)

_MUST_BE_FINITE = ("loss", "grad_norm", "max_grad_norm")
_GRACE = 5.0
"""Seconds after save_timeout in which a writer may notice it; then it is left to itself."""


class Checkpointer:
    """Writes one run's checkpoints. One save is in flight at most.

    ``group``: an own CPU process group of all ranks, None where there is one rank. Methods named collective are called
    by all ranks in the same order. After start-up nothing here raises because of a checkpoint that cannot be written:
    it is an error in the log and in ``failures``, the checkpoints before it stand, and training goes on.
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
        self.protected: set[int] = set()
        """Steps that retention leaves alone, for example the one this run was resumed from."""
        self.failures: list[tuple[int, str]] = []
        """(step, reason) of every save that was not published."""
        self.best_by = BestBy(args.metric_for_best_model, args.greater_is_better)
        self._args = args
        self._group, self._rank, self._world_size = group, rank, world_size
        self._max_shard_bytes = max_shard_bytes
        self._buffers = HostBuffers()
        self._job: Publication | None = None
        self._thread: threading.Thread | None = None
        self._published: list[Path] = []

    # ----------------------------------------------------------------------------------------------------- at start

    def clean(self) -> None:
        """Remove what a killed job left in the run directory, which this job holds. Call it before ``newest_valid``."""
        self.wait()
        if self._rank == 0:
            retention.clean(self.run)

    def trial(
        self, components: Iterable[Component], *, rows: Mapping[str, Rows] | None = None, num_bytes: int = 0
    ) -> None:
        """Try what a save does, before the first step: encode every state, write to the directory, look at free space.

        A checkpoint is taken to need the full tensors of ``rows``, and ``num_bytes`` for what does not exist yet.
        Raises SetupError.
        """
        encode_components(components, self._rank)
        if self._rank == 0:
            self._try_directory(total_bytes(rows or {}) + num_bytes)

    def _try_directory(self, need: int) -> None:
        directory = self.run.checkpoints
        probe = retention.sibling(directory / "trial", "tmp")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_file(probe, b"trial")
            remove(probe)
            disk = os.statvfs(directory)
        except OSError as error:
            raise SetupError(
                f"output_dir: cannot write checkpoints to {directory} ({error.strerror}); "
                "set output_dir to another directory"
            ) from error
        have = disk.f_bavail * disk.f_frsize
        if have < need:
            raise SetupError(
                f"output_dir: one checkpoint needs {_gb(need)}, {directory} has {_gb(have)} free; free some space, "
                "or set output_dir to another disk"
            )

    # --------------------------------------------------------------------------------------------------------- saving

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Rows],
        optimizer: Mapping[str, Rows],
        components: Iterable[Component],
        write_model_files: Callable[[Path], None],
        info: Mapping[str, Any],
        metrics: Mapping[str, float],
        healthy: bool = True,
    ) -> bool:
        """Collective. Save this step; returns when the state is copied (async_save) or published.

        Waits for the save before. False: it failed already; with async_save a later failure is seen in ``failures``.
        ``write_model_files`` puts config and tokenizer into the directory it is given, from another thread. ``info``
        has strategy, config_fingerprint, final (training ends here), versions, and what else is worth keeping (JSON).
        """
        self.wait()
        failures = len(self.failures)
        components = list(components)
        manifest = self._manifest(step, info, metrics, healthy, components)
        try:
            _refuse_non_finite(metrics)
            snapshot = self._snapshot([("model/model", model), ("optimizer/optimizer", optimizer)], components)
        except ForgatherError as error:
            self._failed(step, reason(error))
            return False
        self._job = Publication(
            self.run.checkpoint(step),
            snapshot=snapshot,
            manifest=manifest,
            write_model_files=write_model_files,
            timeout=self._args.save_timeout,
            group=self._group,
            rank=self._rank,
        )
        self._start(self._job)
        return len(self.failures) == failures

    def _manifest(
        self,
        step: int,
        info: Mapping[str, Any],
        metrics: Mapping[str, float],
        healthy: bool,
        components: list[Component],
    ) -> Manifest:
        rest = dict(info)
        rest.pop("world_size", None)
        versions = {
            "forgather": forgather_cli.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        return Manifest(
            step=step,
            strategy=rest.pop("strategy", ""),
            world_size=self._world_size,
            created=now(),
            config_fingerprint=rest.pop("config_fingerprint", None),
            versions={**versions, **rest.pop("versions", {})},
            metrics={key: float(value) for key, value in metrics.items()},
            healthy=healthy,
            final=bool(rest.pop("final", False)),
            best_by=self.best_by,
            info=rest,
            components={component.key: component.sharing.value for component in components},
        )

    def _snapshot(self, kinds: Sequence[tuple[str, Mapping[str, Rows]]], components: list[Component]) -> Snapshot:
        """Collective. Agree on who writes what, and copy this rank's share to host memory. Raises on all ranks."""
        states, pieces = self._own_share(kinds, components)
        held = gather((pieces, states if isinstance(states, str) else None), self._group)
        for _, failure in held:
            if failure is not None:
                raise SetupError(failure)
        assert not isinstance(states, str)
        # Equality of REPLICATED components and of rows that several ranks hold is checked here, once there are several.
        by_kind = [(stem, rows, [rank_pieces[i] for rank_pieces, _ in held]) for i, (stem, rows) in enumerate(kinds)]
        used = [(stem, rows, pieces) for stem, rows, pieces in by_kind if any(pieces)]
        plans = [plan(pieces, stem, self._max_shard_bytes) for stem, _, pieces in used]
        snapshot = Snapshot(plans, [], states)
        try:
            for files, (_, rows, _) in zip(plans, used, strict=True):
                copies = self._buffers.copy(files, self._rank, rows, share=not self._args.async_save)
                snapshot.rows.append(copies)
            snapshot.copies = copy_events([rows for _, rows in kinds])
        except (RuntimeError, MemoryError) as error:  # host memory, or a device that failed
            snapshot.failure = f"the copy to host memory failed ({reason(error)})"
        return snapshot

    def _own_share(
        self, kinds: Sequence[tuple[str, Mapping[str, Rows]]], components: list[Component]
    ) -> tuple[dict[str, Encoded] | str, list[list[Piece]]]:
        """This rank's states and pieces by kind; a failure is a message, since the other ranks must hear of it."""
        try:
            states = encode_components(components, self._rank)
            return states, [[row.piece(name) for name, row in rows.items()] for _, rows in kinds]
        except ForgatherError as error:
            return str(error), [[] for _ in kinds]

    def _start(self, job: Publication) -> None:
        if not self._args.async_save:
            self._publish_and_thin_out(job)
            self._collect()
            return
        atexit.unregister(self.close)
        atexit.register(self.close)  # the thread is a daemon: a disk that hangs must not hang the interpreter's exit
        self._thread = threading.Thread(target=self._in_background, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    def _in_background(self, job: Publication) -> None:
        """The writer thread. Training on a CPU keeps its cores: Linux takes a priority for each thread.

        Hashing at equal priority stalls OpenMP's barriers: steps of 0.2 s took up to 1.4 s on two cores (torch 2.13).
        """
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        self._publish_and_thin_out(job)

    def _publish_and_thin_out(self, job: Publication) -> None:
        job.run()
        if job.path is None or self._rank != 0:
            return
        try:
            retention.apply_retention(
                self.run,
                limit=self._args.save_total_limit,
                num_best=max(self._args.preserve_n_best, int(self._args.load_best_model_at_end)),
                best_by=self.best_by,
                protected={*self.protected, job.step},
            )
        except Exception as error:  # the edge of the thread
            log.error("old checkpoints were not deleted: %s", reason(error))

    # ---------------------------------------------------------------------------------------------------------- results

    @property
    def is_done(self) -> bool:
        """True if no save is in flight on this rank."""
        return self._thread is None or not self._thread.is_alive()

    def poll(self) -> list[Path]:
        """Checkpoints published since the last call. Never waits."""
        if self._job is not None and not (self._thread and self._thread.is_alive()):
            self._collect()
        published, self._published = self._published, []
        return published

    def wait(self) -> None:
        """Wait for the save in flight, at most until save_timeout."""
        if self._job is None:
            return
        if self._thread is not None:
            self._thread.join(max(0.0, self._job.deadline - time.monotonic()) + _GRACE)
        if self._thread is not None and self._thread.is_alive() and self._job.abandon():
            self._job.failure = f"it took longer than save_timeout={self._args.save_timeout:g} seconds"
            self._buffers.clear()  # the stuck thread still reads the old ones
        self._collect()

    def close(self) -> None:
        """Wait for the save in flight and give the host memory back. Also called when the interpreter exits."""
        self.wait()
        self._buffers.clear()
        atexit.unregister(self.close)

    def _collect(self) -> None:
        job, self._job, self._thread = self._job, None, None
        assert job is not None
        if job.path is not None:
            self._published.append(job.path)
            if job.failure is not None:
                log.warning("%s: is published, but %s", job.path, job.failure)
        else:
            self._failed(job.step, job.failure or "the writer ended without an answer")

    def _failed(self, step: int, why: str) -> None:
        self.failures.append((step, why))
        steps = self.run.checkpoint_steps()
        stands = f"the newest one is {self.run.checkpoint(steps[-1])}" if steps else "there is none yet"
        log.error("the checkpoint of step %d was not saved: %s; training goes on, %s", step, why, stands)


def _refuse_non_finite(metrics: Mapping[str, float]) -> None:
    for key in _MUST_BE_FINITE:
        if key in metrics and not math.isfinite(metrics[key]):
            raise SetupError(f"{key} is {metrics[key]}, so the weights are not worth keeping")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"

"""Writing and publishing one checkpoint: a temporary directory beside it, hashes, manifest, rename."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from forgather_cli.checkpoint import files
from forgather_cli.checkpoint.files import Pieces, Range, remove, sibling, sync_directory, write_file
from forgather_cli.checkpoint.format import plan
from forgather_cli.checkpoint.manifest import NAME, Manifest, NewerFormatError, merge_entries, read_manifest
from forgather_cli.checkpoint.snapshot import Snapshot
from forgather_cli.checkpoint.tensors import share_in_pieces, whole, write_index
from forgather_cli.distributed import NoAnswerError, gather, joined
from forgather_cli.documents.encoding import Encoded
from forgather_cli.documents.messages import sent
from forgather_cli.errors import CheckpointError, ForgatherError

log = logging.getLogger(__name__)
T = TypeVar("T")


GRACE = 5.0
"""Seconds after save_timeout in which a rank may still report why it is late; after as many again it is given up."""


class SaveError(CheckpointError):
    """A checkpoint could not be published; the ones before it stand."""


@sent
@dataclass(frozen=True)
class _Outcome:
    """What an action on one rank returned, or why it failed, as sent to the others."""

    value: Any = None
    failure: str | None = None


def reason(error: BaseException) -> str:
    """An exception in one line for the log."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error) if isinstance(error, ForgatherError) else f"{type(error).__name__}: {error}"


class Publication:
    """Writes one checkpoint and publishes it. ``run`` is for a thread of its own, on every rank; it never raises.

    Afterwards ``path`` is the published checkpoint, or ``failure`` says why there is none; both are set if something
    failed after the publication. Only rank 0 knows the result for certain: other ranks may have waited for its answer
    in vain (``unanswered``). Nobody else may use ``group`` meanwhile.
    """

    def __init__(
        self,
        target: Path,
        *,
        snapshot: Snapshot,
        manifest: Manifest,
        write_model_files: Callable[[Path], None],
        timeout: float,
        patience: float = 0.0,
        group: Any = None,
        rank: int = 0,
    ) -> None:
        """``patience``: seconds in which training comes first, and writing takes what processor time is left."""
        self.target = target
        self.step = manifest.step
        self.num_bytes = sum(spec.num_bytes for plan in snapshot.plans for file in plan.files for spec in file.specs)
        """Of all ranks' tensors."""
        self.path: Path | None = None
        self.failure: str | None = None
        self.group_is_lost = False
        """Other ranks did not answer in time; ``group`` cannot be used any more."""
        self.unanswered = False
        """Other ranks did not answer, and this rank knows of no other failure."""
        self.deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._hurries_from = time.monotonic() + patience
        self._temporary: Path | None = None
        self._own_failure: str | None = None
        self._hashed: dict[str, list[Range]] = {}
        """On rank 0: the files of ``write_model_files``."""
        self._snapshot = snapshot
        self._manifest = manifest
        self._write_model_files = write_model_files
        self._group = group
        self._rank = rank
        self._abandoned = False
        self._renaming = threading.Lock()

    def run(self) -> None:
        try:
            self.path = self._publish()
        except Exception as error:  # the edge of the thread
            log.debug("checkpoint", exc_info=True)
            self.group_is_lost = isinstance(error, NoAnswerError)
            self.unanswered = self.group_is_lost and self._own_failure is None
            own = self._own_failure if self.group_is_lost else None  # which the others could not be told
            self.failure = own or reason(error)
            if self._temporary is not None:  # made by rank 0
                try:
                    remove(self._temporary)
                except OSError as left:
                    log.warning("%s: cannot remove (%s)", self._temporary, reason(left))

    @property
    def give_up_at(self) -> float:
        """When a writer that still runs is given up (``time.monotonic``)."""
        return self.deadline + 2 * GRACE

    @property
    def is_late(self) -> bool:
        """True once training does not come first any more."""
        return time.monotonic() >= self._hurries_from

    def hurry(self) -> None:
        """Training waits for this save."""
        self._hurries_from = 0.0

    def abandon(self) -> bool:
        """Keep this checkpoint from being published; False if it is published already."""
        with self._renaming:
            self._abandoned = self._abandoned or self.path is None
            return self._abandoned

    @property
    def too_long(self) -> str:
        return f"it took longer than save_timeout={self._timeout:g} seconds"

    # ----------------------------------------------------------------------------------------------------------- phases

    def _publish(self) -> Path:
        """Collective. Rank 0 makes a temporary directory, all ranks write into it, rank 0 gives it its name."""
        name = self._on_rank_0(self._prepare)
        if name is None:  # this step has a good checkpoint already
            return self.target
        temporary = self.target.with_name(name)
        reports = self._gather(self._attempt(lambda: self._write(temporary)))
        self._on_rank_0(lambda: self._finish(temporary, reports))
        return self.target

    def _prepare(self) -> str | None:
        """On rank 0: the name of a new temporary directory with config and tokenizer files; None if this step has a
        good checkpoint already.

        They are hashed here, since before any rank writes all files in the directory are theirs.
        """
        if self._is_kept():
            return None
        temporary = self._temporary = sibling(self.target, "tmp")
        self.target.parent.mkdir(exist_ok=True)  # not its parents: a run directory that was removed stays so
        temporary.mkdir()
        (temporary / "model").mkdir()
        ours = (temporary / "model").stat()
        self._write_model_files(temporary / "model")  # config.json, tokenizer and the like
        if not os.path.samestat(ours, (temporary / "model").stat()):  # who saves a tokenizer makes what is not there
            remove(temporary)
            with suppress(OSError):
                self.target.parent.rmdir()
                self.target.parent.parent.rmdir()
            raise SaveError(f"{self.target.parent.parent}: was removed or moved")
        for path in sorted(path for path in (temporary / "model").rglob("*") if path.is_file()):
            files.sync_file(path)
            size = path.stat().st_size
            ranges = [(0, size, files.hash_range(path, 0, size))] if size else []
            self._hashed[path.relative_to(temporary).as_posix()] = ranges
        return temporary.name

    def _write(self, temporary: Path) -> dict[str, list[Range]]:
        """On every rank: write its share of the files; returns what it wrote, by file.

        A thread of low priority begins, and this one goes on when the save is late: on a busy machine the other one
        gets hardly any time, and only root may raise a thread's priority again.
        """
        self._snapshot.wait()
        report = dict(self._hashed)
        failures: list[Exception] = []

        def begin() -> None:
            # Linux has a priority for each thread. Hashing at that of training stalls OpenMP's barriers: on two cores
            # steps of 0.2 s took up to 1.4 s (torch 2.13). At 10 they take 1.3 times as long while 0.7 GB are written
            # within 15 s, at 15 1.09 times, within 23 s, at 19 no longer than ever, within 39 s.
            if sys.platform == "linux":
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            try:
                for _ in work:
                    self._check()
                    if self.is_late:
                        return
            except Exception as error:  # the edge of the thread
                failures.append(error)

        with closing(self._write_in_pieces(temporary, report)) as work:
            if not self.is_late:
                thread = threading.Thread(target=begin, name="checkpoint, unhurried", daemon=True)
                thread.start()
                thread.join()
            for failure in failures:
                raise failure
            for _ in work:
                self._check()
        self._check()
        return report

    def _write_in_pieces(self, temporary: Path, report: dict[str, list[Range]]) -> Pieces[None]:
        for tensors, rows in zip(self._snapshot.plans, self._snapshot.rows, strict=True):
            report |= yield from share_in_pieces(temporary, tensors, self._rank, rows)
            if self._rank == 0:
                report |= write_index(temporary, tensors)
        for stem, state in self._snapshot.states.items():
            report |= yield from write_state(temporary, stem, state)

    def _finish(self, temporary: Path, reports: list[_Outcome]) -> None:
        """On rank 0, after all have written: manifest, sync, rename."""
        if failed := joined([report.failure for report in reports]):
            raise SaveError(failed)
        manifest = replace(self._manifest, files=merge_entries([report.value for report in reports]))
        for name in manifest.files:
            files.refresh(temporary / name)
        problems = manifest.problems(temporary, "size")
        if problems:
            raise SaveError("; ".join(problems))
        write_file(temporary / NAME, manifest.to_bytes())
        for directory in [path for path in temporary.rglob("*") if path.is_dir()]:
            sync_directory(directory)
        sync_directory(temporary)
        self._rename(temporary)

    def _rename(self, temporary: Path) -> None:
        old = sibling(self.target, "replaced")
        with self._renaming:
            self._check()
            if self.target.exists():
                self.target.rename(old)
            try:
                temporary.rename(self.target)
            except OSError:
                if old.exists():
                    old.rename(self.target)
                raise
            self.path = self.target
        sync_directory(self.target.parent)
        remove(old)

    def _is_kept(self) -> bool:
        """On rank 0: whether this step has a whole checkpoint, of the same config and data, and no less healthy.

        It stays then, and gets the metrics of the new one.
        """
        if not self.target.exists():
            return False
        new = self._manifest
        try:
            old = read_manifest(self.target)
            problems = old.problems(self.target, "full")
        except NewerFormatError:
            raise
        except CheckpointError as error:
            problems = [str(error)]
        if problems:
            log.warning("%s: is damaged and is written again: %s", self.target, "; ".join(problems))
            return False
        same = (old.config_fingerprint, old.rollbacks) == (new.config_fingerprint, new.rollbacks)
        if not same or (new.healthy and not old.healthy):
            return False
        marked = replace(old, metrics={**old.metrics, **new.metrics}, final=old.final or new.final)
        if marked != old:
            files.replace_file(self.target / NAME, marked.to_bytes(), sibling(self.target, "tmp"))
        return True

    # -------------------------------------------------------------------------------------------------------- agreement

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """Collective. Run ``action`` on rank 0; returns its result on all ranks, or raises its failure on all."""
        outcome = self._attempt(action) if self._rank == 0 else _Outcome()
        outcome = self._gather(outcome)[0]
        if outcome.failure is not None:
            raise SaveError(outcome.failure)
        result: T = outcome.value
        return result

    def _gather(self, value: T) -> list[T]:
        """Collective. Every rank's ``value``. Raises NoAnswerError after the deadline."""
        return gather(value, self._group, self.deadline + GRACE)

    def _attempt(self, action: Callable[[], Any]) -> _Outcome:
        """Run ``action``; what it raises becomes an outcome."""
        try:
            return _Outcome(action())
        except Exception as error:  # the other ranks are told
            log.debug("checkpoint", exc_info=True)
            self._own_failure = reason(error)
            return _Outcome(failure=self._own_failure)

    def _check(self) -> None:
        """Raise SaveError after the deadline, or when this save was given up."""
        if self._abandoned or time.monotonic() > self.deadline:
            raise SaveError(self.too_long)


def write_state(directory: Path, stem: str, state: Encoded) -> Pieces[dict[str, list[Range]]]:
    """Write components as ``<stem>.json`` and, where they have tensors, ``<stem>.safetensors``."""
    document = json.dumps({"components": state.documents}, separators=(",", ":"), allow_nan=False).encode()
    report = {f"{stem}.json": write_file(directory / f"{stem}.json", document)}
    if state.tensors:
        pieces = [whole(name, tensor) for name, tensor in state.tensors.items()]
        one_file = plan([pieces], stem, max_bytes=1 << 62)
        report |= yield from share_in_pieces(directory, one_file, 0, state.tensors)
    return report

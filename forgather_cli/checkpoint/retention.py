"""Which checkpoints a run has, which is best, and which may be deleted. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forgather_cli.checkpoint.choice import would_resume
from forgather_cli.checkpoint.files import remove, sibling, siblings, size_of, sync_directory
from forgather_cli.checkpoint.manifest import NAME, BestBy, NewerFormatError, read_manifest
from forgather_cli.checkpoint.rollbacks import is_abandoned, read_rollbacks
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import CheckpointError
from forgather_cli.run_dir import RunDir, step_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointInfo:
    """One published checkpoint. Of a damaged one only step, path, size and problem are known."""

    step: int
    path: Path
    size_bytes: int
    """On disk."""
    created: str = ""
    """UTC, ISO 8601."""
    metrics: dict[str, float] = field(default_factory=dict)
    healthy: bool = False
    final: bool = False
    """Training ended with it."""
    best: bool = False
    """The best of this run's by the metric it was trained for."""
    strategy: str = ""
    world_size: int = 0
    best_by: BestBy | None = None
    problem: str | None = None
    """Why it cannot be used, as far as manifest and file sizes tell."""
    abandoned: bool = False
    """A rollback went back to a step before it: never resumed from."""
    rollbacks: int = 0
    """How many rollbacks the run had made before it."""
    foreign: bool = False
    """Not written by this program or by a newer version of it: never deleted."""

    @property
    def usable(self) -> bool:
        """True unless it is damaged or abandoned."""
        return self.problem is None and not self.abandoned


def list_checkpoints(run: RunDir, best_by: BestBy | None = None) -> list[CheckpointInfo]:
    """The run's published checkpoints by ascending step, damaged ones too. Reads manifests and file sizes.

    ``best_by`` None: the rule of the newest one.
    """
    listed = sorted((_info(step, run.checkpoint(step)) for step in run.checkpoint_steps()), key=lambda info: info.step)
    found = [info for info in listed if info.path.exists()]  # a running job may have deleted some meanwhile
    if rollbacks := read_rollbacks(run):
        found = [replace(info, abandoned=is_abandoned(info.step, info.rollbacks, rollbacks)) for info in found]
    rules = [info.best_by for info in found if info.best_by is not None]
    rule = best_by or (rules[-1] if rules else None)
    best = {info.step for info in best_of(found, rule, 1)} if rule else set()
    return [replace(info, best=info.step in best) for info in found]


def better_unsaved(found: Sequence[CheckpointInfo]) -> str:
    """That the run had a better evaluation than its best checkpoint, by the state of the newest one; else empty."""
    best = next((info for info in found if info.best), None)
    if best is None or best.best_by is None:
        return ""
    newest = [info for info in found if info.usable][-1]
    state = read_json_object(newest.path / "state.json", CheckpointError).get("components", {}).get("trainer", {})
    value, step = state.get("best_metric"), state.get("best_global_step")
    if not isinstance(value, float) or step == best.step or value == best.best_by.value(best.metrics):
        return ""
    return f"best of those kept; the run's best was {value:.4f} at step {step}, not saved"


def best_of(found: Sequence[CheckpointInfo], rule: BestBy, count: int) -> list[CheckpointInfo]:
    """The ``count`` best usable and healthy ones, best first; those without the metric do not count."""
    scored = [
        (cost, info.step, info)
        for info in found
        if info.usable and info.healthy and (cost := rule.cost(info.metrics)) is not None
    ]
    return [info for *_, info in sorted(scored)[:count]]


def _info(step: int, path: Path) -> CheckpointInfo:
    size = size_of(path)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        foreign = isinstance(error, NewerFormatError) or not (path / NAME).exists()
        return CheckpointInfo(step, path, size, problem=str(error), foreign=foreign)
    return CheckpointInfo(
        step=manifest.step,  # whatever the directory is named
        path=path,
        size_bytes=size,
        created=manifest.created,
        metrics=manifest.metrics,
        healthy=manifest.healthy,
        final=manifest.final,
        strategy=manifest.strategy,
        world_size=manifest.world_size,
        best_by=manifest.best_by,
        rollbacks=manifest.rollbacks,
        problem="; ".join(manifest.problems(path, "size")) or None,
    )


# ---------------------------------------------------------------------------------------------------------- deleting


def deletable(
    found: Sequence[CheckpointInfo], *, limit: int, num_best: int, best_by: BestBy, protected: Collection[int] = ()
) -> list[CheckpointInfo]:
    """The checkpoints that may be deleted: all but the newest ``limit``, the ``num_best`` best, the newest healthy one
    and those of the ``protected`` steps. Damaged and abandoned ones do not count towards the limit and go first.
    """
    usable = sorted((info for info in found if info.usable), key=lambda info: info.step, reverse=True)
    kept = {info.step for info in usable[:limit]}
    kept |= {info.step for info in best_of(found, best_by, num_best)}
    kept |= {info.step for info in [info for info in usable if info.healthy][:1]}
    return [info for info in found if info.step not in kept | set(protected) and not info.foreign]


def delete_checkpoints(found: Iterable[CheckpointInfo], kind: str = "old") -> None:
    """Delete checkpoints: each is renamed first, so that half of one is never taken for a checkpoint. What cannot be
    deleted is a warning.
    """
    for info in found:
        trash = sibling(info.path, "trash")
        try:
            info.path.rename(trash)
            sync_directory(info.path.parent)
            remove(trash)
        except OSError as error:
            log.warning("%s: cannot delete this %s checkpoint (%s)", info.path, kind, error.strerror)


def delete_abandoned(run: RunDir) -> None:
    """Delete checkpoints that a rollback has abandoned; one that cannot be deleted is not resumed from either."""
    delete_checkpoints((info for info in list_checkpoints(run) if info.abandoned and not info.foreign), "abandoned")


def clean(run: RunDir) -> None:
    """Remove what killed writers left behind. The caller holds the run directory, so nobody is writing now.

    A checkpoint killed between the two renames that replace it gets its name back, and so does one that somebody has
    given another step's.
    """
    if not run.checkpoints.is_dir():
        return
    for path, kind, target in siblings(run.checkpoints):
        try:
            if kind == "replaced" and step_of(target) is not None and not target.exists():
                path.rename(target)
            else:
                remove(path)
        except OSError as error:
            log.warning("%s: cannot remove this leftover of a killed job (%s)", path, error.strerror)
    for info in [_info(step, run.checkpoint(step)) for step in run.checkpoint_steps()]:
        if not (own := run.checkpoint(info.step)).exists():
            info.path.rename(own)
            log.warning("%s: is of another step by its manifest, and is named %s again", info.path, own.name)


EDITED = "edited"
"""Key in a manifest's ``info``: ``settings`` (parts of the config's tree) and ``starts`` (of the run, until then)."""


def record(run: RunDir | None, settings: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The entry for a manifest's ``info``, with what ``before`` (that of an earlier edit) holds."""
    earlier = before.get("settings", {})
    return {EDITED: {"settings": {**earlier, **settings}, "starts": _starts(run)}}


def pending(run: RunDir) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint a resume will go on from and the settings it was given by edits, if no start has taken them yet.

    A start writes its config, which has the edits in it; so later ones need not look here, and what a later command
    line has set stays.
    """
    chosen = would_resume(run)
    if chosen is None or chosen.manifest is None:
        return None
    found = chosen.manifest.info.get(EDITED)
    if not isinstance(found, dict) or found.get("starts") != _starts(run):
        return None
    return chosen.path, dict(found.get("settings", {}))


def _starts(run: RunDir | None) -> int:
    """How many times the run has been started after the first."""
    later = [] if run is None else run.later_starts()
    return later[-1] if later else 0

"""Which checkpoint a resume takes: the newest whole one of the run, a healthy one if there is any. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from forgather_cli.checkpoint.manifest import Manifest, NewerFormatError, damaged, read_manifest
from forgather_cli.checkpoint.rollbacks import is_abandoned, read_rollbacks
from forgather_cli.documents.messages import sent
from forgather_cli.errors import CheckpointError
from forgather_cli.run_dir import RunDir

Verify = Callable[[Manifest, Path], list[str]]
"""``file: what is wrong`` for every damaged file of the checkpoint with this manifest in this directory."""
BY_SIZE: Verify = partial(Manifest.problems, level="size")


@sent
@dataclass(frozen=True)
class Candidate:
    """A checkpoint that its run has not gone back from."""

    step: int
    path: Path
    manifest: Manifest | None
    error: CheckpointError | None = None
    """Why it has no manifest that can be read."""
    why: tuple[str, ...] = ()
    """Of the one that was chosen: why it is not simply the newest."""

    @property
    def healthy(self) -> bool:
        return self.manifest is not None and self.manifest.healthy


def candidates(run: RunDir) -> list[Candidate]:
    """The run's checkpoints in the order in which a resume tries them, after those whose manifest cannot be read. No
    other file of theirs is looked at. Raises CheckpointError if it cannot be told what the run has gone back from.
    """
    found, rollbacks = [], read_rollbacks(run)
    for step in reversed(run.checkpoint_steps()):
        path = run.checkpoint(step)
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            found.append(Candidate(step, path, None, error))
        else:
            if not is_abandoned(manifest.step, manifest.rollbacks, rollbacks):
                found.append(Candidate(manifest.step, path, manifest))  # whatever the directory is named
    return sorted(found, key=lambda each: (each.manifest is not None, not each.healthy, -each.step))


def choose(run: RunDir, verify: Verify = BY_SIZE, found: Sequence[Candidate] | None = None) -> Candidate | None:
    """The checkpoint that a resume takes: the newest that is whole and healthy, else the newest that is whole; None if
    the run has none at all. ``found``: the candidates, where they are known or fewer are asked for.

    Raises CheckpointError if all are damaged, or if a newer one than that, or one where none is whole, is of a newer
    format: falling back behind it would lose work that an upgrade keeps.
    """
    damage: list[tuple[int, str]] = []  # by step
    found = candidates(run) if found is None else found
    newest = max((each for each in found if each.manifest is not None), key=lambda each: each.step, default=None)
    upgrade = {each.step: each.error for each in found if isinstance(each.error, NewerFormatError)}
    for each in found:
        if each.manifest is None:
            damage.append((each.step, str(each.error)))
        elif problems := verify(each.manifest, each.path):
            damage.append((each.step, str(damaged(each.path, problems))))
        elif max(upgrade, default=0) > each.step:
            break
        else:
            # an older one would have been taken only in the place of one that is not healthy
            why = [problem for step, problem in damage if step > each.step or not each.healthy]
            told = [f"{problem}; {each.path} is used" for problem in why]
            if not each.healthy:
                told.append(f"{each.path}: was saved while training looked diverged, but no healthy one is left")
            elif newest is not None and not newest.healthy:
                told.append(f"{newest.path}: was saved while training looked diverged; {each.path} is used")
            return replace(each, why=tuple(told))
    if upgrade:
        raise upgrade[max(upgrade)]
    if damage:
        raise CheckpointError(
            f"no usable checkpoint is left in {run.root}; start afresh with forgather train ... "
            f"overwrite_output_dir=true\n  " + "\n  ".join(problem for _, problem in damage)
        )
    return None


def would_resume(run: RunDir) -> Candidate | None:
    """The checkpoint that a resume of the run takes, as far as file sizes show; None if it would find none to take."""
    try:
        return choose(run)
    except (CheckpointError, OSError):
        return None  # whoever resumes it says what is wrong

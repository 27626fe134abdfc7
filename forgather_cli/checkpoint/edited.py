"""What ``forgather checkpoint edit`` changed and a resume has to take. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgather_cli.checkpoint.manifest import read_manifest
from forgather_cli.checkpoint.retention import list_checkpoints
from forgather_cli.errors import CheckpointError
from forgather_cli.run_dir import RunDir

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
    path = resumed(run)
    if path is None:
        return None
    try:
        found = read_manifest(path).info.get(EDITED)
    except CheckpointError:
        return None  # whoever loads it says what is wrong
    if not isinstance(found, dict) or found.get("starts") != _starts(run):
        return None
    return path, dict(found.get("settings", {}))


def resumed(run: RunDir) -> Path | None:
    """The checkpoint a resume will go on from, as far as manifests and file sizes tell."""
    usable = [info for info in list_checkpoints(run) if info.usable]
    healthy = [info for info in usable if info.healthy] or usable
    return healthy[-1].path if healthy else None


def _starts(run: RunDir | None) -> int:
    """How many times the run has been started after the first."""
    later = [] if run is None else run.later_starts()
    return later[-1] if later else 0

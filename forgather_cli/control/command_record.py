"""One command to a job and its state, as sent over HTTP and stored in ``RUN/control/<id>.json``. No torch here."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forgather_cli.documents.regular_files import read_json, write_whole
from forgather_cli.errors import ControlError
from forgather_cli.run_dir import RunDir, is_name

log = logging.getLogger(__name__)

SAVE, STOP, SAVE_AND_STOP, ABORT = "save", "stop", "save_and_stop", "abort"
COMMANDS = (SAVE, STOP, SAVE_AND_STOP, ABORT)
_OTHER_NAMES = {"save_checkpoint": SAVE, "graceful_stop": STOP}

QUEUED, APPLIED, DONE, FAILED = "queued", "applied", "done", "failed"


@dataclass(frozen=True)
class ControlCommand:
    """One command: queued, then applied (all ranks act on it), then done or failed. Any thread may read it."""

    id: str
    job_id: str
    command: str
    state: str = QUEUED
    asked_at: str = ""
    """UTC, ISO 8601, as the times below."""
    asked_at_step: int = 0
    """Optimizer steps done when the command came in."""
    applied_at_step: int | None = None
    """Optimizer steps done when all ranks began to act on it."""
    finished_at: str | None = None
    checkpoint: str | None = None
    """Absolute path of the checkpoint that was saved for it."""
    reason: str | None = None
    """Why it failed."""

    @property
    def is_finished(self) -> bool:
        return self.state in (DONE, FAILED)

    def applied(self, step: int) -> ControlCommand:
        return replace(self, state=APPLIED, applied_at_step=step)

    def done(self, checkpoint: Path | None = None) -> ControlCommand:
        path = None if checkpoint is None else str(checkpoint.absolute())
        return replace(self, state=DONE, finished_at=now(), checkpoint=path)

    def failed(self, reason: str) -> ControlCommand:
        return replace(self, state=FAILED, finished_at=now(), reason=reason)

    def document(self) -> dict[str, Any]:
        return asdict(self)


def from_document(raw: Any) -> ControlCommand:
    """The command in ``ControlCommand.document``'s form. Raises ValueError for anything else."""
    try:
        return ControlCommand(**{each.name: raw[each.name] for each in fields(ControlCommand)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a command's record: {raw!r}") from error


def command_name(text: str) -> str | None:
    """The command that ``text`` names, with - or _; None if there is no such command."""
    name = text.strip().lower().replace("-", "_")
    name = _OTHER_NAMES.get(name, name)
    return name if name in COMMANDS else None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write(run: RunDir, command: ControlCommand) -> None:
    """Write ``RUN/control/<id>.json``, whole or not at all; a failure is an error in the log."""
    path = run.command(command.id)
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(command.document()) + "\n")
    except OSError as error:
        log.error("the answer to control's %s cannot be written to %s: %s", command.command, path, error.strerror)


def read(run: RunDir, command_id: str) -> ControlCommand | None:
    """The command in ``RUN/control/<id>.json``; None if there is none, or it cannot be read."""
    return _read(run.command(command_id)) if is_name(command_id) else None


def unfinished(run: RunDir) -> Iterator[ControlCommand]:
    """Commands in RUN/control that no job has finished."""
    for path in sorted(run.control.glob("*.json")) if run.control.is_dir() else ():
        command = _read(path)
        if command is not None and not command.is_finished and is_name(command.id):
            yield command


def _read(path: Path) -> ControlCommand | None:
    try:
        return from_document(read_json(path, ControlError))
    except (ControlError, ValueError):
        return None

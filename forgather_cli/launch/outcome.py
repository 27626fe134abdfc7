"""How a job ended: ``RUN/exit.json``, written whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import shlex
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from forgather_cli.run_dir import RunDir

log = logging.getLogger(__name__)

DONE = 0
FAILED = 1
MISTAKE = 2
STOPPED = 75
"""Stopped by a signal with a complete checkpoint (EX_TEMPFAIL: try again later)."""


@dataclass(frozen=True)
class Outcome:
    """The end of one job in a run directory."""

    code: int
    reason: str
    step: int
    """Optimizer step of the newest checkpoint or record."""
    time: str
    """UTC, ISO 8601."""


def write_outcome(run: RunDir, code: int, reason: str, step: int | None = None) -> Outcome:
    """Publish ``RUN/exit.json``; without ``step`` the newest one that checkpoints and metrics tell.

    A disk that is full is an error in the log: the caller knows the outcome all the same.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = Outcome(code, reason, newest_step(run) if step is None else step, now)
    temporary = run.exit.with_name(f".{run.exit.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(asdict(outcome)) + "\n", encoding="utf-8")
        temporary.replace(run.exit)
    except OSError as error:
        log.error("%s cannot be written: %s", run.exit, error.strerror)
        temporary.unlink(missing_ok=True)
    return outcome


def resume_command(run: RunDir) -> str:
    """The command that goes on with a run."""
    return f"forgather resume {shlex.quote(str(run.root))}"


def read_outcome(run: RunDir) -> Outcome | None:
    """How the last job ended; None if it runs, was killed, or never was."""
    try:
        raw = json.loads(run.exit.read_text(encoding="utf-8"))
        return Outcome(int(raw["code"]), str(raw["reason"]), int(raw["step"]), str(raw["time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest_step(run: RunDir) -> int:
    """The last step that left a checkpoint or a record, 0 if none did."""
    return max([0, *run.checkpoint_steps()[-1:], _last_recorded_step(run.metrics)])


def _last_recorded_step(metrics: Path) -> int:
    """Step of the last whole record of a metrics file; reads its last 64 KiB."""
    try:
        with metrics.open("rb") as stream:
            stream.seek(max(0, metrics.stat().st_size - 65536))
            lines = stream.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            record = json.loads(line)
            if not record.get("abandoned"):
                return int(record["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return 0

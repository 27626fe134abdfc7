"""How a job ended: ``RUN/exit.json``, written whole or not at all."""

from __future__ import annotations

import json
import logging
import os
import shlex
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from forgather_cli.errors import SetupError
from forgather_cli.input_files import open_file, parse_json, read_json_object
from forgather_cli.run_dir import RunDir

log = logging.getLogger(__name__)

DONE = 0
FAILED = 1
MISTAKE = 2
STOPPED = 75
"""Stopped by a signal with a complete checkpoint (EX_TEMPFAIL: try again later)."""


State = Literal["done", "stopped", "aborted", "failed", "diverged", "cut"]
"""How a job ended. ``stopped``: by a signal or a command, with what training left saved by ``save_strategy``; ``cut``:
nothing was written at its end."""


@dataclass(frozen=True)
class Outcome:
    """The end of one job in a run directory."""

    state: State
    code: int
    reason: str
    step: int
    """Optimizer step of the newest checkpoint or record."""
    time: str
    """UTC, ISO 8601."""


def write_outcome(run: RunDir, state: State, code: int, reason: str, step: int | None = None) -> None:
    """Publish ``RUN/exit.json``; without ``step`` the newest one that checkpoints and metrics tell. Raises OSError."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = Outcome(state, code, reason, newest_step(run) if step is None else step, now)
    temporary = run.exit.with_name(f".{run.exit.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(asdict(outcome)) + "\n", encoding="utf-8")
        temporary.replace(run.exit)
    finally:
        temporary.unlink(missing_ok=True)


def resume_command(run: RunDir) -> str:
    """The command that goes on with a run."""
    return f"forgather resume {shlex.quote(str(run.root))}"


def read_outcome(run: RunDir) -> Outcome | None:
    """How the last job ended; None if it runs, was killed, or never was."""
    try:
        raw = read_json_object(run.exit)
        code = int(raw["code"])
        state: Any = raw.get("state")
        if state not in get_args(State):  # of version 0.1.0, which wrote the code alone
            state = {DONE: "done", STOPPED: "stopped"}.get(code, "cut" if code > 128 else "failed")
        return Outcome(state, code, str(raw["reason"]), int(raw["step"]), str(raw["time"]))
    except (SetupError, ValueError, KeyError, TypeError):
        return None


def newest_step(run: RunDir) -> int:
    """The last step that left a checkpoint or a record, 0 if none did."""
    return max([0, *run.checkpoint_steps()[-1:], _last_recorded_step(run.metrics)])


def _last_recorded_step(metrics: Path) -> int:
    """Step of the last whole record of a metrics file; reads its last 64 KiB."""
    try:
        with open_file(metrics) as stream:
            stream.seek(max(0, metrics.stat().st_size - 65536))
            lines = stream.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            record = parse_json(line)
            if not record.get("abandoned"):
                return int(record["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return 0

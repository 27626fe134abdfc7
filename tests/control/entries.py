"""Entries of jobs of this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from forgather_cli.control import registry
from forgather_cli.control.registry import Entry


def entry(job_id: str, run: str = "run", started: int = 0, **changes: object) -> Entry:
    """Of this process."""
    here, root = os.uname().nodename, str(Path(run).resolve())
    start = registry.start_of(os.getpid())
    made = Entry(job_id, "127.0.0.1", here, 1, os.getpid(), start, f"2026-01-01T00:00:{started:02d}", root, root)
    return replace(made, **changes)

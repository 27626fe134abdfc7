"""All jobs of the registry with their states: ``forgather control list``, and ``GET /jobs`` of any of them. No torch
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forgather_cli.control import client, registry
from forgather_cli.control.registry import Entry
from forgather_cli.errors import ControlError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.run_dir import RunDir

_PATIENCE = 2.0  # seconds that each job gets to send its status
_AT_ONCE = 16  # jobs that are asked
Status = dict[str, Any]


def jobs(own: Mapping[str, Callable[[], Status]] = MappingProxyType({})) -> list[tuple[Entry, Status | None]]:
    """Each entry, the newest last, with what its job says of itself; None for one that has ended or does not answer.

    ``own``: by job id the status of jobs of this process, which need not be asked over HTTP. Raises ControlError.
    """

    def ask(entry: Entry) -> Status | None:
        if entry.job_id in own:
            return own[entry.job_id]()
        if entry.is_running is False:
            return None
        try:
            status = client.status(entry, patience=_PATIENCE)
        except ControlError:
            return None
        return status if isinstance(status.get("state"), str) else None  # else something else listens there

    entries = registry.entries()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(zip(entries, pool.map(ask, entries), strict=True))


def state(entry: Entry, status: Status | None) -> str:
    """How a job stands, in a word or two."""
    if status is not None:
        return str(status.get("state"))
    if entry.is_running is False:
        ended = read_exit_record(RunDir(Path(entry.run_dir)))
        return "cut" if ended is None else ended.state
    return "does not answer" if entry.is_running else f"on {entry.hostname}"


def document(entry: Entry, status: Status | None) -> dict[str, Any]:
    """A job for JSON."""
    return {**asdict(entry), "running": entry.is_running, "state": state(entry, status), "status": status}

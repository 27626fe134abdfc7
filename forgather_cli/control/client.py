"""HTTP requests to a job, and waiting for a command's answer, also when the job ends first. No torch here."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

from forgather_cli.control import command_record
from forgather_cli.control.command_record import ControlCommand
from forgather_cli.control.registry import LOOPBACK, Entry
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.errors import ControlError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.run_dir import RunDir

PATIENCE = 5.0  # seconds for one request
_MAX_BYTES = 1 << 24  # of an answer
_BUSY_PAUSE = 0.2  # seconds
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.5)  # seconds between two looks at a command, the last one again and again
_SILENCE = 60.0  # seconds; whether a job of another machine still runs cannot be known
_ANYWHERE = ("0.0.0.0", "::", "")


class Unreachable(ControlError):
    """Nobody listens where the job did, or what listens there does not answer."""


def status(entry: Entry, *, patience: float = PATIENCE) -> dict[str, Any]:
    """The job's step, metrics, checkpoints and so on. Raises ControlError."""
    return request(entry, "GET", f"/jobs/{entry.job_id}/status", patience=patience)


def stacks(entry: Entry) -> dict[str, Any]:
    """Where the job's ranks stand; it waits some seconds for those that do not answer. Raises ControlError."""
    return request(entry, "GET", f"/jobs/{entry.job_id}/stacks", patience=2 * PATIENCE)


def submit(entry: Entry, name: str) -> ControlCommand:
    """Give the job a command, one of ``command_record.COMMANDS``. Raises ControlError."""
    return _decode(entry, request(entry, "POST", f"/jobs/{entry.job_id}/control", {"command": name}))


def fetch(entry: Entry, command_id: str) -> ControlCommand:
    """A command's present state, from the job. Raises ControlError."""
    return _decode(entry, request(entry, "GET", f"/jobs/{entry.job_id}/commands/{command_id}"))


def wait(entry: Entry, command: ControlCommand, *, timeout: float | None = None) -> ControlCommand:
    """Wait until the command is done or has failed, or ``timeout`` seconds; returns its last known state.

    A job that runs is asked over HTTP; the answer of one that has ended is read from RUN/control. Raises ControlError
    for a job that ended without an answer, and for one on another machine that has not been reached for long.
    """
    run, end = RunDir(Path(entry.run_dir)), math.inf if timeout is None else time.monotonic() + timeout
    pauses, heard = iter(_PAUSES), time.monotonic()
    while not command.is_finished and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, next(pauses, _PAUSES[-1])))
        running = entry.is_running  # before reading: a job that has ended by now writes nothing later
        if running is not False:
            with contextlib.suppress(ControlError):
                command, heard = fetch(entry, command.id), time.monotonic()
                continue
        written = command_record.read(run, command.id)
        if written is not None and written.is_finished:
            return written
        if running is False:
            outcome = read_exit_record(run)  # the job's launcher writes it, also for ranks that were killed
            why = f"; see {run.logs}" if outcome is None else f": {outcome.reason}"
            raise ControlError(f"{entry.job_id}: ended before it answered{why}")
        if running is None and time.monotonic() - heard > _SILENCE:
            raise Unreachable(f"{entry.job_id}: has not been reached for {_SILENCE:g} s{_where(entry)}")
    return command


def request(
    entry: Entry, method: str, path: str, body: dict[str, Any] | None = None, *, patience: float = PATIENCE
) -> dict[str, Any]:
    """The document that the job answers with. Raises ControlError, Unreachable where nobody answers."""
    import http.client

    token, end = entry.token(), time.monotonic() + patience
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    while True:
        # HTTPConnection uses no proxy, which could not reach this machine's addresses
        connection = http.client.HTTPConnection(address(entry), entry.port, timeout=patience)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read(_MAX_BYTES)
        except TimeoutError as error:
            raise Unreachable(f"{entry.job_id}: does not answer within {patience:g} s{_where(entry)}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{entry.job_id}: cannot be reached{_where(entry)}: {error}") from error
        finally:
            connection.close()
        if answer.status != 503 or time.monotonic() > end:  # all its threads are busy with other requests
            break
        time.sleep(_BUSY_PAUSE)
    document = None
    with contextlib.suppress(ValueError):
        document = parse_json(content)
    if 200 <= answer.status < 300 and isinstance(document, dict):
        return document
    why = document.get("error") if isinstance(document, dict) else None
    raise ControlError(f"{entry.job_id}: {why or f'answered with HTTP status {answer.status}'}")


def _where(entry: Entry) -> str:
    return f" at {address(entry)}:{entry.port} (process {entry.pid} on {entry.hostname})"


def address(entry: Entry) -> str:
    """Where the job's server is, seen from here. Raises ControlError for one that listens on its own machine only."""
    if entry.is_here:
        return "127.0.0.1" if entry.host in _ANYWHERE else entry.host
    if entry.host.startswith(LOOPBACK):
        raise ControlError(
            f"{entry.job_id}: runs on {entry.hostname} and listens only there; give the command on that machine, or "
            "start jobs with callbacks.control.host=0.0.0.0"
        )
    return entry.hostname if entry.host in _ANYWHERE else entry.host


def _decode(entry: Entry, document: dict[str, Any]) -> ControlCommand:
    try:
        return command_record.from_document(document)
    except ValueError as error:
        raise ControlError(f"{entry.job_id}: answered something else than a command's state") from error

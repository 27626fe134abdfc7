"""Where running jobs are found: ``<config home>/forgather/jobs/<job_id>/endpoint.json`` and ``auth_token``.

Only their owner can read them. The entry of a killed job stays: whether the job still runs follows from its pid and the
start time of that process, since the system reuses pids. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import read_bytes
from forgather_cli.errors import ControlError
from forgather_cli.run_dir import is_name, shown

LOOPBACK = ("127.", "localhost", "::1")
"""How a host begins on which only this machine can reach a server."""
_ENDPOINT, _TOKEN = "endpoint.json", "auth_token"
_TEMPORARY_AGE = 3600.0  # seconds after which a half-written entry has no writer any more
_MAX_BYTES = 65536  # of a file here; ours are a few hundred


@dataclass(frozen=True)
class Entry:
    """One job, as it has written itself into the registry."""

    job_id: str
    host: str
    """Address that its server listens on."""
    hostname: str
    """The machine that it runs on."""
    port: int
    pid: int
    process_start_time: str
    """As ``start_of`` returns it, to be compared only."""
    started_at: str
    """UTC, ISO 8601."""
    run_dir: str
    """Absolute, as is ``logging_dir``."""
    logging_dir: str

    @property
    def is_here(self) -> bool:
        """True if the job runs, or ran, on this machine."""
        return self.hostname == socket.gethostname()

    @property
    def is_running(self) -> bool | None:
        """Whether its process still runs; None for a job of another machine, where that is not known."""
        return start_of(self.pid) == self.process_start_time if self.is_here else None

    @property
    def is_below(self) -> bool:
        """Whether its run directory lies below the working directory."""
        return Path(self.run_dir).is_relative_to(Path.cwd())

    def token(self) -> str | None:
        """The token that its server wants; None if it wants none."""
        try:
            return _text(jobs_directory() / self.job_id / _TOKEN).strip()
        except (OSError, ValueError):
            return None


def jobs_directory() -> Path:
    """``$XDG_CONFIG_HOME/forgather/jobs``, or below ``~/.config``."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".config"  # the standard: others are to be ignored
    return base / "forgather" / "jobs"


def start_of(pid: int) -> str | None:
    """When a process of this machine started; None if there is none, or it is a zombie.

    Linux counts ticks since boot, so the id of the boot is part of it.
    """
    if not Path("/proc/self/stat").exists():
        try:
            found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return found.stdout.strip() or None
    try:
        fields_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return None if fields_[0] in "ZX" else f"{fields_[19]}@{boot}"  # state; starttime (man 5 proc)


# -------------------------------------------------------------------------------------------------------- a job's side


def register(entry: Entry, token: str | None) -> None:
    """Publish a job, both files at once. Raises OSError, and ControlError if a running job has the same id."""
    jobs = jobs_directory()
    jobs.parent.mkdir(parents=True, exist_ok=True)
    jobs.mkdir(mode=0o700, exist_ok=True)
    jobs.chmod(0o700)  # whoever made it
    place = jobs / entry.job_id
    temporary = jobs / f".{entry.job_id}.{entry.pid}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        _write(temporary / _ENDPOINT, json.dumps(asdict(entry), indent=2) + "\n")
        if token is not None:
            _write(temporary / _TOKEN, token + "\n")
        if is_taken(place.name):
            raise ControlError(f"job_id: {place.name} is the id of a job that runs")
        if place.is_dir():
            _remove(place)
        temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_taken(job_id: str) -> bool:
    """True if a job with this id runs, or may run on another machine."""
    there = _read(jobs_directory() / job_id)
    return there is not None and there.is_running is not False


def unregister(entry: Entry) -> None:
    """Remove a job's own entry, and never that of another job of the same id. Raises OSError."""
    if _read(jobs_directory() / entry.job_id) == entry:
        _remove(jobs_directory() / entry.job_id)


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _remove(place: Path) -> None:
    """The endpoint first: without it nobody takes the rest for an entry."""
    with contextlib.suppress(FileNotFoundError):
        (place / _ENDPOINT).unlink()
    shutil.rmtree(place)


# ------------------------------------------------------------------------------------------------------- a user's side


def entries() -> list[Entry]:
    """All entries that can be read, stale ones too, the newest last."""
    found = (_read(place) for place in _places())
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.started_at)


def running() -> list[Entry]:
    """Jobs that run on this machine, the newest last."""
    return [entry for entry in entries() if entry.is_running]


def resolve(word: str | None) -> Entry:
    """The running job named by ``word``: an id, its beginning, a run directory, or ``latest``. None: the only one.

    ``latest`` and None look below the working directory first, and do not find jobs of other machines. Raises
    ControlError.
    """
    if word is None or word == "latest":
        alive = running()
        alive = [entry for entry in alive if entry.is_below] or alive
        if not alive:
            raise ControlError(
                f"no job that takes commands is running on {socket.gethostname()}; name another by its run directory"
            )
        if word is None and len(alive) > 1:
            raise ControlError(f"{len(alive)} jobs are running; name one of them, or latest:{_listed(alive)}")
        return alive[-1]
    known = entries()
    named = [entry for entry in known if entry.job_id == word]
    path = os.path.realpath(word) if word and "\0" not in word else None
    in_directory = [entry for entry in known if os.path.realpath(entry.run_dir) == path]
    beginning = [entry for entry in known if word and entry.job_id.startswith(word)]
    for candidates in (named, in_directory, beginning):
        alive = [entry for entry in candidates if entry.is_running is not False]
        if len(alive) > 1:
            raise ControlError(f"{word}: {len(alive)} jobs begin with that; give more of the id:{_listed(alive)}")
        if alive:
            return alive[0]
        if candidates:
            gone = candidates[-1]
            raise ControlError(
                f"{gone.job_id}: does not run any more (process {gone.pid} on {gone.hostname}, in {gone.run_dir}); "
                f"forgather control cleanup{'' if gone.is_below else ' --yes'} removes what it left"
            )
    alive = running()
    there = f"; these are running:{_listed(alive)}" if alive else f", none is running on {socket.gethostname()}"
    raise ControlError(f"{word}: no such job{there}")


def cleanup(*, everywhere: bool) -> list[str]:
    """Remove the entries of this machine's jobs that have ended, and what cannot be read; returns their names. Not
    ``everywhere``: of runs below the working directory alone.

    Entries of other machines are left alone. Raises ControlError.
    """
    removed = []
    try:
        for place, entry in abandoned():
            if everywhere or (entry is not None and entry.is_below):
                _remove(place)
                removed.append(place.name)
    except OSError as error:
        raise ControlError(f"{error.filename}: cannot be removed: {error.strerror}; see {jobs_directory()}") from error
    return removed


def abandoned() -> Iterator[tuple[Path, Entry | None]]:
    """What ``cleanup`` removes, and of which job it is, if that can be read. Raises OSError."""
    for place in _places():
        entry = _read(place)
        new = place.name.startswith(".") and time.time() - place.stat().st_mtime < _TEMPORARY_AGE  # being written
        if not new if entry is None else entry.is_running is False:
            yield place, entry


def _places() -> Iterator[Path]:
    try:
        found = sorted(jobs_directory().iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ControlError(f"{jobs_directory()}: cannot be read: {error.strerror}") from error
    yield from (path for path in found if path.is_dir() and not path.is_symlink())


def _read(place: Path) -> Entry | None:
    """What lies in a directory of the registry; None if that is no entry."""
    try:
        raw: dict[str, Any] = parse_json(_text(place / _ENDPOINT))
        entry = Entry(**{each.name: raw[each.name] for each in fields(Entry)})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    numbers = isinstance(entry.port, int) and isinstance(entry.pid, int)
    texts = all(isinstance(value, str) for name, value in asdict(entry).items() if name not in ("port", "pid"))
    return entry if numbers and texts and is_name(place.name) and entry.job_id == place.name else None


def _text(path: Path) -> str:
    return read_bytes(path, _MAX_BYTES).decode()


def _listed(found: list[Entry]) -> str:
    """A line for each of the newest jobs, with its directory."""
    newest = "".join(f"\n  {entry.job_id}  {shown(entry.run_dir)}" for entry in found[-5:])
    return f"{newest}\n  and {len(found) - 5} more" if len(found) > 5 else newest


def new_job_id(pid: int) -> str:
    """``job_<time>_<host>_<pid>``."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:50]
    return f"job_{time.strftime('%Y%m%d-%H%M%S')}_{host}_{pid}"

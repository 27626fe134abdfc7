"""One start of a run that is to be killed: its processes, the instants of its saves, and the strike.

Linux only: processes are found in /proc, and instants by inotify(7), since a rename that is polled for is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from crash_draw import MAX_STEPS, Instant, Kill

LEFT_OVER = 30.0
"""Seconds in which a job must end once one of its processes was killed, where nobody else wants the cores."""
MARK = "CRASH_CAMPAIGN_RUN"
"""In the environment of every process of a job."""

# ------------------------------------------------------------------------------------------------------------ processes


@dataclass(frozen=True)
class Member:
    """A process of a job. ``role``: launcher (of ``trainer=single``: the process that trains), rank, worker, helper."""

    pid: int
    role: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.rank} (pid {self.pid})"


class Job:
    """``python -m forgather_cli WORDS``; whatever is left of it at the end of the context is killed."""

    def __init__(self, run: Path, words: Sequence[str], environment: dict[str, str], output: Path) -> None:
        self.run, self._output = run, output
        self.known: list[Member] = []
        """The processes that train, once they do."""
        run.joinpath("checkpoints").mkdir(parents=True, exist_ok=True)  # to be watched
        self.watch = Watch(run)
        _no_core_dumps()
        with output.open("ab") as stream:
            stream.write(f"\n$ forgather {' '.join(words)}\n".encode())
            stream.flush()
            self._begin = stream.tell()
        marked = {**os.environ, **environment, MARK: str(run), "OMP_NUM_THREADS": "1"}
        self.process = self._start(["-m", "forgather_cli", *words], marked)

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """``python COMMAND``, whose output is appended to the job's file."""
        with self._output.open("ab") as stream:
            return subprocess.Popen(
                [sys.executable, *command], stdout=stream, stderr=subprocess.STDOUT, env=environment
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.close()
        for member in self.members():
            send(member.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        """What this start has written to its terminal so far."""
        with self._output.open("rb") as stream:
            stream.seek(self._begin)
            return stream.read().decode(errors="replace")

    def members(self) -> list[Member]:
        """The job's processes that run now, also those that have lost their parent."""
        mark = f"{MARK}={self.run}\0".encode()
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                environment = path.read_bytes()
                pid = int(path.parent.name)
                if mark in environment + b"\0" and is_running(pid):
                    found[pid] = environment
        return [self._member(pid, environment) for pid, environment in found.items()]

    def _member(self, pid: int, environment: bytes) -> Member:
        number = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
        rank = int(number[1]) if number else 0
        if pid == self.process.pid:
            return Member(pid, "launcher")
        words, parent = _command(pid), _parent(pid)
        if "forgather_cli.worker" in words and _command(parent) != words:
            return Member(pid, "rank", rank)
        return Member(pid, "worker" if "forgather_cli" in words else "helper", rank)

    def wait(self, seconds: float) -> list[Member]:
        """Wait until no process of the job runs; returns those that still do after ``patience(seconds)``."""
        began = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        while (left := self.members()) and time.monotonic() - began < patience(seconds):
            time.sleep(0.05)
        return left


def patience(seconds: float) -> float:
    """How long to wait now for what takes ``seconds`` where nobody else wants the cores: as many times as long as
    processes share each. Asked again while one waits, since the load is a mean of the last minute."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def is_running(pid: int) -> bool:
    """False for a process that has ended, even if nobody has asked for its exit code yet."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0] not in "ZX"
    return False


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(_stat(pid)[1])
    return 0


def _stat(pid: int) -> list[str]:
    """State, parent and so on of proc(5), after the name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def send(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _no_core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


# ------------------------------------------------------------------------------------------------------------- instants

_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_HEADER = struct.Struct("iIII")


class Watch:
    """Tells of what happens in a run directory, as it happens."""

    def __init__(self, run: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._paths: dict[int, Path] = {}
        self._add(run, _MODIFY)
        self._add(run / "checkpoints", _CREATE | _MOVED_TO)
        references = run.parent / "cache" / "references"
        references.mkdir(parents=True, exist_ok=True)
        self._add(references, _CREATE)
        for path in references.glob(".tmp-*"):  # of a start before
            self._add(path, _MODIFY)

    def close(self) -> None:
        os.close(self._fd)

    def _add(self, path: Path, mask: int) -> None:
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if number >= 0:  # else it is gone already
            self._paths[number] = path

    def events(self, seconds: float) -> Iterator[str]:
        """What has happened by now, waiting so long for the first: the names of ``Instant.event``."""
        poll = select.poll()  # ``select`` takes no descriptor above 1023, which a long test session may have
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(max(0.0, seconds) * 1000):
            return
        data = os.read(self._fd, 65536)
        while data:
            number, mask, _, length = _HEADER.unpack_from(data)
            name = data[_HEADER.size : _HEADER.size + length].rstrip(b"\0").decode()
            data = data[_HEADER.size + length :]
            yield from self._named(self._paths[number], mask, name)

    def _named(self, directory: Path, mask: int, name: str) -> Iterator[str]:
        if directory.name == "references":
            if name.startswith(".tmp-"):
                self._add(directory / name, _MODIFY)
        elif directory.parent.name == "references":
            yield "reference"
        elif mask & _MODIFY:
            yield from {"metrics.jsonl": ["record"], "samples.txt": ["sample"]}.get(name, [])
        elif directory.name.startswith(".tmp"):
            yield from ["manifest"] if name == "manifest.json" else []
        elif name.startswith(".tmp-step"):
            self._add(directory / name, _CREATE | _MOVED_TO)
            yield "temporary"
        elif name.startswith(".tmp-trial"):
            yield "trial"
        elif name.startswith(".trash-"):
            yield "retention"
        elif name == f"step-{MAX_STEPS:08d}":
            yield from ["rename", "final"]
        elif name.startswith("step-"):
            yield "rename"


def reached(job: Job, instant: Instant, seconds: float) -> bool:
    """Wait for an instant. False if the job ended before, or did not get there within ``patience(seconds)``."""
    began, missing = time.monotonic(), instant.count if instant.event != "start" else 0
    while missing > 0:
        if job.process.poll() is not None or time.monotonic() - began > patience(seconds):
            return False
        for event in job.watch.events(0.5):
            missing -= event == instant.event
            if event == "trial" and not job.known:
                job.known = job.members()  # to look for them takes longer than a rename
    time.sleep(instant.delay)
    return job.process.poll() is None


# --------------------------------------------------------------------------------------------------------------- strike


@dataclass(frozen=True)
class Struck:
    """A kill that was done."""

    signum: signal.Signals
    target: str
    """process (of ``trainer=single``), launcher, rank, group or worker."""
    event: str
    inside_save: bool
    """A checkpoint was being written, published or deleted."""
    followed: bool
    """With SIGKILL to all a moment later."""


def strike(job: Job, kill: Kill) -> Struck:
    """Send a kill's signal to those it is meant for."""
    members = job.members() if kill.target == "worker" or not job.known else job.known
    doomed, target = _doomed(members, kill)
    inside = saving(job.run)
    for member in doomed:
        send(member.pid, kill.signum)
    if kill.target == "group":
        for member in set(job.members()) - set(doomed):  # data workers, which come and go
            send(member.pid, kill.signum)
    if kill.then is not None:
        time.sleep(kill.then)
        for member in job.members():
            send(member.pid, signal.SIGKILL)
    return Struck(kill.signum, target, kill.instant.event, inside, kill.then is not None)


def _doomed(members: list[Member], kill: Kill) -> tuple[list[Member], str]:
    """Those a kill is for, and as what. Before the ranks are there it is for the launcher."""
    alone = not any(member.role == "rank" for member in members)
    if kill.target == "group":
        return members, "group"
    same = [member for member in members if member.role == kill.target]
    if own := [member for member in same if member.rank == kill.rank] or same:
        return own[:1], "process" if kill.target == "launcher" and alone else kill.target
    launcher = [member for member in members if member.role == "launcher"]
    return launcher, "process" if alone else "launcher"


def saving(run: Path) -> bool:
    """True while there is something in the run's checkpoints that is not one yet, or not any more."""
    return any(path.name.startswith(".") for path in (run / "checkpoints").iterdir())

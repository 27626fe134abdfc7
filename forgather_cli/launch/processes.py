"""Processes: how those that import torch begin and leave, how they end with the process that started them, and folders
that go with the process that made them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


def collect_less() -> None:
    """Let Python look for cycles after 50,000 new objects instead of 700.

    torch and its compiler make 300,000 while they are imported, none of them garbage: looking at them again and again
    takes 0.2 s of torch's 1.2, and 0.5 s of 2.2 with ``torch._dynamo`` (Python 3.11, torch 2.13).
    """
    gc.set_threshold(50_000)


def keep_heap() -> None:
    """Have large blocks, and all memory of small models, cost fewer page faults; call it before torch is imported.

    torch's blocks from 2 MiB on lie in huge pages (THP_MEM_ALLOC_ENABLE, which torch 2.13 reads once): a step of tiny
    takes 43,000 page faults instead of 270,000, one of 160m 140,000 instead of 480,000. And up to 16 MiB that are free
    at the end of glibc's heap stay there: freeing a block that has a mapping of its own raises that limit to twice its
    size. It still rises with larger blocks, as it would not after ``mallopt`` (mallopt(3), M_MMAP_THRESHOLD).
    """
    if Path("/sys/kernel/mm/transparent_hugepage").exists():  # else torch warns
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.malloc.restype = ctypes.c_void_p
        libc.free(ctypes.c_void_p(libc.malloc(8 << 20)))


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that processes may still take here: of the machine, or what the container is allowed."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")  # of this process (cgroup v2)
    try:
        return min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no group, or one without a limit
        return free


def leave(code: int) -> NoReturn:
    """Exit with all that others expect of an exit: threads are waited for, exit handlers run, output is flushed.

    What is left out is the clearing of modules and the last garbage collection: 1 to 2 s after torch was imported
    (Python 3.11, torch 2.13). Call it in the main thread, with nothing on the stack that still has to be unwound.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as Py_FinalizeEx does; it ends idle pools of threads, too
    atexit._run_exitfuncs()
    leave_now(code)


def leave_now(code: int) -> NoReturn:
    """Exit without waiting for anything: what an exit waits for may be ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signum`` to this process when ``parent`` ends; exits if that has happened already.

    Linux only (PR_SET_PDEATHSIG): elsewhere the parent has to be watched (``is_orphan``).
    """
    if sys.platform.startswith("linux"):
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, int(signum))
    if is_orphan(parent):
        os._exit(128 + signum)


def is_orphan(parent: int) -> bool:
    """True if ``parent``, which started this process, is gone."""
    return os.getppid() != parent


def children(parent: int) -> set[int]:
    """Process ids of a process's children; empty where the kernel does not list them (Linux does)."""
    found: set[int] = set()
    for each in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # of a thread that has just ended
            found |= {int(pid) for pid in each.read_text().split()}
    return found


def process_state(pid: int | str) -> str:
    """Linux's letter for a process, or a thread of this one (``self/task/7``): R runs, T is stopped, Z is a zombie.

    Empty for one that is gone, and where the system does not tell.
    """
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def is_running(pid: int) -> bool:
    """False for a process that is gone, or only waits for its parent to take notice (a zombie)."""
    if state := process_state(pid):
        return state not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# ----------------------------------------------------------------------------------------------- temporary folders

_OWNER = "owner"
"""File of a folder whose owner is to remove it; made once the owner holds the folder."""
_OF_TORCHRUN = "torchelastic_"


@contextlib.contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """A folder that only this user may read, until the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"forgather-{name}-"))
    with owned(folder):
        yield folder


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Remove the folder at the end, or with a later command where this process is killed. Those of this user whose
    owners were killed go now, and at the end those of ranks that were. Raises OSError if another process owns it.
    """
    with _locked(folder):
        (folder / _OWNER).touch(mode=0o600)
        remove_abandoned()
        try:
            yield
        finally:
            if (folder / _OWNER).exists():
                shutil.rmtree(folder, ignore_errors=True)
            remove_abandoned()


def torchrun_folder(error_file: str | None) -> Path | None:
    """The folder in TMPDIR that torchrun has made for what its ranks print, if they print nothing there: it leaves it,
    however it ends, and makes it again where it needs it (torch 2.13, ``DefaultLogsSpecs``).

    ``error_file``: FOLDER/JOB/attempt_0/0/error.json, which torchrun tells each rank (TORCHELASTIC_ERROR_FILE).
    """
    parents = Path(error_file or "").parents
    if len(parents) < 4 or parents[3].parent != Path(tempfile.gettempdir()):
        return None
    folder = parents[3]
    is_empty = not any(path.is_file() for path in folder.rglob("*") if path.name != _OWNER)
    return folder if folder.name.startswith(_OF_TORCHRUN) and is_empty else None


def remove_abandoned() -> None:
    """Remove this user's temporary folders whose owners were killed."""
    for left in abandoned_folders():
        shutil.rmtree(left, ignore_errors=True)


def abandoned_folders() -> list[Path]:
    """This user's temporary folders whose owners were killed."""
    found = []
    for prefix in ("forgather-", _OF_TORCHRUN):
        for owner in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_OWNER}"):
            with contextlib.suppress(OSError), _locked(owner.parent):
                found.append(owner.parent)
    return found


def keep(folder: Path) -> None:
    """Leave a temporary folder for people to look at."""
    (folder / _OWNER).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder while this process lives, in whatever container. Raises OSError if another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)

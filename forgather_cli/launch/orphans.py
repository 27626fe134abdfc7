"""Processes that end when the process that started them does, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path


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

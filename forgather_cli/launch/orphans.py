"""Processes that end when the process that started them does, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


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

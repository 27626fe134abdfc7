"""Leaving a process at its end, without the second or more in which Python takes torch's modules down."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


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

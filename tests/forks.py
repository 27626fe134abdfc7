"""Processes for tests, forked from one that has imported torch and all of the package: each starts in milliseconds
instead of 3 to 5 s. There is one such server for each process of pytest; ``warm.py`` is what it has imported.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["warm"])


def fork(function: Callable[..., Any], *args: Any, daemon: bool) -> Any:
    """A started process that calls a module's function. On one thread, with the environment of this process.

    ``daemon``: it ends with this process, and cannot start processes by multiprocessing.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        process = _CONTEXT.Process(target=_call, args=(dict(os.environ), function, *args), daemon=daemon)
        process.start()
    return process


def _call(environment: dict[str, str], function: Callable[..., Any], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(*args)

"""Worker processes that read data ahead, by torchdata's StatefulDataLoader."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait as wait_for
from multiprocessing.util import Finalize
from typing import Any

import torch

from forgather_cli.launch.processes import temporary_folder

_SOCKET_PATH = 107  # characters of a Unix socket's path (unix(7)); macOS takes 103, but passes tensors by files
_HELD = ExitStack()
"""Not left to ``Finalize`` alone: a forked worker drops what that holds, and would remove the folder."""


@dataclass(frozen=True)
class Workers:
    """Worker processes that read ahead; 0 reads in this process."""

    num: int = 0
    prefetch_factor: int | None = None
    """Micro-batches (of iterable data: global batches) that each worker reads ahead; None: 2."""
    persistent: bool = False
    """They outlive an epoch."""


def worker_loader(dataset: Any, workers: Workers, seed: int, **kwargs: Any) -> Any:
    """A StatefulDataLoader with a generator of its own, so that it draws nothing from the global one."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    if workers.num:
        _share_folder()
        kwargs |= {"prefetch_factor": workers.prefetch_factor or 2, "persistent_workers": workers.persistent}
        kwargs["worker_init_fn"] = partial(_end_with_trainer_alone, os.getpid())
    generator = torch.Generator().manual_seed(seed & (1 << 63) - 1)
    kwargs.setdefault("collate_fn", _unchanged)
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates
        warnings.filterwarnings("ignore", ".*set_vital", UserWarning)
        return StatefulDataLoader(dataset, num_workers=workers.num, generator=generator, **kwargs)


def _unchanged(value: Any) -> Any:  # a worker that is spawned cannot be sent a lambda
    return value


def _end_with_trainer_alone(trainer: int, worker: int) -> None:
    """In a worker: end when the process ``trainer`` ends, and by its SIGTERM, but by nobody else's. A scheduler sends
    one to workers, which training still needs.

    torch's worker loop has set a handler in C that ends them at once (torch 2.13, ``_set_worker_signal_handlers``). A
    handler does not learn who has sent the signal, a thread that waits for it does. Not where there is no sigwaitinfo.
    torch's watchdog looks whether the parent has changed since the worker was up: a worker whose trainer was killed
    before that would stay for ever. ``trainer`` may not be the parent (Python 3.14's fork server).
    """
    if hasattr(signal, "sigwaitinfo"):

        def wait() -> None:
            while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
                continue
            os._exit(0)

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any thread starts: each inherits it
        threading.Thread(target=wait, daemon=True).start()
    if parent := multiprocessing.parent_process():

        def outlive() -> None:
            wait_for([parent.sentinel])
            os._exit(0)

        threading.Thread(target=outlive, daemon=True).start()


def _share_folder() -> None:
    """Have the sockets through which workers pass tensors lie in a folder of this process, which goes with it.

    Else each worker makes a ``pymp-*`` of its own for them, and leaves it: it does not live to remove it (Python 3.11
    to 3.14, ``multiprocessing.util.get_temp_dir``, which looks for this setting first).
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if settings.get("tempdir") is None:
        folder = _HELD.enter_context(temporary_folder("data"))
        if len(str(folder / "listener-12345678")) <= _SOCKET_PATH:  # pymp-* is some characters shorter
            settings["tempdir"] = str(folder)
        Finalize(None, _HELD.close, exitpriority=-100)  # after workers, and in this process alone


def start_workers(loader: Any) -> Iterator[Any]:
    """``iter(loader)`` without what starting processes would otherwise print."""
    if "tokenizers" in sys.modules:
        # its thread pool does not survive a fork; unset, it says so in every worker (tokenizers 0.23, parallelism.rs)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        # Python 3.12 warns of fork in a process with threads, which any use of torch makes
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        # more workers than cores: the user asked for it
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        return iter(loader)

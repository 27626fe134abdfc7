"""Worker processes that read data ahead, by torchdata's StatefulDataLoader."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait as wait_for
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from forgather_cli.errors import DataError, ForgatherError, TrainingError
from forgather_cli.launch.processes import temporary_folder

_SOCKET_PATH = 107  # characters of a Unix socket's path (unix(7)); macOS takes 103, but passes tensors by files
_ROOM = Path("/dev/shm")
"""Through which workers pass tensors on Linux (shm_overview(7)); containers have 64 MB there."""
_SEMAPHORES = 1 << 16  # bytes there for those of one worker, at least; a smaller /dev/shm is one by mistake
_SHORT = ("No space left", "Bus error", "shared memory", "Cannot allocate memory")
_REASON = "reason"
_SIGCHLD = 5.0  # seconds in which it comes
_FOLDER: list[Path] = []
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
        folder = _share_folder()
        kwargs |= {"prefetch_factor": workers.prefetch_factor or 2, "persistent_workers": workers.persistent}
        kwargs["worker_init_fn"] = partial(_begin, os.getpid(), folder)
    generator = torch.Generator().manual_seed(seed & (1 << 63) - 1)
    kwargs.setdefault("collate_fn", _unchanged)
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates
        warnings.filterwarnings("ignore", ".*set_vital", UserWarning)
        return StatefulDataLoader(dataset, num_workers=workers.num, generator=generator, **kwargs)


def _unchanged(value: Any) -> Any:  # a worker that is spawned cannot be sent a lambda
    return value


def _begin(trainer: int, folder: Path, worker: int) -> None:
    """In a worker, before it reads."""
    _end_with_trainer_alone(trainer)

    def failed(error: BaseException, _: Any) -> None:
        (folder / _REASON).write_text(f"{type(error).__name__}: {error}", errors="backslashreplace")
        os._exit(1)

    # multiprocessing prints the traceback of a batch that cannot be sent, and the trainer would wait for it for ever
    Queue._on_queue_feeder_error = staticmethod(failed)  # type: ignore[attr-defined]
    show = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ConnectionError | EOFError):
            show(kind, error, trace)

    # the thread that passes tensors comes here where a trainer that is about to end takes no more of them
    # (Python 3.11 to 3.14, multiprocessing.resource_sharer._serve)
    sys.excepthook = shown


def _end_with_trainer_alone(trainer: int) -> None:
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


def _share_folder() -> Path:
    """A folder of this process, which goes with it: for what a worker says when it ends, and for the sockets through
    which workers pass tensors.

    Else each worker makes a ``pymp-*`` of its own for these, and leaves it: it does not live to remove it (Python 3.11
    to 3.14, ``multiprocessing.util.get_temp_dir``, which looks for this setting first).
    """
    if not _FOLDER:
        _FOLDER.append(_HELD.enter_context(temporary_folder("data")))
        Finalize(None, _HELD.close, exitpriority=-100)  # after workers, and in this process alone
    folder, settings = _FOLDER[0], multiprocessing.current_process()._config  # type: ignore[attr-defined]
    # pymp-* is some characters shorter
    if settings.get("tempdir") is None and len(str(folder / "listener-12345678")) <= _SOCKET_PATH:
        settings["tempdir"] = str(folder)
    (folder / _REASON).unlink(missing_ok=True)
    return folder


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
        if not isinstance(loader, DataLoader) or not loader.num_workers:
            return iter(loader)
        room = _free()
        if room is not None and room < loader.num_workers * _SEMAPHORES:
            raise DataError(_lacking(f"has {room // 1024} KiB free"))
        items = iter(loader)
        _explain_ends()
        return _received(items, loader, room)


def _received(items: Iterator[Any], loader: Any, room: int | None) -> Iterator[Any]:
    """What workers send. Raises DataError where ``room`` bytes do not hold what they read ahead."""
    global _ended, _has_received, _is_told, _is_waited_for
    is_first, _is_told, _ended = True, False, None
    while True:
        try:
            _is_waited_for = True
            if _ended is not None:
                raise _ended
            item = next(items)
        except StopIteration:
            return
        except RuntimeError as error:
            if (told := _told(error)) is None:
                raise
            raise told from None
        except (ConnectionError, EOFError) as error:
            # a worker that is killed while it sends a tensor: its sockets close before SIGCHLD comes, which tells of it
            if "DataLoader worker" not in str(error):  # else a dataset's own, in a worker
                time.sleep(_SIGCHLD)
            raise
        finally:
            _is_waited_for = False
        ahead = loader.num_workers * (loader.prefetch_factor or 2) + 1  # and the one in use
        if is_first and room is not None:
            needed = _bytes_of(item) * ahead * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if needed > room:
                _is_told = True
                raise DataError(_lacking(f"has {room / 1e6:.3g} MB free, and they read {needed / 1e6:.3g} MB ahead"))
        is_first, _has_received = False, True
        yield item


def _bytes_of(item: Any) -> int:
    """Of a batch's tensors, each in pages of its own."""
    if isinstance(item, torch.Tensor):
        return -(-item.numel() * item.element_size() // 4096) * 4096
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
    return sum(map(_bytes_of, parts))


def _free() -> int | None:
    return shutil.disk_usage(_ROOM).free if _ROOM.is_dir() else None


def _lacking(what: str) -> str:
    return (
        f"dataloader_num_workers: workers pass batches through {_ROOM}, which {what}; give it more (a container: "
        "--shm-size=1g), lower dataloader_prefetch_factor, or set dataloader_num_workers=0"
    )


_has_received = False
_is_told = False  # others that end then end with it
_is_waited_for = False
"""A batch, by the main thread."""
_ended: ForgatherError | None = None
"""What to tell of a worker that has ended while no batch was waited for."""


def _told(error: RuntimeError) -> ForgatherError | None:
    """What to tell where a worker has ended; None for another error."""
    global _is_told
    if "DataLoader worker (pid" not in str(error):  # a dataset's own, in a worker
        return None
    _is_told = True
    why = str(error).splitlines()[0]
    with suppress(OSError, IndexError):
        why = (_FOLDER[0] / _REASON).read_text().splitlines()[0]
    kind = TrainingError if _has_received else DataError
    if any(sign in why for sign in _SHORT):
        free = _free()
        left = "is full" if free is None else f"has {free / 1e6:.1f} MB left"
        return kind(_lacking(f"{left} ({why})"))
    remedy = "lower it if memory is short, or set dataloader_num_workers=0 to read in the process that trains"
    return kind(f"dataloader_num_workers: a worker has ended ({why}); {remedy}")


def _explain_ends() -> None:
    """Have the error that torch raises when a worker ends say what to do, and where a batch is waited for.

    torch raises it wherever the main thread is (2.13). Within a save it was taken for the save's failure: half-deleted
    checkpoints stayed, or this rank went on alone while others waited for it in a collective.
    """
    raises = signal.getsignal(signal.SIGCHLD)
    if getattr(raises, "__module__", "") != "torch.utils.data._utils.signal_handling":
        return

    def handler(signum: int, frame: Any) -> None:
        global _ended
        try:
            if not _is_told:
                raises(signum, frame)  # type: ignore[operator,misc]
        except RuntimeError as error:
            if (told := _told(error)) is None:
                raise
            if _is_waited_for:
                raise told from None
            _ended = told

    signal.signal(signal.SIGCHLD, handler)

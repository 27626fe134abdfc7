"""Run a function on N gloo ranks. One pool of rank processes serves all tests of a pytest process.

    results = run_ranks(2, trained_weights, config)   # a module's function; arguments and results are pickled

The function runs in a fresh process group (``torch.distributed`` is initialised, RANK and WORLD_SIZE are set). Results
come by rank. When a rank raises, RankError has every rank's traceback, the first cause first. The pool is replaced if a
rank has died or gives no answer.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forks import fork

from forgather_cli.errors import ForgatherError

_SETTLE = 8.0  # seconds that the other ranks get to fail too, once one has
_THREADS = 40
"""Of a rank, above which the ranks are made anew: threads of gloo groups stay where something still holds a group, as
DTensor's caches do. Each wakes up a hundred times a second (gloo's tcp loop, torch 2.13), 0.2 % of a core; a new rank
costs 0.5 to 1 s, most of it for what torch had cached."""


class RankError(AssertionError):
    """A rank raised, or gave no answer in time. ``causes`` are the exceptions by rank, in the order of their time."""

    def __init__(self, message: str, causes: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.causes = causes

    @property
    def first(self) -> BaseException:
        return next(iter(self.causes.values()))


class _Pool:
    def __init__(self) -> None:
        self.ranks: list[tuple[Any, Connection]] = []
        self._directory = tempfile.TemporaryDirectory()
        self.folder = self._directory.name

    def grow(self, count: int) -> None:
        while len(self.ranks) < count:
            ours, theirs = Pipe()
            process = fork(_serve, theirs, f"{self.folder}/{len(self.ranks)}")
            theirs.close()
            self.ranks.append((process, ours))

    def wake(self, count: int, *, is_new: bool = False) -> None:
        """Have these ranks, which wait stopped, go on. If one does not come to rest, all are made anew, once: one that
        has given its results may hang where torch 2.13 frees a group (seen twice).
        """
        end = time.monotonic() + 60
        for rank, (process, _) in enumerate(self.ranks[:count]):
            with contextlib.suppress(OSError):  # one that died, or no Linux
                while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
                    if time.monotonic() > end:
                        where = self.stacks(rank)
                        self.close()
                        if is_new:
                            raise AssertionError(where)
                        print(f"did not come to rest: {where}", file=sys.__stderr__)
                        self.grow(count)
                        return self.wake(count, is_new=True)
                    time.sleep(0.001)
                os.kill(process.pid, signal.SIGCONT)
        return None

    def stacks(self, rank: int) -> str:
        """Where a rank is that gives no answer: the stacks of its threads, or what the system knows of one that prints
        none; and its children, for which it may wait."""
        pid, file, end = self.ranks[rank][0].pid, Path(self.folder, str(rank)), time.monotonic() + 10
        before = file.stat().st_size if file.exists() else 0
        seen = _process(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
        while time.monotonic() < end and not (file.exists() and file.stat().st_size > before):
            time.sleep(0.05)
        time.sleep(0.05)  # it is written line by line
        where = file.read_text()[before:] if file.exists() else "its start"
        children = [_process(int(child)) for child in _read(f"/proc/{pid}/task/{pid}/children").split()]
        return "\n".join([f"rank {rank} is at", where or f"no stacks; now {_process(pid)}", seen, *children])

    def close(self) -> None:
        for process, connection in self.ranks:
            connection.close()
            process.kill()
            process.join()
        self.ranks = []


_pool = _Pool()
atexit.register(_pool.close)


def run_ranks(count: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """``function(*args)`` on ``count`` gloo ranks; results by rank. Raises RankError."""
    _pool.grow(count)
    _pool.wake(count)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the store of a rank that failed may write
        for rank in range(count):
            _pool.ranks[rank][1].send(pickle.dumps((function, args, rank, count, f"{folder}/store", timeout)))
        results, causes, texts = _collect(count, time.monotonic() + timeout)
        for rank in results.keys() | causes.keys():
            with contextlib.suppress(OSError):  # one that died
                _pool.ranks[rank][1].send_bytes(b"all have answered")
    if len(results) < count:
        silent = sorted(set(range(count)) - results.keys() - causes.keys())
        where = [_pool.stacks(rank) for rank in silent]
        if silent or any(isinstance(cause, ProcessLookupError) for cause in causes.values()):
            _pool.close()
        texts += [f"ranks {silent} gave no answer within {timeout:g} s, or after another had failed"] if silent else []
        texts += where
        raise RankError("\n".join(texts), causes)
    if max(_num_threads(process.pid) for process, _ in _pool.ranks) > _THREADS:
        _pool.close()
    return [results[rank] for rank in range(count)]


@functools.cache
def refusals(count: int, module: str) -> list[dict[str, ForgatherError]]:
    """What each call of a test module's table ``REFUSED`` is refused with, by rank: all at once, each on every rank, so
    that none waits for another."""
    return run_ranks(count, _refused, module)


def _refused(module: str) -> dict[str, ForgatherError]:
    found = {}
    for name, (call, *_) in importlib.import_module(module).REFUSED.items():
        try:
            call()
        except ForgatherError as error:
            found[name] = error
    return found


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Messages of warnings and worse on a rank, where pytest collects none."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("forgather_cli")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _process(pid: int) -> str:
    """State and handling of signals of a process, and what its main thread waits for in the kernel."""
    status = _read(f"/proc/{pid}/status").splitlines()
    kept = [line for line in status if line.startswith(("State", "PPid", "Threads", "Sig", "ShdPnd"))]
    return " ".join([f"process {pid}:", *kept, _read(f"/proc/{pid}/wchan")]).replace("\t", " ")


def _read(path: str) -> str:
    with contextlib.suppress(OSError):  # gone, or no Linux
        return Path(path).read_text()
    return ""


def _num_threads(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def _collect(count: int, deadline: float) -> tuple[dict[int, Any], dict[int, BaseException], list[str]]:
    waiting = {_pool.ranks[rank][1]: rank for rank in range(count)}
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, BaseException, str]] = []
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank = waiting.pop(connection)
            try:
                failed_at, value, text = pickle.loads(connection.recv_bytes())
            except EOFError:
                failed_at, value, text = time.monotonic(), ProcessLookupError(f"rank {rank} died"), "the process died"
            if failed_at is None:
                results[rank] = value
                continue
            failures.append((failed_at, rank, value, f"rank {rank}: {text}"))
            deadline = min(deadline, time.monotonic() + _SETTLE)
    failures.sort(key=lambda failure: failure[0])
    return results, {rank: value for _, rank, value, _ in failures}, [text for *_, text in failures]


def _serve(connection: Connection, stacks: str) -> None:
    """A rank process: run what comes until the connection closes. ``stacks``: a file for those of its threads, which
    SIGUSR2 asks for."""
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR2, file=open(stacks, "w"))  # noqa: SIM115 - as long as the process
    torch.set_num_threads(1)
    if stops := sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)  # one that is stopped does not see its end otherwise
    with contextlib.suppress(EOFError):
        while True:
            if stops:  # threads of groups that something still holds wake up a hundred times a second
                os.kill(os.getpid(), signal.SIGSTOP)
            function, args, rank, count, store, timeout = pickle.loads(connection.recv())
            answer = _run(function, args, rank, count, store, timeout)
            connection.send_bytes(pickle.dumps(answer))
            connection.recv_bytes()  # all have answered: closing its group earlier would cut off who still connects
            del answer
            # before the group goes: the last who holds it joins its threads, DDP's reducer or a work would do so with
            # Python's lock held (torch 2.13). Trainers are cycles, and hold groups whose threads add up
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.freeze()  # the next look is not at what stays, libraries: 0.5 s


def _run(function: Callable[..., Any], args: Any, rank: int, count: int, store: str, timeout: float) -> Any:
    """(None, result, "") or (time of the failure, exception, traceback)."""
    import torch.distributed as dist

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({key: str(value) for key, value in place.items()})
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
        )
        dist.barrier()  # a function may be done on one rank while another one still connects
        return None, function(*args), ""
    except BaseException as error:
        failed = time.monotonic(), _picklable(error), traceback.format_exc()
        traceback.clear_frames(error.__traceback__)  # as in _serve
        if dist.is_initialized():
            dist.destroy_process_group()  # at once: the others then know
        return failed


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")

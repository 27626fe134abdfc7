"""Processes for tests, forked from one that has imported torch and all of the package: each starts in milliseconds
instead of 3 to 5 s. One such server, which takes 10 s of CPU to start, serves all of xdist's processes; ``warm.py`` is
what it has imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from forgather_cli.launch.processes import leave

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["plain", "warm"])


FREEZE_COUNT = gc.get_freeze_count
_ONE_READS = threading.Lock()
"""Of the threads that ask for a process's exit code, as each start does for all processes: multiprocessing reads it
from a pipe, and a second that reads there finds it closed and takes 255 for the code."""


def serve_workers() -> None:
    """Start the server now, in xdist's controller; ``be_served`` is for the workers."""
    forkserver.ensure_running()
    os.environ["FORGATHER_TESTS_FORKS"] = forkserver._forkserver._forkserver_address


def be_served() -> None:
    """Fork from the controller's server in this process, a worker."""
    server: Any = forkserver._forkserver  # ``multiprocessing`` has bound its methods
    server._forkserver_address = os.environ["FORGATHER_TESTS_FORKS"]
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the server ends with the controller
    server.ensure_running = lambda: None


def freeze() -> None:
    """Look for garbage among new objects from now on, here and in forks.

    A million objects of libraries and of other tests would take each collection 0.5 s, and each start of training,
    which asks for the number of those that stay, 50 ms.
    """
    gc.freeze()
    gc.get_freeze_count = lambda: 1


def fork(function: Callable[..., Any], *args: Any, daemon: bool = True) -> Any:
    """A started process, on one thread and with the environment of this one, that calls a module's function.

    ``daemon``: it ends with this process, and cannot start processes by multiprocessing.
    """
    with _ONE_READS, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        process = _CONTEXT.Process(target=_call, args=(dict(os.environ), function, *args), daemon=daemon)
        process.start()
    return process


def _call(environment: dict[str, str], function: Callable[..., Any], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # read anew, from TMPDIR
    function(*args)


class Program:
    """``python COMMAND`` in a forked process, and its ranks too if it starts ranks by torch's elastic agent.

    What tests use of ``subprocess.Popen``. ``command``: [flags] -m module or -c code, then its words. ``terminal``: the
    device of a terminal to run on, which then has the output; ``file``: a file for it.
    """

    def __init__(
        self, command: tuple[str, ...], directory: str, environment: dict[str, str], terminal: str = "", file: str = ""
    ) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        self._process = fork(_program, theirs, command, directory, environment, terminal, file, daemon=False)
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()
        self.pid: int = self._process.pid
        atexit.register(self.kill)  # else multiprocessing waits for one that a failed test has left

    def poll(self) -> int | None:
        with _ONE_READS:
            code: int | None = self._process.exitcode
        if code is not None:
            atexit.unregister(self.kill)  # which keeps this, with its pipes, as long as pytest runs
        return code

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("forgather", timeout or 0)
        return code

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Plain:
    """``python SCRIPT WORDS`` in a fork of a process that has imported transformers and nothing of ours (``plain.py``):
    what ``finalize`` uses of ``subprocess.Popen``."""

    def __init__(
        self, command: list[str], *, stdin: int, stdout: int, stderr: io.TextIOBase, text: bool, env: dict[str, str]
    ) -> None:
        assert (stdin, stdout, text) == (subprocess.PIPE, subprocess.PIPE, True)
        stdin, self._input = os.pipe()
        read, write = os.pipe()
        self.stdout = os.fdopen(read, encoding="utf-8")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(os.environ["FORGATHER_TESTS_PLAIN"])
        request = json.dumps([command[command.index("-P") + 1 :], env, os.getcwd()]).encode()
        socket.send_fds(self._server, [request], [stdin, write, stderr.fileno()])
        os.close(stdin)
        os.close(write)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._input)
        self.stdout.close()
        with self._server:
            self.returncode = int(self._server.recv(9) or -signal.SIGKILL)


def prove_in_forks() -> None:
    """Have ``finalize`` in this process load its result in a fork."""
    from forgather_cli.finalize import prove

    if "FORGATHER_TESTS_PLAIN" in os.environ and prove.subprocess is subprocess:
        if multiprocessing.parent_process() is None:
            fork(os.getpid).join()  # which the server listens before
        prove.subprocess = SimpleNamespace(Popen=Plain, PIPE=subprocess.PIPE)  # type: ignore[assignment]


def _program(
    output: Connection, command: tuple[str, ...], directory: str, environment: dict[str, str], terminal: str, file: str
) -> NoReturn:
    os.chdir(directory)
    if terminal:
        os.setsid()  # the terminal that its leader opens is the session's
        for number in (0, 1, 2):
            os.dup2(os.open(terminal, os.O_RDWR), number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    else:
        written = os.open(file, os.O_WRONLY | os.O_APPEND) if file else output.fileno()
        for number in (1, 2):
            os.dup2(written, number)
    output.close()
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding=encoding, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), encoding=encoding, errors="backslashreplace", write_through=True)
    _start_ranks_by_forks()
    prove_in_forks()
    _become(command, environment)


def _become(command: tuple[str, ...], environment: dict[str, str]) -> NoReturn:
    """Do what a new interpreter does."""
    own = sorted(environment.items(), key=lambda item: os.environ.get(item[0]) == item[1])  # what is new first
    os.environ.clear()
    os.environ.update(environment)
    _show([sys.executable, *command], [f"{name}={value}" for name, value in own])
    tempfile.tempdir = None  # read anew, from TMPDIR
    multiprocessing.set_start_method(None, force=True)  # else it is that of this process: by a fork server
    kind = next(number for number, word in enumerate(command) if word in ("-m", "-c"))
    here = [] if "-P" in command[:kind] else [os.getcwd()]
    added = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([*here, *added, *sys.path])
    what = command[kind + 1]
    sys.argv = [what, *command[kind + 2 :]]
    code = 1
    try:
        if command[kind] == "-m":
            sys.modules.pop(what, None)
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    leave(code)


def _show(command: list[str], environment: list[str]) -> None:
    """Have /proc tell this command line and environment, as far as there is room where the kernel looks for them."""
    if sys.platform == "linux":
        numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        arguments, variables = map(int, numbers[45:47]), map(int, numbers[47:49])  # fields 48 to 51 of proc(5)
        for (begin, end), texts in ((arguments, command), (variables, environment)):
            if begin:  # else this process may not know
                content = "\0".join(texts).encode()[: end - begin - 1]
                ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)


def _start_ranks_by_forks() -> None:
    """Have torch's elastic agent in this process, a launcher, start ranks by forks of what this process is now, and a
    sweep its jobs.

    A child that does nothing else forks them and lets go of them: they become children of this process (Linux).
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from forgather_cli.sweeps import run as sweeps

    ours, theirs = multiprocessing.Pipe()
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, launcher)
    theirs.close()
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, args: tuple[str, ...], env: dict[str, str] | None = None, **kwargs: Any) -> None:
            outputs = {}
            for number, output in ((1, kwargs.get("stdout")), (2, kwargs.get("stderr"))):
                if output == subprocess.DEVNULL:
                    outputs[number] = os.devnull
                elif output is not None:
                    outputs[number] = f"/proc/{launcher}/fd/{output.fileno()}"
            ours.send((args, env or dict(os.environ), outputs))
            super().__init__(args, env=env, **kwargs)

        def _execute_child(self, *args: Any) -> None:
            self.pid = ours.recv()
            self._child_created = True

    subprocess_handler.Popen = Popen
    sweeps.subprocess = SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


def _serve(requests: Connection, launcher: int) -> NoReturn:
    os.setpgrp()  # a terminal's Ctrl-C is not for it
    with contextlib.suppress(EOFError):
        while True:
            command, environment, outputs = requests.recv()
            if (between := os.fork()) == 0:
                between = os.getpid()
                if os.fork() == 0:
                    _rank(requests, (between, launcher), command, environment, outputs)
                os._exit(0)
            os.waitpid(between, 0)
    os._exit(0)


def _rank(
    requests: Connection,
    parents: tuple[int, int],
    command: tuple[str, ...],
    environment: dict[str, str],
    outputs: dict[int, str],
) -> NoReturn:
    """``parents``: the process that forks it and goes, then the launcher."""
    while (parent := os.getppid()) == parents[0]:
        time.sleep(0.001)
    if parent != parents[1]:  # the launcher was killed meanwhile; who reads its output waits for the end of this one
        os._exit(1)
    for number, path in outputs.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.setsid()
    requests.send(os.getpid())
    requests.close()
    _become(command[1:], environment)

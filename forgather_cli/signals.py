"""Signals of a run: the first asks for a save and an end, the second ends the process at once.

A first signal that nobody acts on within ``GRACE`` seconds ends it too, and says where it stands. Python runs its
handlers between bytecodes of the main thread only, so a process that waits in a collective or in a long kernel would
not notice. The C handler itself writes to the interpreter's wake-up descriptor; a thread reads it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE = 25.0
"""Seconds from the first signal to a point where training can stop; schedulers kill after 30."""
_OURS = f"{os.sep}forgather_cli{os.sep}"
_SAVING = f"{_OURS}checkpoint{os.sep}"
_LAST_WORDS = 5.0  # seconds
_LINGER = 30.0  # seconds that a forked worker outlives SIGTERM


class StopSignal:
    """Whether a signal has asked this process to save and end.

    The trainer reads ``signum`` at each step. Until it has done so for the first time there is nothing to save, and
    the first signal already ends the process.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._polled = False
        self._honoured = threading.Event()
        self.at_once: Callable[[int, bool], int] | None = None
        """Called as (signum, before the first step) when the process ends at once; returns the exit code."""
        self.hung: Callable[[int, str], int] | None = None
        """Called as (signum, where the main thread stands) when nobody acts on a signal; returns the exit code."""

    @property
    def signum(self) -> int | None:
        """Number of the first signal that arrived, None before. Reading it says that somebody listens."""
        self._polled = True
        if self._signum is not None:
            self._honoured.set()
        return self._signum

    @property
    def name(self) -> str:
        """Name of the signal that arrived, as SIGTERM; empty before."""
        return signal.Signals(self._signum).name if self._signum is not None else ""

    def arrived(self, signum: int) -> None:
        """Note a signal; end the process if it is the second, or if nobody listens yet."""
        first = self._signum is None
        if first:
            self._signum = signum
        if first and self._polled:
            _say(f"{self.name}: saving after this step; a second signal ends at once")
            threading.Thread(target=self._watch_main_thread, name="forgather-grace", daemon=True).start()
        else:
            self._end(signum, early=not self._polled)

    def leave(self) -> None:
        """Nothing is left to stop: a signal that nobody has acted on no longer ends the process."""
        self._honoured.set()

    def _watch_main_thread(self) -> None:
        while not self._honoured.wait(GRACE):
            stack = main_thread_stack()
            if not any(_SAVING in entry.filename for entry in stack):  # a save is what was asked for: save_timeout
                _say("".join(traceback.format_list(stack)).rstrip())
                self._exit(1, self.hung, self._signum, standing_at(stack))

    def _end(self, signum: int, *, early: bool) -> None:
        self._exit(128 + signum, self.at_once, signum, early)

    def _exit(self, code: int, last_words: Callable[..., int] | None, *about: Any) -> None:
        """End the process; what it has to say or write may be stuck too, and gets a few seconds."""
        told = [code]

        def speak() -> None:
            with contextlib.suppress(Exception):
                told.append(last_words(*about) if last_words is not None else code)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        thread.join(_LAST_WORDS)
        os._exit(told[-1])


def main_thread_stack() -> traceback.StackSummary:
    """Where the main thread stands, outermost call first."""
    return traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))


def standing_at(stack: traceback.StackSummary) -> str:
    """The innermost line of ours in a stack, and the innermost of all."""
    ours = [entry for entry in stack if _OURS in entry.filename]
    lines = dict.fromkeys(f"{e.filename}:{e.lineno} in {e.name}" for e in [*ours[-1:], *stack[-1:]])
    return ", inside it ".join(lines)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def watching() -> Iterator[StopSignal]:
    """Watch SIGINT, SIGTERM, SIGHUP and SIGUSR1 inside. Only in the main thread."""
    stop = StopSignal()
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    thread = threading.Thread(target=_watch, args=(read_end, stop), name="forgather-signals", daemon=True)
    thread.start()
    old_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    old_handlers = {signum: signal.signal(signum, _handled) for signum in STOP_SIGNALS}
    _leave_stopping_to_parent_in_forks()
    try:
        yield stop
    finally:
        stop.leave()
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(old_fd)
        write_end.shutdown(socket.SHUT_WR)  # closing alone says nothing while a forked worker holds a copy
        write_end.close()
        thread.join()
        read_end.close()


def _handled(signum: int, frame: FrameType | None) -> None:
    """A Python handler must exist for the C handler to write to the wake-up descriptor; the thread does the work."""


def _watch(read_end: socket.socket, stop: StopSignal) -> None:
    while data := read_end.recv(64):
        for signum in data:
            if signum in STOP_SIGNALS:
                stop.arrived(signum)


@functools.cache
def _leave_stopping_to_parent_in_forks() -> None:
    """Ctrl-C and Slurm signal the whole process group, but stopping is the work of the process that trains.

    Without this a forked data worker would write to its parent's wake-up socket, which counts as a second signal.
    SIGTERM ends a worker after a while, so that the parent can finish its step and ending a stuck worker still works.
    """
    os.register_at_fork(after_in_child=_in_fork)


def _in_fork() -> None:
    if signal.getsignal(signal.SIGTERM) is _handled:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, _linger)


def _linger(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LINGER)

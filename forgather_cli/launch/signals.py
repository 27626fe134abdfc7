"""Signals of a run: the first asks for a save and an end, the second ends the process at once.

Python runs its handlers between bytecodes of the main thread only, so a process that waits in a collective or in a long
kernel would not notice. The C handler itself writes to the interpreter's wake-up descriptor; a thread reads it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE = 25.0
"""Seconds from the first signal to a point where training can stop; schedulers kill after 30."""
_LAST_WORDS = 5.0  # seconds
_BURST = 0.03  # seconds in which one signal may arrive several times
_LINGER = 30.0  # seconds that a forked worker outlives SIGTERM


class StopSignal:
    """Whether a signal has asked this process to save and end.

    The trainer reads ``signum`` at each step, evaluation batch and generated token. Until it has done so for the first
    time there is nothing to save, and the first signal already ends the process.
    """

    def __init__(
        self,
        at_once: Callable[[int, bool], int] = lambda signum, early: 128 + signum,
        noted: Callable[[], None] = lambda: None,
        abandoned: Callable[[], bool] = lambda: False,
        echo: float = 0.0,
    ) -> None:
        """What the job around it does; the defaults are those of a process alone.

        ``at_once``: the process ends by (signum, before the first step); returns the exit code. ``noted``: a first
        signal asks for a stop; called in a thread of its own. ``abandoned``: True if a SIGTERM only clears up after
        another rank's failure, and this process is about to end anyway. ``echo``: seconds in which the same signal
        again is the same one, which others have handed on.
        """
        self._at_once, self._noted, self._abandoned, self._echo = at_once, noted, abandoned, echo
        self._signum: int | None = None
        self._last: tuple[int, float] | None = None  # what has arrived here, and when
        self.polls = 0
        """How often ``signum`` was read: it counts on as long as training does."""
        self.honoured = threading.Event()
        """All ranks are about to act on the signal, or nothing is left to stop: now it may take its time."""

    @property
    def signum(self) -> int | None:
        """Number of the first signal that arrived, None before. Reading it says that somebody listens."""
        self.polls += 1
        return self._signum

    @property
    def name(self) -> str:
        """Name of the signal that arrived, as SIGTERM; empty before."""
        return signal.Signals(self._signum).name if self._signum is not None else ""

    def arrived(self, signum: int) -> None:
        """Note a signal; end the process if it is the second, or if nobody listens yet."""
        now, last = time.monotonic(), self._last
        self._last = (signum, now)
        if last is not None and last[0] == signum and now - last[1] < self._echo:
            return
        if signum == signal.SIGTERM and self._abandoned():
            return
        if last is not None and counts_again(signum):
            self._end(signum, early=not self.polls)
        else:
            self.told(signum)

    def told(self, signum: int) -> None:
        """Note a signal that the launcher has got. It is not counted: it may also arrive here by itself."""
        if self._signum is not None:
            return
        self._signum = signum
        if not self.polls:
            self._end(signum, early=True)
        say(f"{self.name}: saving after this step; a second signal ends at once")
        threading.Thread(target=self._noted, name="forgather-grace", daemon=True).start()

    def honour(self, signum: int) -> None:
        """All ranks have agreed on a signal that at least one of them has got."""
        if self._signum is None:
            self._signum = signum
            say(f"{self.name} in another rank: saving after this step; a second signal ends at once")
        self.honoured.set()

    def _end(self, signum: int, *, early: bool) -> None:
        end_process(128 + signum, lambda: self._at_once(signum, early))


def counts_again(signum: int) -> bool:
    """False for SIGHUP, of which a closing terminal sends several: the kernel, the shell, the kernel once more."""
    return signum != signal.SIGHUP


def end_process(code: int, last_words: Callable[[], int]) -> NoReturn:
    """Exit from any thread, with the code that ``last_words`` returns.

    What they say or write may be stuck too, and gets a few seconds; then the code is ``code``.
    """
    told = [code]

    def speak() -> None:
        with contextlib.suppress(Exception):
            told.append(last_words())
            sys.stdout.flush()

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    thread.join(_LAST_WORDS)
    os._exit(told[-1])


def say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def watching(stop: StopSignal | None = None) -> Iterator[StopSignal]:
    """Watch SIGINT, SIGTERM, SIGHUP and SIGUSR1 inside. Only in the main thread."""
    stop = stop or StopSignal()
    with listening(stop.arrived, STOP_SIGNALS):
        try:
            yield stop
        finally:
            stop.honoured.set()


@contextlib.contextmanager
def listening(arrived: Callable[[int], None], signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Call ``arrived(signum)`` for each signal, in a thread of its own. Only in the main thread."""
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    thread = threading.Thread(target=_watch, args=(read_end, arrived, signals), name="forgather-signals", daemon=True)
    thread.start()
    old_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # then the run is to outlive the terminal
    heeded = [signum for signum in signals if not (nohup and signum == signal.SIGHUP)]
    old_handlers = {signum: signal.signal(signum, _handled) for signum in heeded}
    _leave_stopping_to_parent_in_forks()
    try:
        yield
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(old_fd)
        write_end.shutdown(socket.SHUT_WR)  # closing alone says nothing while a forked worker holds a copy
        write_end.close()
        thread.join()
        read_end.close()


def _handled(signum: int, frame: FrameType | None) -> None:
    """A Python handler must exist for the C handler to write to the wake-up descriptor; the thread does the work."""


def _watch(read_end: socket.socket, arrived: Callable[[int], None], signals: Sequence[signal.Signals]) -> None:
    """A burst of one signal is one: coreutils' ``timeout`` sends its own twice, to the process and to its group.

    Nobody who has seen what the first one did can be that fast.
    """
    while data := read_end.recv(64):
        time.sleep(_BURST)
        with contextlib.suppress(BlockingIOError):
            data += read_end.recv(64, socket.MSG_DONTWAIT)
        for signum in dict.fromkeys(data):
            if signum in signals:
                arrived(signum)


@functools.cache
def _leave_stopping_to_parent_in_forks() -> None:
    """Ctrl-C and Slurm signal the whole process group, but stopping is the work of the process that trains.

    Without this a forked data worker would write to its parent's wake-up socket, which counts as a second signal.
    SIGTERM ends a worker after a while, so that the parent can finish its step and ending a stuck worker still works.
    """

    def linger(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _LINGER)

    def in_fork() -> None:
        if signal.getsignal(signal.SIGTERM) is _handled:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, linger)

    os.register_at_fork(after_in_child=in_fork)

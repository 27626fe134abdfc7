"""Stop signals: the first asks training to save and stop, the second ends the process at once.

Python runs its handlers between bytecodes of the main thread only, so a process that waits in a collective or in a long
kernel would not react. Here a thread reads the wake-up descriptor, to which the C handler writes each signal's number.
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

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""By precedence, where ranks have received different ones."""
GRACE = 25.0
"""Seconds that training gets from the first signal to the end of its step; schedulers kill after 30."""
_LAST_WORDS = 5.0  # seconds
_BURST = 0.03  # seconds in which one signal may arrive several times
_LINGER = 30.0  # seconds that a forked worker outlives SIGTERM


class StopSignal:
    """Whether a signal has asked this process to save and stop.

    The trainer polls it at each step, evaluation batch and generated token. Before the first poll there is nothing to
    save, and even a first signal ends the process.
    """

    def __init__(
        self,
        end_now: Callable[[int, bool], int] = lambda signum, early: 128 + signum,
        on_request: Callable[[], None] = lambda: None,
        is_cleanup: Callable[[], bool] = lambda: False,
        echo: float = 0.0,
    ) -> None:
        """The defaults are for a process that runs alone.

        ``end_now(signum, early)`` is called before the process ends at once, and returns its exit code; ``early``: no
        step has begun. ``on_request()`` is called in a thread of its own when the first signal asks for a stop.
        ``is_cleanup()`` is True if SIGTERM was only sent because another rank has failed: this process is about to end
        anyway. ``echo``: seconds within which a repeated signal is taken for the first one, passed on by a launcher.
        """
        self._end_now, self._on_request, self._is_cleanup, self._echo = end_now, on_request, is_cleanup, echo
        self.signum: int | None = None
        """Number of the first signal received, None before."""
        self._last: tuple[int, float] | None = None  # the last signal received, and when
        self.polls = 0
        """How often training has asked; it grows as long as training makes progress."""
        self.acknowledged = threading.Event()
        """Set once all ranks act on the signal, or there is nothing left to stop: the grace period is over."""

    def poll(self) -> int | None:
        """``signum``, for training, which lives as long as it asks."""
        self.polls += 1
        return self.signum

    @property
    def name(self) -> str:
        """Its name, such as SIGTERM; empty before."""
        return signal.Signals(self.signum).name if self.signum is not None else ""

    def on_signal(self, signum: int) -> None:
        """This process has received a signal: ask for a stop, or end at once if it is the second one."""
        now, last = time.monotonic(), self._last
        self._last = (signum, now)
        if last is not None and last[0] == signum and now - last[1] < self._echo:
            return
        if signum == signal.SIGTERM and self._is_cleanup():
            return
        if last is not None and counts_again(signum):
            self._end(signum, early=not self.polls)
        else:
            self.on_stop_request(signum)

    def on_stop_request(self, signum: int) -> None:
        """Ask training to stop; end at once if it has not begun. Also called for a signal that the launcher received.

        That does not count as this process's first signal, since the same Ctrl-C may arrive here too.
        """
        if self.signum is not None:
            return
        self.signum = signum
        if not self.polls:
            self._end(signum, early=True)
        say(f"{self.name}: saving after this step; a second signal ends at once")
        threading.Thread(target=self._on_request, name="forgather-grace", daemon=True).start()

    def acknowledge(self, signum: int) -> None:
        """All ranks have agreed to stop because of a signal that at least one of them received."""
        if self.signum is None:
            self.signum = signum
            say(f"{self.name} in another rank: saving after this step; a second signal ends at once")
        self.acknowledged.set()

    def _end(self, signum: int, *, early: bool) -> None:
        end_process(128 + signum, lambda: self._end_now(signum, early))


def counts_again(signum: int) -> bool:
    """Whether receiving it a second time ends the process. Not SIGHUP: a terminal that closes sends several."""
    return signum != signal.SIGHUP


def end_process(code: int, last_words: Callable[[], int]) -> NoReturn:
    """Exit from any thread, with the code that ``last_words()`` returns, or with ``code`` if that takes too long."""
    codes = [code]

    def run() -> None:
        with contextlib.suppress(Exception):
            codes.append(last_words())
            sys.stdout.flush()

    thread = threading.Thread(target=run, daemon=True)  # it may hang, on a full disk or a closed terminal
    thread.start()
    thread.join(_LAST_WORDS)
    os._exit(codes[-1])


def say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        # in one write, with PYTHONUNBUFFERED too: other threads speak meanwhile
        print(f"{text}\n", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def watch_stop_signals(stop: StopSignal | None = None) -> Iterator[StopSignal]:
    """Inside, stop signals go to ``stop``. Only in the main thread."""
    stop = stop or StopSignal()
    with handle_signals(stop.on_signal, STOP_SIGNALS):
        try:
            yield stop
        finally:
            stop.acknowledged.set()


@contextlib.contextmanager
def handle_signals(on_signal: Callable[[int], None], signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Inside, call ``on_signal(signum)`` for each signal, in a thread of its own. Only in the main thread."""
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    thread = threading.Thread(target=_watch, args=(read_end, on_signal, signals), name="forgather-signals", daemon=True)
    thread.start()
    old_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup the run outlives its terminal
    handled = [signum for signum in signals if not (nohup and signum == signal.SIGHUP)]
    old_handlers = {signum: signal.signal(signum, _handled) for signum in handled}
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
    """Does nothing: a Python handler must exist, or the C handler does not write to the wake-up descriptor."""


def _watch(read_end: socket.socket, on_signal: Callable[[int], None], signals: Sequence[signal.Signals]) -> None:
    """Pass on each signal, and a burst of the same signal once.

    coreutils' ``timeout`` sends its signal twice, to the process and to its group. No person presses Ctrl-C twice that
    fast.
    """
    while data := read_end.recv(64):
        time.sleep(_BURST)
        with contextlib.suppress(BlockingIOError):
            data += read_end.recv(64, socket.MSG_DONTWAIT)
        for signum in dict.fromkeys(data):
            if signum in signals:
                on_signal(signum)


@functools.cache
def _leave_stopping_to_parent_in_forks() -> None:
    """Keep stop signals from forked data workers: Ctrl-C and Slurm signal the whole process group.

    A worker would otherwise write to its parent's wake-up socket, where that counts as a second signal. SIGTERM ends a
    worker after some time, so that the parent can finish its step, and a stuck worker can still be ended.
    """

    def linger(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _LINGER)

    def in_fork() -> None:
        if signal.getsignal(signal.SIGTERM) is _handled:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, linger)

    os.register_at_fork(after_in_child=in_fork)

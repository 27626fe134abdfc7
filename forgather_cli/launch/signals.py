"""Signals of a run: the first asks for a save and an end, the second ends the process at once.

A first signal that nobody acts on within ``GRACE`` seconds ends it too, and says where it stands. Python runs its
handlers between bytecodes of the main thread only, so a process that waits in a collective or in a long kernel would
not notice. The C handler itself writes to the interpreter's wake-up descriptor; a thread reads it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE = 25.0
"""Seconds from the first signal to a point where training can stop; schedulers kill after 30."""
_OURS = f"{os.sep}forgather_cli{os.sep}"
_SAVING = f"{_OURS}checkpoint{os.sep}"
_GATHER = f"{_SAVING}gather.py"
_TORCH = f"{os.sep}torch{os.sep}"
_COLLECTIVES = (f"{_TORCH}distributed{os.sep}", f"{_TORCH}nn{os.sep}parallel{os.sep}distributed.py")
_LAST_WORDS = 5.0  # seconds
_AFTER_YOU = 5.0  # seconds that a rank which waits for others leaves them to say where they stand
_BURST = 0.03  # seconds in which one signal may arrive several times
_LINGER = 30.0  # seconds that a forked worker outlives SIGTERM


@dataclass(frozen=True)
class Hooks:
    """What a StopSignal asks of the job around it. The defaults are those of a process alone."""

    at_once: Callable[[int, bool], int] = lambda signum, early: 128 + signum
    """The process ends at once by (signum, before the first step); returns the exit code."""
    hung: Callable[[int, str, bool], int] = lambda signum, where, waits: 1
    """Nobody acts on signum; the main thread stands where, and waits for other ranks or not. Returns the exit code."""
    abandoned: Callable[[], bool] = lambda: False
    """True if a SIGTERM only clears up after another rank's failure: this process is about to end anyway."""
    heard: Callable[[int], None] = lambda signum: None
    """This process has got a signal of its own."""
    saving: Callable[[], None] = lambda: None
    """The signal has to wait, since a checkpoint is being written."""
    echo: float = 0.0
    """Seconds in which the same signal again is the same one, which others have handed on."""
    others_save: Callable[[], bool] | None = None
    """True if another rank is writing a checkpoint; None where there are no others."""


class StopSignal:
    """Whether a signal has asked this process to save and end.

    The trainer reads ``signum`` at each step, evaluation batch and generated token. Until it has done so for the first
    time there is nothing to save, and the first signal already ends the process.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._signum: int | None = None
        self._last: tuple[int, float] | None = None  # what has arrived here, and when
        self.polls = 0
        """How often ``signum`` was read: it counts on as long as training does."""
        self._honoured = threading.Event()

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
        if last is not None and last[0] == signum and now - last[1] < self._hooks.echo:
            return
        if signum == signal.SIGTERM and self._hooks.abandoned():
            return
        if last is not None and counts_again(signum):
            self._end(signum, early=not self.polls)
        elif self._signum is None:
            self._first(signum)
            self._hooks.heard(signum)

    def told(self, signum: int, by: str = "") -> None:
        """Note a signal that another process has got. It is not counted: what is told may also arrive here by itself.

        ``by``: where it has arrived, as ``in rank 1``.
        """
        if self._signum is None:
            self._first(signum, by)

    def honour(self, signum: int) -> None:
        """All ranks are about to act on a signal: from now on it may take its time."""
        self._honoured.set()

    def leave(self) -> None:
        """Nothing is left to stop: a signal that nobody has acted on no longer ends the process."""
        self._honoured.set()

    def _first(self, signum: int, by: str = "") -> None:
        self._signum = signum
        if not self.polls:
            self._end(signum, early=True)
        _say(f"{self.name}{by and f' {by}'}: saving after this step; a second signal ends at once")
        threading.Thread(target=self._watch_main_thread, name="forgather-grace", daemon=True).start()

    def _watch_main_thread(self) -> None:
        assert self._signum is not None
        while not self._honoured.wait(GRACE):
            stack = main_thread_stack()
            if saves(stack):  # what was asked for; save_timeout is its limit
                self._hooks.saving()
                continue
            waits = self._hooks.others_save is not None and waits_for_others(stack)
            if waits and (self._honoured.wait(_AFTER_YOU) or (self._hooks.others_save and self._hooks.others_save())):
                continue
            if not waits:
                _say("".join(traceback.format_list(stack)).rstrip())
            signum, where = self._signum, standing_at(stack)
            end_process(1, lambda: self._hooks.hung(signum, where, waits))  # noqa: B023, the loop ends here

    def _end(self, signum: int, *, early: bool) -> None:
        end_process(128 + signum, lambda: self._hooks.at_once(signum, early))


def counts_again(signum: int) -> bool:
    """False for SIGHUP, of which a closing terminal sends several: the kernel, the shell, the kernel once more."""
    return signum != signal.SIGHUP


def end_process(code: int, last_words: Callable[[], int]) -> None:
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


def main_thread_stack() -> traceback.StackSummary:
    """Where the main thread stands, outermost call first."""
    return thread_stack(threading.main_thread())


def thread_stack(thread: threading.Thread, depth: int | None = None) -> traceback.StackSummary:
    """Where a thread stands, outermost call first; of its innermost ``depth`` calls."""
    stack = traceback.StackSummary.extract(
        traceback.walk_stack(sys._current_frames().get(thread.ident or 0)), limit=depth, lookup_lines=False
    )
    stack.reverse()
    return stack


def standing_at(stack: traceback.StackSummary) -> str:
    """The innermost line in a stack that is no library's, and the innermost of all."""
    own = [entry for entry in stack if _OURS in entry.filename or not entry.filename.startswith(_libraries())]
    lines = dict.fromkeys(f"{e.filename}:{e.lineno} in {e.name}" for e in [*own[-1:], *stack[-1:]])
    return ", inside it ".join(lines)


@functools.cache
def _libraries() -> tuple[str, ...]:
    """How names of files begin that are neither ours nor the user's."""
    return ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def is_debugged(stack: traceback.StackSummary) -> bool:
    """A person at ``breakpoint()`` may take their time."""
    return any(entry.filename.endswith(f"{os.sep}bdb.py") for entry in stack)


def saves(stack: traceback.StackSummary) -> bool:
    """True if the stack's thread reads or writes a checkpoint."""
    ours = [entry.filename for entry in stack if _SAVING in entry.filename]
    return any(not name.endswith(_GATHER) for name in ours)  # which others use too


def waits_for_others(stack: traceback.StackSummary) -> bool:
    """True if the stack's thread stands in a collective: in torch's, or in a backward, which may contain some.

    torch's code counts from where it was called last: a pipeline's schedule calls the model, which waits for nobody.
    """
    if not stack:
        return False
    inner = stack[-1]
    of_torch = itertools.takewhile(lambda entry: _TORCH in entry.filename, reversed(stack))
    in_collective = any(name in entry.filename for entry in of_torch for name in _COLLECTIVES)
    in_collective |= inner.filename.endswith(_GATHER)  # which waits until a deadline
    return in_collective or inner.name == "_engine_run_backward" or (inner.line or "").endswith(".wait()")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def watching(hooks: Hooks = Hooks()) -> Iterator[StopSignal]:
    """Watch SIGINT, SIGTERM, SIGHUP and SIGUSR1 inside. Only in the main thread."""
    stop = StopSignal(hooks)
    with listening(stop.arrived, STOP_SIGNALS):
        try:
            yield stop
        finally:
            stop.leave()


@contextlib.contextmanager
def listening(arrived: Callable[[int], None], signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Call ``arrived(signum)`` for each signal, in a thread of its own. Only in the main thread."""
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    thread = threading.Thread(target=_watch, args=(read_end, arrived, signals), name="forgather-signals", daemon=True)
    thread.start()
    old_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    heeded = [signum for signum in signals if not _is_nohup(signum)]
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


def _is_nohup(signum: int) -> bool:
    """True for the hang-up that ``nohup`` has this process ignore: the run is to outlive the terminal."""
    return signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN


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
    SIGTERM ends a worker after a while, so that the parent can finish its step and status a stuck worker still works.
    """
    os.register_at_fork(after_in_child=_in_fork)


def _in_fork() -> None:
    if signal.getsignal(signal.SIGTERM) is _handled:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, _linger)


def _linger(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LINGER)

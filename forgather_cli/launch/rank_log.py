"""What rank 0 prints and logs goes to the terminal and to ``RUN/logs/rank-0.log``, other ranks' to their log alone."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO, cast

from forgather_cli.terminal.folding import Escaped, folded, show_all_text

_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a file: the lines are lost, and there may be room again
_CONTROL = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


class LogFile(io.TextIOBase):
    """A rank's log, appended to. A full disk loses lines of it, and not the run.

    Unbuffered: what a buffer could not write would be tried again, and fail again, with every later line.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be opened."""
        self._path = path
        # through no link: a run of somebody else's may have one here
        self._file = io.FileIO(path, "a", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
        self._failing = False
        self.terminal: TextIO = sys.stderr
        """Where errors of the process went before."""

    def write(self, text: str) -> int:
        try:
            self._file.write(text.encode("utf-8", errors="replace"))
            self._failing = False
        except OSError as error:
            if not self._failing:
                with contextlib.suppress(OSError):
                    print(f"error: {self._path} cannot be written: {error.strerror}", file=self.terminal)
            self._failing = True
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class _Over:
    """What stands in place of a text stream, whose descriptor, encoding and so on it has."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


class Lasting(_Over):
    """A text stream that outlives what it writes to: a terminal that is closed, a pipe whose reader has ended.

    A run must not end for want of one, least of all when it is about to save because the terminal was closed.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_terminal = stream.isatty()  # also when it is gone: what draws a bar is not to change its ways

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, use: Callable[[], object]) -> None:
        """Once it fails the descriptor leads to nowhere: the stream's buffer, child processes and Python's exit, which
        flushes it, find no error either."""
        try:
            use()
        except OSError as error:
            if error.errno in _FULL:
                return
            if error.errno not in _GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)

    def isatty(self) -> bool:
        return self._is_terminal


class Tee(_Over):
    """A text stream that also writes whole lines to a log.

    The log gets no colours and no cursor movements, and of a line that was rewritten in place (a progress bar) only
    what stood there at its end.
    """

    def __init__(self, terminal: TextIO, log: LogFile | IO[str]) -> None:
        super().__init__(terminal)
        self.log = log
        self._line = ""

    def write(self, text: str) -> int:
        self.stream.write(text)
        *lines, rest = (self._line + text).replace("\r\n", "\n").split("\n")
        for line in lines:
            self.log.write(_visible(line) + "\n")
        self._line = rest if len(rest) < 4096 else rest[rest.rfind("\r") + 1 :]
        return len(text)

    def flush(self) -> None:
        self.stream.flush()
        self.log.flush()

    def finish(self) -> None:
        """Write the unfinished line to the log."""
        if self._line:
            self.log.write(_visible(self._line) + "\n")
            self._line = ""


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, standard output and standard error may go away, and may lack letters, without an error."""
    show_all_text()
    out, err = Lasting(sys.stdout), Lasting(sys.stderr)
    with contextlib.redirect_stdout(cast(TextIO, out)), contextlib.redirect_stderr(cast(TextIO, err)):
        yield


def _visible(line: str) -> str:
    return _CONTROL.sub("", line).rsplit("\r", 1)[-1]


class _CurrentStderr(logging.StreamHandler[Any]):
    """Logs to whatever ``sys.stderr`` is at the moment, so that a live progress bar can keep below the lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None: ...

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.exc_info else folded(text, self.stream)


@contextlib.contextmanager
def rank_log(path: Path, *, terminal: bool = True) -> Iterator[LogFile]:
    """Copy standard output, standard error and the log to ``path`` (appended); SIGUSR2 prints stacks to it.

    The log is ours from INFO and other libraries' from WARNING on, which go to standard error.

    Without ``terminal`` nothing of them goes anywhere else, what C code and child processes write included.
    """
    with contextlib.closing(LogFile(path)) as log, _copied(log) if terminal else _moved(log):
        handler = _CurrentStderr()
        handler.setFormatter(Escaped("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        logging.getLogger().addHandler(handler)
        logging.getLogger("forgather_cli").setLevel(logging.INFO)
        faulthandler.register(signal.SIGUSR2, file=log, all_threads=True)
        try:
            yield log
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            logging.getLogger().removeHandler(handler)


@contextlib.contextmanager
def _copied(log: LogFile) -> Iterator[None]:
    out, err = Tee(sys.stdout, log), Tee(sys.stderr, log)
    with contextlib.redirect_stdout(cast(TextIO, out)), contextlib.redirect_stderr(cast(TextIO, err)):
        try:
            yield
        finally:
            out.finish()
            err.finish()


@contextlib.contextmanager
def _moved(log: LogFile) -> Iterator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    log.terminal = os.fdopen(os.dup(kept[1]), "w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    stream = cast(TextIO, log)
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            yield
        finally:
            for descriptor, old in zip((1, 2), kept, strict=True):
                os.dup2(old, descriptor)
                os.close(old)
            log.terminal.close()
            log.terminal = sys.__stderr__ or sys.stderr

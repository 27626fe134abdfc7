"""Processes that encode pieces of a corpus beside this one.

They are started as new interpreters that import no torch: a fork would copy its threads' locks, and the tokenizer
library's, and ``multiprocessing``'s spawn would run the user's script again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forgather_cli.data.cache import InterruptedBuildError
from forgather_cli.data.text import read as reading
from forgather_cli.data.text.corpus import Piece
from forgather_cli.data.text.encode import Encoded, Encoder
from forgather_cli.data.tokens import SPLITS, Split
from forgather_cli.errors import DataError

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class TokenizerWorkers:
    """``num`` processes that encode pieces into files of a directory. Leaving the context ends them."""

    def __init__(self, num: int, encoder: Encoder, pieces: Sequence[Piece], directory: Path) -> None:
        # names of our own: processes of a builder that was killed may not have noticed yet
        self._stem, self._num_pieces = directory / f"pieces-{uuid.uuid4().hex}", len(pieces)
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}
        try:
            for _ in range(num):
                connection, process = _start()
                self._workers[connection] = process
            for worker in self._workers:
                self._send(worker, (encoder, list(pieces), self._stem, reading.PIECE))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TokenizerWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they do."""
        for connection, process in self._workers.items():
            process.kill()
            process.wait()
            connection.close()
        self._workers = {}

    def encode(self, first: int) -> Iterator[int | tuple[Encoded, dict[Split, Path]]]:
        """Encode the pieces from number ``first`` on: what became of each, in their order, with the files that hold
        its tokens; and in between bytes of the source that were done. Raises DataError."""
        made: dict[int, Encoded] = {}
        waiting = iter(range(first, self._num_pieces))
        idle = [worker for _ in range(2) for worker in self._workers]  # two at a time: none waits for its next
        turn = first
        while turn < self._num_pieces:
            while idle and (number := next(waiting, None)) is not None:
                self._send(idle.pop(0), number)
            for worker in wait(list(self._workers)):
                assert isinstance(worker, Connection)
                number, value = self._receive(worker)
                if number is None:
                    yield value
                    continue
                made[number] = value
                idle.append(worker)
            while turn in made:
                yield made.pop(turn), _piece_files(self._stem, turn)
                turn += 1

    def _send(self, worker: Connection, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reported when its answer is read
            worker.send(message)

    def _receive(self, worker: Connection) -> tuple[int | None, Any]:
        try:
            kind, number, value = worker.recv()
        except (EOFError, ConnectionResetError) as error:
            code = self._workers[worker].wait()
            how = f"signal {-code}, perhaps for lack of memory" if code < 0 else f"exit code {code}"
            raise InterruptedBuildError(
                f"data.tokenize_processes: a process that tokenizes has ended ({how}); start again, which goes on "
                "where it was, or set a smaller number"
            ) from error
        if kind == "failed":
            raise value
        return (None if kind == "bytes" else number), value


def _piece_files(stem: Path, number: int) -> dict[Split, Path]:
    """Where a process writes the tokens of a piece."""
    return {split: stem.with_name(f"{stem.name}-{number}.{split}") for split in SPLITS}


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = multiprocessing.Pipe()
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C is for the process that ends them
        )
    return ours, process


# ---------------------------------------------------------------------------------------------------- in such a process


def serve(descriptor: int) -> None:
    """Encode the pieces that the other end of a connection asks for until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def end_with_parent() -> None:  # a piece may take half a minute, for nobody if the parent was killed
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        encoder, pieces, stem, reading.PIECE = connection.recv()
        while True:
            number = connection.recv()
            connection.send(_answer(connection, encoder, pieces[number], stem, number))


def _answer(connection: Connection, encoder: Encoder, piece: Piece, stem: Path, number: int) -> tuple[str, int, Any]:
    try:
        with contextlib.ExitStack() as stack:
            files = _piece_files(stem, number)
            outputs = {split: stack.enter_context(path.open("wb")) for split, path in files.items()}
            made = encoder.encode(piece, outputs, lambda count: connection.send(("bytes", number, count)))
        return "done", number, made
    except (BrokenPipeError, ConnectionResetError):
        raise
    except (DataError, OSError) as error:
        return "failed", number, error
    except Exception:  # the edge of the process
        return "failed", number, RuntimeError(f"in a process that tokenizes:\n{traceback.format_exc()}")

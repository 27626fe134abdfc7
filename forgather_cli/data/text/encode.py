"""Documents to tokens: a piece of a corpus at a time, in this process or in others beside it.

Those are started as new interpreters that import no torch: a fork would copy its threads' locks, and the tokenizer
library's, and ``multiprocessing``'s spawn would run the user's script again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.cache import InterruptedBuildError
from forgather_cli.data.text import read as reading
from forgather_cli.data.text.corpus import CorpusPiece, Documents, is_held_out
from forgather_cli.data.text.read import Damage, chunks
from forgather_cli.data.text.tokenizer import Tokenizer, unspelled
from forgather_cli.data.tokens import SPLITS, Split
from forgather_cli.errors import DataError

_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
Outputs = Mapping[Split, BinaryIO]
Report = Callable[[int], None]
"""Called with bytes of the source that are done."""
Ints = NDArray[np.int64]


@dataclass
class EncodedPiece:
    """What is known of a piece besides its tokens, which are in the files of its splits."""

    lengths: dict[Split, list[Ints]] = field(default_factory=lambda: {"train": [], "eval": []})
    """Tokens of each document, those around it included."""
    num_chars: int = 0
    num_spelled: int = 0
    """Tokens before documents that stand in their text already, so that they were not written again."""
    damage: Damage = field(default_factory=Damage)
    assumed_later: bool = False
    """Its first document is held out, which is right only if a piece before it has documents: the very first one of a
    corpus always trains."""


@dataclass(frozen=True)
class DocumentEncoder:
    """How the documents of a corpus become tokens. Travels to other processes."""

    corpus: Documents
    tokenizer: Tokenizer
    around: tuple[tuple[int, ...], tuple[int, ...]]
    """Tokens before and behind each document."""
    dtype: str

    def encode(self, piece: CorpusPiece, outputs: Outputs, report: Report, *, is_first: bool = False) -> EncodedPiece:
        """Write the tokens of a piece. ``is_first``: no document is before."""
        made = EncodedPiece()
        for chunk in chunks(self.corpus.read(piece, made.damage), report):
            arrays = self.tokenizer.encode_arrays([document.text for document in chunk])
            taken: dict[Split, list[NDArray[Any]]] = {"train": [], "eval": []}
            for document, ids in zip(chunk, arrays, strict=True):
                first_here = made.num_chars == 0
                held_out = piece.is_eval or is_held_out(self.corpus, document, is_first=is_first and first_here)
                made.assumed_later |= held_out and first_here and not piece.is_eval and self.corpus.eval_fraction < 1
                made.num_chars += len(document.text)
                taken["eval" if held_out else "train"].append(ids)
            for split in SPLITS:
                self.write(taken[split], split, outputs[split], made)
        return made

    def write(self, documents: Sequence[NDArray[Any]], split: Split, output: BinaryIO, made: EncodedPiece) -> None:
        """Append documents, each with the tokens around it, and note them in ``made``."""
        out, lengths = joined(documents, self.around, self.dtype)
        output.write(out.data)
        made.lengths[split].append(lengths)
        made.num_spelled += sum(map(len, documents)) + len(documents) * sum(map(len, self.around)) - len(out)


def joined(
    documents: Sequence[NDArray[Any]], around: tuple[tuple[int, ...], tuple[int, ...]], dtype: str
) -> tuple[NDArray[Any], Ints]:
    """Documents one after the other, each with the tokens before it that it does not spell, and those behind it; and
    their lengths with these."""
    before, behind = around
    begins = [unspelled(before, ids) for ids in documents]
    lengths = np.array([len(a) + len(ids) + len(behind) for a, ids in zip(begins, documents, strict=True)], np.int64)
    out = np.empty(int(lengths.sum()), dtype)
    start = 0
    for begin, ids in zip(begins, documents, strict=True):
        for part in (begin, ids, behind):
            out[start : start + len(part)] = part
            start += len(part)
    return out, lengths


# ------------------------------------------------------------------------------------------------ processes that encode


class TokenizerWorkers:
    """``num`` processes that encode pieces into files of a directory. Leaving the context ends them."""

    def __init__(self, num: int, encoder: DocumentEncoder, pieces: Sequence[CorpusPiece], directory: Path) -> None:
        # names of our own: processes of a builder that was killed may not have noticed yet
        self._stem, self._num_pieces = directory / f"pieces-{uuid.uuid4().hex}", len(pieces)
        self._threads = ThreadPoolExecutor(num)
        """Each waits for the answer of one process."""
        self._idle: queue.SimpleQueue[tuple[Connection, subprocess.Popen[bytes]]] = queue.SimpleQueue()
        self._workers: list[tuple[Connection, subprocess.Popen[bytes]]] = []
        try:
            for _ in range(num):
                self._workers.append(_start())
            for connection, process in self._workers:
                with contextlib.suppress(ConnectionError):  # reported when it is asked for a piece
                    connection.send((encoder, list(pieces), self._stem, reading.PIECE))
                self._idle.put((connection, process))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TokenizerWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they do."""
        for _, process in self._workers:
            process.kill()
            process.wait()
        self._threads.shutdown(cancel_futures=True)
        for connection, _ in self._workers:
            connection.close()
        self._workers = []

    def encode(self, first: int, report: Report) -> Iterator[tuple[EncodedPiece, dict[Split, Path]]]:
        """Encode the pieces from number ``first`` on: what became of each, in their order, with the files that hold
        its tokens. ``report`` is called from threads. Raises DataError."""

        def ask(number: int) -> tuple[EncodedPiece, dict[Split, Path]]:
            connection, process = self._idle.get()
            try:
                connection.send(number)
                while (answer := connection.recv())[0] == "bytes":
                    report(answer[1])
            except (EOFError, ConnectionError) as error:
                code = process.wait()
                how = f"signal {-code}, perhaps for lack of memory" if code < 0 else f"exit code {code}"
                raise InterruptedBuildError(
                    f"data.tokenize_processes: a process that tokenizes has ended ({how}); start again, which "
                    "continues where it was, or set a smaller number"
                ) from error
            finally:
                self._idle.put((connection, process))
            kind, value = answer
            if kind == "failed":
                raise value
            return value, _piece_files(self._stem, number)

        return self._threads.map(ask, range(first, self._num_pieces))


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


def serve(descriptor: int) -> None:
    """In such a process: encode the pieces that the other end of a connection asks for until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def end_with_parent() -> None:  # a piece may take half a minute, for nobody if the parent was killed
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        encoder, pieces, stem, reading.PIECE = connection.recv()
        while True:
            number = connection.recv()
            try:
                with contextlib.ExitStack() as stack:
                    files = _piece_files(stem, number)
                    outputs = {split: stack.enter_context(path.open("wb")) for split, path in files.items()}
                    made = encoder.encode(pieces[number], outputs, lambda count: connection.send(("bytes", count)))
                answer: tuple[str, Any] = "done", made
            except ConnectionError:
                raise
            except (DataError, OSError) as error:
                answer = "failed", error
            except Exception:  # the edge of the process
                answer = "failed", RuntimeError(f"in a process that tokenizes:\n{traceback.format_exc()}")
            connection.send(answer)

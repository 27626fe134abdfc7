"""Files and directories that survive a crash: hashed as they are written, synced, renamed into place. No torch here."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from forgather_cli.documents.regular_files import open_file
from forgather_cli.errors import SetupError

CHUNK_BYTES = 8 << 20
"""Unit of hashing and writing; small enough to be in a cache between the two."""

_TEMPORARY = re.compile(r"\.(?P<kind>tmp|trash|replaced)-(?P<name>.+)-\d+\.\d+$")
_serial = itertools.count()

Range = tuple[int, int, str]
"""[start, stop) of a file in bytes and the SHA-256 of it in hex."""

T = TypeVar("T")
Pieces = Generator[None, None, T]
"""Work that stops between its pieces, and that any thread can go on with; T is its result."""


def at_once(work: Pieces[T]) -> T:
    """Do all pieces; returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def write_ranges(path: Path, parts: Iterable[tuple[int, Any]]) -> Pieces[list[Range]]:
    """Write ``parts`` into ``path`` and sync it. Other ranks may write other ranges of the same file.

    ``parts`` are (offset, bytes-like of one-byte items), ascending without overlap. Returns one range per contiguous
    run, so a file with one writer has one range and its hash is what ``sha256sum`` prints. Raises OSError.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        ranges = yield from _write_runs(fd, parts)
        os.fsync(fd)
    finally:
        os.close(fd)
    return ranges


def _write_runs(fd: int, parts: Iterable[tuple[int, Any]]) -> Pieces[list[Range]]:
    ranges: list[Range] = []
    digest, start, stop = hashlib.sha256(), 0, 0
    for offset, data in parts:
        if offset != stop:
            if stop > start:
                ranges.append((start, stop, digest.hexdigest()))
            digest, start, stop = hashlib.sha256(), offset, offset
        view = memoryview(data)
        for begin in range(0, len(view), CHUNK_BYTES):
            yield
            chunk = view[begin : begin + CHUNK_BYTES]
            digest.update(chunk)
            while chunk:
                written = os.pwrite(fd, chunk, stop)
                chunk, stop = chunk[written:], stop + written
    if stop > start:
        ranges.append((start, stop, digest.hexdigest()))
    return ranges


def write_file(path: Path, content: bytes) -> list[Range]:
    """Write a whole file and sync it; returns its one range (none if it is empty)."""
    return at_once(write_ranges(path, [(0, content)]))


def replace_file(path: Path, content: bytes, temporary: Path) -> None:
    """Put ``content`` into ``path`` at once: whoever reads sees the old file or the new one. Same file system."""
    write_file(temporary, content)
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names inside ``path`` durable, where the file system can (some network ones answer EINVAL)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make a file durable that somebody else wrote."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refresh(path: Path) -> None:
    """Make this host see what others have written: a network file system asks its server when a file is opened, and
    may otherwise answer with the size it had seconds ago. What is missing is left to who looks.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDONLY))


def hash_range(
    path: Path,
    start: int,
    stop: int,
    on_bytes: Callable[[int], None] = lambda count: None,
    look: Callable[[int, memoryview], None] = lambda offset, content: None,
) -> str:
    """SHA-256 of bytes [start, stop), in hex. Raises OSError; a file that ends before ``stop`` gives another hash.

    ``on_bytes`` is called with the number of each few bytes that are read, ``look`` with their place and themselves.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(CHUNK_BYTES, max(stop - start, 1))))
    with open_file(path) as file:
        file.seek(start)
        while start < stop and (count := file.readinto(buffer[: stop - start])):
            digest.update(buffer[:count])
            look(start, buffer[:count])
            start += count
            on_bytes(count)
    return digest.hexdigest()


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory; files that vanish meanwhile count nothing."""
    size = 0
    if not path.is_dir():
        with contextlib.suppress(OSError):
            size = os.lstat(path).st_size
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def remove(path: Path) -> None:
    """Remove a file or a directory with everything in it; what is gone already is fine. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sibling(path: Path, kind: str) -> Path:
    """A new name beside ``path`` that is not a checkpoint's: ``tmp`` (being written), ``trash`` (being deleted) or
    ``replaced`` (a checkpoint whose successor is about to take its name).
    """
    return path.with_name(f".{kind}-{path.name}-{os.getpid()}.{next(_serial)}")


def siblings(directory: Path) -> list[tuple[Path, str, Path]]:
    """What ``sibling`` has named in a directory: (path, kind, the path it is a sibling of)."""
    found = [(path, _TEMPORARY.match(path.name)) for path in sorted(directory.iterdir())]
    return [(path, match["kind"], path.with_name(match["name"])) for path, match in found if match]


@contextlib.contextmanager
def new_directory(target: Path, num_bytes: int = 0) -> Iterator[Path]:
    """A temporary sibling of ``target`` to fill; at the end it is synced and takes the name.

    Whatever ends the block otherwise (an error, a full disk, Ctrl-C, SIGTERM, SIGHUP) leaves nothing, parents that were
    made for it included; what SIGKILL or a power cut leaves goes with the next call for the same ``target``. Raises
    SetupError where ``target`` exists, where fewer than ``num_bytes`` are free, or for an OSError of the block.
    """
    check_absent(target)
    with contextlib.suppress(OSError):  # what killed processes have left of the same target; the living lock theirs
        for path, kind, whose in siblings(target.absolute().parent):
            if (kind, whose.name) == ("tmp", target.name):
                with _lock(path) as mine:
                    if mine:
                        remove(path)
    _check(target, num_bytes)
    target = target.absolute()
    made = [parent for parent in target.parents if not parent.exists()]  # nearest first
    temporary = sibling(target, "tmp")
    try:
        with unwinding():
            temporary.mkdir(parents=True)
            with _lock(temporary):
                yield temporary
                _publish(temporary, target)
    except OSError as error:
        what = f"{error.strerror or error}" + (f": {Path(str(error.filename)).name}" if error.filename else "")
        raise SetupError(f"{target}: cannot be written ({what}); nothing was left behind") from error
    finally:
        remove(temporary)  # gone already where it was published
        for parent in made:
            with contextlib.suppress(OSError):  # not empty: what was written is in it
                parent.rmdir()


def check_absent(target: Path) -> None:
    """Raise SetupError if there is anything at ``target``."""
    if os.path.lexists(target):
        raise SetupError(f"{target}: exists already, and is not replaced; give a new directory, or remove it")


def _check(target: Path, num_bytes: int) -> None:
    parent = next(parent for parent in target.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise SetupError(f"{target}: cannot be made, since {parent} is no directory that you may write to")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise SetupError(
            f"{target}: needs {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free on its disk; make room, or "
            "choose another disk"
        )


def _publish(temporary: Path, target: Path) -> None:
    for path in [*temporary.rglob("*"), temporary]:
        if path.is_dir():
            sync_directory(path)
        else:
            sync_file(path)
    check_absent(target)  # rename() would replace an empty directory
    temporary.rename(target)
    sync_directory(target.parent)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[bool]:
    """Hold a directory while this process lives; False if another one holds it, or its file system locks none."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = True
    except OSError:
        mine = False
    try:
        yield mine
    finally:
        os.close(fd)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process through its ``finally`` blocks, as Ctrl-C does; but not a rank, which has its
    own way to stop.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadly = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    before = {number: signal.signal(number, leave) for number in deadly}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

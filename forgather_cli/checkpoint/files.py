"""Files that survive a crash: hashed while they are written, synced, renamed into place. No torch here."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forgather_cli.input_files import open_file

CHUNK_BYTES = 8 << 20
"""Unit of hashing and writing; small enough to be in a cache between the two."""

Range = tuple[int, int, str]
"""[start, stop) of a file in bytes and the SHA-256 of it in hex."""

Check = Callable[[], None]
"""Called between chunks; raises to give up."""


def no_check() -> None: ...


def write_ranges(path: Path, parts: Iterable[tuple[int, Any]], check: Check = no_check) -> list[Range]:
    """Write ``parts`` into ``path`` and sync it. Other ranks may write other ranges of the same file.

    ``parts`` are (offset, bytes-like of one-byte items), ascending without overlap. Returns one range per contiguous
    run, so a file with one writer has one range and its hash is what ``sha256sum`` prints. Raises OSError.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        ranges = _write_runs(fd, parts, check)
        os.fsync(fd)
    finally:
        os.close(fd)
    return ranges


def _write_runs(fd: int, parts: Iterable[tuple[int, Any]], check: Check) -> list[Range]:
    ranges: list[Range] = []
    digest, start, stop = hashlib.sha256(), 0, 0
    for offset, data in parts:
        if offset != stop:
            if stop > start:
                ranges.append((start, stop, digest.hexdigest()))
            digest, start, stop = hashlib.sha256(), offset, offset
        view = memoryview(data)
        for begin in range(0, len(view), CHUNK_BYTES):
            check()
            chunk = view[begin : begin + CHUNK_BYTES]
            digest.update(chunk)
            _write_all(fd, chunk, stop)
            stop += len(chunk)
    if stop > start:
        ranges.append((start, stop, digest.hexdigest()))
    return ranges


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def write_file(path: Path, content: bytes) -> list[Range]:
    """Write a whole file and sync it; returns its one range (none if it is empty)."""
    return write_ranges(path, [(0, content)])


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


def hash_range(path: Path, start: int, stop: int) -> str:
    """SHA-256 of bytes [start, stop), in hex. Raises OSError; a file that ends before ``stop`` gives another hash."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(CHUNK_BYTES, max(stop - start, 1))))
    with open_file(path) as file:
        file.seek(start)
        while start < stop and (count := file.readinto(buffer[: stop - start])):
            digest.update(buffer[:count])
            start += count
    return digest.hexdigest()


def size_of(path: Path) -> int:
    """Bytes of all files below a directory; files that vanish meanwhile count nothing."""
    size = 0
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

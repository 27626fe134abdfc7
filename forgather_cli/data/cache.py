"""The data cache on disk: directories that are built once, by one process, and appear whole or not at all.

    <cache_dir>/content/<stamp>.json      paths, inodes, sizes and times of a corpus -> hash of its content
    <cache_dir>/tokenizers/<key>/         trained tokenizers
    <cache_dir>/tokens/<key>/             tokenized corpora
    <cache_dir>/indexes/<key>/            document borders of token files
    <cache_dir>/packings/<key>/           index tables of best_fit and pad
    <cache_dir>/datasets/                 what the datasets library makes of local files
    <cache_dir>/locks/

Every directory holds ``meta.json``, written last, with the size of each other file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from forgather_cli.checkpoint.files import sync_directory, sync_file
from forgather_cli.errors import DataError
from forgather_cli.input_files import write_whole

log = logging.getLogger(__name__)

Meta = dict[str, Any]
_SILENCE = 3.0  # seconds that a wait for another process may take without a word
_REMINDER = 60.0  # seconds between two later ones
_LOOK = 0.05  # seconds
_PATIENCE = 10.0  # seconds that a rank leaves a cache to its node's first
_ABANDONED = 14 * 86400.0  # seconds without a change after which nobody is still building


Progress = Callable[[int, int], None]
"""``progress(done, total)`` in bytes of the source, while a cache is built."""


class Meter:
    """Adds up bytes and calls ``progress`` some 200 times in all: a bar needs no more, and documents may be small."""

    def __init__(self, progress: Progress | None, total: int, done: int = 0) -> None:
        self._progress, self._total, self._done = progress, total, done
        self._told = 0

    def add(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        if self._progress is not None and self._done - self._told >= self._total // 200:
            self._told = self._done
            self._progress(self._done, self._total)

    def end(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total)


class InterruptedBuildError(DataError):
    """A build has stopped half-way and can be resumed: what it has done stays."""


def cache_root(cache_dir: str | None) -> Path:
    """``data.cache_dir``, or ``$XDG_CACHE_HOME/forgather``, or ``~/.cache/forgather``."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forgather"


def digest(value: Any) -> str:
    """32 hex digits that stand for a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def find(root: Path, kind: str, key: str) -> Meta | None:
    """The meta data of a complete directory, None if there is none or a file's size is not what was written."""
    directory = root / kind / key
    try:
        meta: Meta = json.loads((directory / "meta.json").read_text())
        sizes = meta["files"]
        whole = all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if whole else None


def build_once(
    root: Path, kind: str, key: str, write: Callable[[Path], Meta], *, goes_on: bool = False
) -> tuple[Path, Meta]:
    """The directory ``<root>/<kind>/<key>`` and its meta data, made by ``write(temporary directory)`` if it is missing.

    Other processes that want it wait for the one that builds. One that is killed leaves a temporary directory, which
    the next removes, or with ``goes_on`` hands to ``write`` as it is. Raises DataError when the disk refuses.
    """
    directory = root / kind / key
    if (meta := find(root, kind, key)) is not None:
        return directory, meta
    with _disk_errors(root):
        _give_way(root, f"{kind}-{key}", lambda: find(root, kind, key) is not None)
    with _disk_errors(root), _locked(root, f"{kind}-{key}"):
        if (meta := find(root, kind, key)) is None:
            meta = _build(directory, write, goes_on=goes_on)
    return directory, meta


def _build(directory: Path, write: Callable[[Path], Meta], *, goes_on: bool) -> Meta:
    temporary = directory.parent / f".tmp-{directory.name}"
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for path in temporary.parent.glob(".tmp-*"):
        # left by builds that were killed long ago and never resumed: their source has changed since
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
    if not goes_on:
        shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(exist_ok=True)
    try:
        meta = write(temporary)
        meta["files"] = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
        for path in temporary.iterdir():
            sync_file(path)
        sync_directory(temporary)
        if directory.exists():  # damaged, or find() would have returned it
            shutil.rmtree(directory)
        temporary.rename(directory)
        sync_directory(directory.parent)
        return meta
    except BaseException as error:
        is_interruption = isinstance(error, InterruptedBuildError) or not isinstance(error, Exception)
        if not (goes_on and is_interruption):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def remember_once(root: Path, path: Path, make: Callable[[], Meta]) -> Meta:
    """The value in a small JSON file, made by one process if it is missing, and written atomically.

    Raises DataError when the disk refuses.
    """
    if (known := recall(path)) is not None:
        return known
    with _disk_errors(root), _locked(root, f"{path.parent.name}-{path.stem}"):
        if (known := recall(path)) is None:
            known = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(known))
    return known


def recall(path: Path) -> Meta | None:
    """What ``remember_once`` wrote, None if there is nothing that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _give_way(root: Path, name: str, is_done: Callable[[], bool]) -> None:
    """On a rank that is not its node's first: let that one take the lock, since what rank 0 does is shown on the
    terminal. After a while a rank does it itself."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and not is_done():
        with _lock_file(root, name) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others that look are not in the way
            except BlockingIOError:
                return
        time.sleep(0.02)


@contextlib.contextmanager
def _locked(root: Path, name: str) -> Iterator[None]:
    """Hold an flock; the kernel drops it when the process dies. The file stays, since removing it would race.

    It says who holds it, for those who wait and tell so.
    """
    with _lock_file(root, name) as handle:
        start, silence = time.monotonic(), _SILENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - start
            if waited > silence:
                holder = Path(handle.name).read_text().strip() or "another process"
                log.warning(
                    "waiting for %s, which builds %s in the data cache %s, for %.0f s now", holder, name, root, waited
                )
                silence = waited + _REMINDER
            time.sleep(_LOOK)
        handle.truncate(0)
        handle.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        handle.flush()
        yield


def _lock_file(root: Path, name: str) -> IO[str]:
    path = root / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a")


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or root
        raise DataError(
            f"data.cache_dir: cannot write the data cache ({error.strerror}: {where}); "
            f"set data.cache_dir to a directory with free space that you may write to"
        ) from error

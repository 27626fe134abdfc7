"""The data cache on disk: directories that are built once, by one process, and appear whole or not at all.

    <cache_dir>/content/<stamp>.json      paths, inodes, sizes and times of a corpus -> hash of its content
    <cache_dir>/tokenizers/<key>/         trained tokenizers
    <cache_dir>/tokens/<key>/             tokenized corpora
    <cache_dir>/indexes/<key>/            document borders of token files
    <cache_dir>/packings/<key>/           index tables of best_fit and pad
    <cache_dir>/datasets/                 what the datasets library makes of local files
    <cache_dir>/references/<key>/         what a model said of pairs before the first step (preference/reference.py)
    <cache_dir>/gguf/<key>/               files that llama.cpp serves, made of models (serve/command.py)
    <cache_dir>/locks/<kind>-<key>.lock   held while that is built
    <cache_dir>/locks/<kind>-<key>.use    held, shared, by processes that use it; its time is that of the last use

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
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forgather_cli.checkpoint.files import remove, size_of, sync_directory, sync_file
from forgather_cli.documents.regular_files import write_whole
from forgather_cli.errors import DataError

log = logging.getLogger(__name__)

Meta = dict[str, Any]
KINDS = ("tokens", "packings", "indexes", "tokenizers", "datasets", "references", "gguf", "content")
_SILENCE = 3.0  # seconds of waiting for another process before the first message
_REMINDER = 60.0  # seconds between later messages
_LOOK = 0.05  # seconds between two attempts
_PATIENCE = 10.0  # seconds that a rank leaves a cache to its node's first
_ABANDONED = 14 * 86400.0  # seconds without a change after which nobody is still building

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in bytes of the source, while a cache is built."""


_in_use: dict[Path, int] = {}
"""Descriptors of the ``.use`` files that this process holds until its end."""


class Meter:
    """Adds up bytes, from any thread, and calls ``progress`` some 200 times in all: a bar needs no more, and documents
    may be small."""

    def __init__(self, progress: Progress | None, total: int, done: int = 0) -> None:
        self._progress, self._total, self._done = progress, total, done
        self._told = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done = min(self._done + count, self._total)
            if self._progress is not None and self._done - self._told >= self._total // 200:
                self._told = self._done
                self._progress(self._done, self._total)

    def end(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total)


class InterruptedBuildError(DataError):
    """A build has stopped half-way and can be resumed: what it has done stays."""


class NotCached(Exception):
    """What a cache lacks that is not to be built."""


def digest(value: Any) -> str:
    """32 hex digits that stand for a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Cache:
    """The data cache in ``directory`` (None: ``$XDG_CACHE_HOME/forgather``, or ``~/.cache/forgather``).

    ``progress`` is called while something is built. Without ``build`` nothing is built or written, nor text
    read: what is missing raises NotCached. The methods raise DataError for errors of the disk. What they return is kept
    from ``remove_entry`` until this process, and those that it forks, have ended.
    """

    def __init__(self, directory: str | Path | None, progress: Progress | None = None, *, build: bool = True) -> None:
        if directory is None:
            base = os.environ.get("XDG_CACHE_HOME")
            directory = (Path(base) if base else Path.home() / ".cache") / "forgather"
        self.root, self.progress, self._may_build = Path(directory).expanduser(), progress, build
        self.files: dict[str, str] = {}
        """Of each file whose content was asked for its hash, empty where that is not known, by path."""

    def use(self, kind: str, key: str) -> None:
        """Keep an entry, which may have to be built yet, from ``remove_entry``, and remember the time."""
        path = self.root / "locks" / f"{kind}-{key}.use"
        if path in _in_use:
            return
        with contextlib.suppress(OSError):  # a cache that we cannot write to
            path.parent.mkdir(parents=True, exist_ok=True)
            _in_use[path] = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(_in_use[path], fcntl.LOCK_SH)
            os.utime(_in_use[path])

    def find(self, kind: str, key: str) -> Meta | None:
        """The meta data of a complete directory, None if there is none or a file's size is not what was written."""
        directory = self.root / kind / key
        try:
            meta: Meta = json.loads((directory / "meta.json").read_text())
            whole = all((directory / name).stat().st_size == size for name, size in meta["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return meta if whole else None

    def build_once(
        self, kind: str, key: str, write: Callable[[Path], Meta], *, resumable: bool = False
    ) -> tuple[Path, Meta]:
        """The directory ``<root>/<kind>/<key>`` and its meta data, made by ``write(temporary directory)`` if missing.

        Other processes that want it wait for the one that builds. A killed build leaves its temporary directory: the
        next one removes it, or with ``resumable`` passes it to ``write`` as it is.
        """
        directory = self.root / kind / key

        def build() -> Meta:
            return _build(directory, write, resumable=resumable)

        return directory, self._once(kind, key, lambda: self.find(kind, key), build, give_way=True)

    def remember_once(self, kind: str, key: str, make: Callable[[], Meta]) -> Meta:
        """The value in the small JSON file ``<root>/<kind>/<key>.json``, made by one process if it is missing."""
        path = self.root / kind / f"{key}.json"

        def find() -> Meta | None:
            try:
                value = json.loads(path.read_text())
            except (OSError, ValueError):
                return None
            return value if isinstance(value, dict) else None

        def build() -> Meta:
            made = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(made))
            return made

        return self._once(kind, key, find, build)

    def _once(
        self, kind: str, key: str, find: Callable[[], Meta | None], build: Callable[[], Meta], *, give_way: bool = False
    ) -> Meta:
        """``find()``, or if that is None ``build()``, in one process at a time."""
        name = f"{kind}-{key}"
        if self._may_build:
            self.use(kind, key)
        if (found := find()) is not None:
            return found
        if not self._may_build:
            raise NotCached(name)
        path = self.root / "locks" / f"{name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if give_way and os.environ.get("LOCAL_RANK", "0") != "0":
                _give_way(path, lambda: find() is not None)
            with _locked(path, f"{name} in the data cache {self.root}"):
                return find() or build()
        except OSError as error:
            where = error.filename or self.root
            raise DataError(
                f"data.cache_dir: cannot write the data cache ({error.strerror}: {where}); "
                f"set data.cache_dir to a directory with free space that you may write to"
            ) from error


def _build(directory: Path, write: Callable[[Path], Meta], *, resumable: bool) -> Meta:
    temporary = directory.parent / f".tmp-{directory.name}"
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for path in temporary.parent.glob(".tmp-*"):
        # left by builds that were killed long ago and never resumed: their source has changed since
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
    if not resumable:
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
        if not (resumable and is_interruption):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _give_way(path: Path, is_done: Callable[[], bool]) -> None:
    """On a rank that is not its node's first: let the first take the lock, so that rank 0 builds and its progress is on
    the terminal. After ``_PATIENCE`` a rank goes ahead itself."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and not is_done():
        with path.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others that look are not in the way
            except BlockingIOError:
                return
        time.sleep(0.02)


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold an flock; the kernel drops it when the process dies. The file stays, since removing it would race.

    Its content is the holder, for the messages of processes that wait.
    """
    with path.open("a") as handle:
        start, silence = time.monotonic(), _SILENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - start
            if waited > silence:
                holder = path.read_text().strip() or "another process"
                log.warning("waiting for %s, which builds %s, for %.0f s now", holder, what, waited)
                silence = waited + _REMINDER
            time.sleep(_LOOK)
        handle.truncate(0)
        handle.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        handle.flush()
        yield


# ---------------------------------------------------------------------------------------------------- what lies there


@dataclass(frozen=True)
class CacheEntry:
    """One directory, or small file, of a cache."""

    kind: str
    """One of ``KINDS``."""
    path: Path
    meta: Meta
    """Empty for what has none: content hashes, datasets, and what a killed build has left."""
    size_bytes: int
    last_used: float
    """Seconds since the epoch."""
    in_use: bool
    """Read or built by a process now, or another user's."""

    @property
    def is_unfinished(self) -> bool:
        """True for what a build, perhaps one that goes on, has not finished."""
        return self.path.name.startswith(".tmp-")

    @property
    def name(self) -> str:
        """Of its locks."""
        return f"{self.kind}-{self.path.name.removeprefix('.tmp-').removesuffix('.json')}"


def entries(root: Path) -> list[CacheEntry]:
    """What a cache holds, the last used first. Files that are none of ours are left out."""
    found = []
    for kind in KINDS:
        for path in (root / kind).iterdir() if (root / kind).is_dir() else ():
            if path.name.startswith(".") and not path.name.startswith(".tmp-"):  # being written
                continue
            entry = CacheEntry(kind, path, {}, size_of(path), 0.0, in_use=False)
            with contextlib.suppress(OSError, ValueError):
                entry = replace(entry, meta=json.loads((path / "meta.json").read_text()))
            used = root / "locks" / f"{entry.name}.use"
            with contextlib.suppress(OSError):
                entry = replace(entry, last_used=(used if used.exists() else path).stat().st_mtime)
            with _unused(root, entry) as is_unused:
                found.append(replace(entry, in_use=not is_unused))
    return sorted(found, key=lambda entry: entry.last_used, reverse=True)


def remove_entry(root: Path, entry: CacheEntry) -> bool:
    """Delete an entry; False if a process uses or builds it. Raises DataError."""
    try:
        (root / "locks").mkdir(exist_ok=True)
        (root / "locks" / f"{entry.name}.use").open("ab").close()  # for one that begins to use it now
        with _unused(root, entry) as is_unused:
            if is_unused:
                doomed = entry.path.with_name(f".tmp-{entry.path.name.removeprefix('.tmp-')}")
                if entry.path != doomed:
                    remove(doomed)
                    entry.path.rename(doomed)  # so that a kill leaves nothing that looks whole
                remove(doomed)
    except OSError as error:
        raise DataError(f"{error.filename or entry.path}: cannot be removed: {error.strerror}") from error
    return is_unused


@contextlib.contextmanager
def _unused(root: Path, entry: CacheEntry) -> Iterator[bool]:
    """True, and until the end no process uses or builds the entry; else False."""
    with contextlib.ExitStack() as held:
        try:
            for ending in ("use", "lock"):
                with contextlib.suppress(FileNotFoundError):
                    # to be written to, as network file systems want it for an exclusive lock
                    handle = held.enter_context((root / "locks" / f"{entry.name}.{ending}").open("r+b"))
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield False
        else:
            yield True

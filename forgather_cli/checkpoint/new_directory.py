"""A directory that appears whole or not at all. No torch here."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from forgather_cli.checkpoint.files import remove, sync_directory, sync_file
from forgather_cli.checkpoint.retention import sibling, siblings
from forgather_cli.errors import SetupError


@contextlib.contextmanager
def new_directory(target: Path, num_bytes: int = 0) -> Iterator[Path]:
    """A temporary sibling of ``target`` to fill; at the end it is synced and takes the name.

    Whatever ends the block otherwise (an error, a full disk, Ctrl-C, SIGTERM, SIGHUP) leaves nothing, parents that were
    made for it included; what SIGKILL or a power cut leaves goes with the next call for the same ``target``. Raises
    SetupError where ``target`` exists, where fewer than ``num_bytes`` are free, or for an OSError of the block.
    """
    check_absent(target)
    with contextlib.suppress(OSError):
        _remove_leftovers(target.absolute())
    _check(target, num_bytes)
    target = target.absolute()
    made = [parent for parent in target.parents if not parent.exists()]  # nearest first
    temporary = sibling(target, "tmp")
    try:
        with _unwinding():
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


def _remove_leftovers(target: Path) -> None:
    """What killed processes have left of the same ``target``; that of living ones is locked. Raises OSError."""
    for path, kind, whose in siblings(target.parent):
        if (kind, whose.name) == ("tmp", target.name):
            with _lock(path) as mine:
                if mine:
                    remove(path)


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
def _unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process through its ``finally`` blocks, as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

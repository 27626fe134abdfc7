"""Temporary folders that go with the process that made them, or, where that was killed, with the next start."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OWNER = "owner"
"""File of a folder whose owner is to remove it; made once the owner holds the folder."""


@contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """A folder that only this user may read, until the end. Those of this user whose owners were killed go now."""
    for owner in Path(tempfile.gettempdir()).glob(f"forgather-*/{_OWNER}"):
        with suppress(OSError), _locked(owner.parent):
            shutil.rmtree(owner.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"forgather-{name}-"))
    with _locked(folder):
        (folder / _OWNER).touch(mode=0o600)
        try:
            yield folder
        finally:
            if (folder / _OWNER).exists():
                shutil.rmtree(folder, ignore_errors=True)


def keep(folder: Path) -> None:
    """Leave a temporary folder for people to look at."""
    (folder / _OWNER).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder while this process lives, in whatever container. Raises OSError if another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)

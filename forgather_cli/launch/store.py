"""Where ranks leave each other messages, by key: files of one node, or a TCPStore, in which messages are signed."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import threading
from pathlib import Path
from typing import Any, Protocol

from forgather_cli.input_files import write_whole

SECRET = "FORGATHER_LAUNCH_SECRET"
"""Environment variable: what the ranks sign with, where the file of rank 0 does not do."""
_UNSIGNED = "-" * 64  # as long as a signature


class Store(Protocol):
    """Messages by key."""

    def get(self, key: str) -> str | None:
        """None where there is no message that counts."""

    def set(self, key: str, text: str) -> None: ...

    def add(self, key: str, text: str) -> bool:
        """Leave a message where none that counts lies; False if one does."""

    def delete(self, key: str) -> None: ...


class FolderStore:
    """Messages as files of a folder that only this user may read.

    Not torch's FileStore: a process that dies or is stopped while it writes there has all others wait for ever (torch
    2.13: a record that is cut off, flock without a timeout).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def get(self, key: str) -> str | None:
        try:
            return self._path(key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def set(self, key: str, text: str) -> None:
        write_whole(self._path(key), text, mode=0o600)

    def add(self, key: str, text: str) -> bool:
        whole = self._path(f"{key}.{os.getpid()}.{threading.get_ident()}")
        write_whole(whole, text, mode=0o600)
        try:
            os.link(whole, self._path(key))
        except FileExistsError:
            return False
        finally:
            whole.unlink()
        return True

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


class SignedStore:
    """Messages in a store that others may write to: each begins with an HMAC (SHA-256) of its key and text.

    A message without one counts too until ``strict`` is set: ranks that are about to meet may not know the secret yet.
    """

    def __init__(self, store: Any, prefix: str, secret: bytes) -> None:
        """``store``: a torch Store. An empty ``secret`` signs nothing."""
        self._store, self._prefix, self.secret = store, prefix, secret
        self.strict = False

    def get(self, key: str) -> str | None:
        raw = self.raw(key)
        return None if raw is None else self._counting(key, raw)

    def set(self, key: str, text: str) -> None:
        self._store.set(self._prefix + key, self._message(key, text))

    def add(self, key: str, text: str) -> bool:
        raw, message = self.raw(key), self._message(key, text)
        if raw is None:
            return bool(self._store.compare_set(self._prefix + key, "", message) == message.encode())
        if self._counting(key, raw) is None:  # of a stranger
            self.set(key, text)
            return True
        return False

    def delete(self, key: str) -> None:
        self._store.delete_key(self._prefix + key)

    def raw(self, key: str) -> str | None:
        """A message with its signature, whoever it is from."""
        where = self._prefix + key
        return self._store.get(where).decode(errors="replace") if self._store.check([where]) else None

    def is_signed(self, key: str, raw: str, secret: bytes) -> bool:
        """True if who wrote the message knew the secret."""
        text = raw[len(_UNSIGNED) :]
        return bool(secret) and hmac.compare_digest(raw.encode(), (self._signature(key, text, secret) + text).encode())

    def _counting(self, key: str, raw: str) -> str | None:
        return raw[len(_UNSIGNED) :] if not self.strict or self.is_signed(key, raw, self.secret) else None

    def _message(self, key: str, text: str) -> str:
        return (self._signature(key, text, self.secret) if self.secret else _UNSIGNED) + text

    def _signature(self, key: str, text: str, secret: bytes) -> str:
        return hmac.new(secret, f"{self._prefix}{key}\n{text}".encode(), hashlib.sha256).hexdigest()


def text_of(raw: str) -> str:
    """What a message says, whoever it is from."""
    return raw[len(_UNSIGNED) :]


def new_secret() -> bytes:
    """For the ranks of one start: the environment's, else a random one."""
    return os.environ.get(SECRET, "").encode() or secrets.token_hex(32).encode()


def leave_secret(path: Path, secret: bytes) -> None:
    """Let the ranks of other nodes, which see the run's directory, know the secret."""
    if SECRET not in os.environ:
        write_whole(path, secret, mode=0o600)


def find_secret(path: Path) -> bytes:
    """What rank 0 has left for this user. Raises OSError where that is not there or may be of somebody else."""
    if SECRET in os.environ:
        return os.environ[SECRET].encode()
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        facts = os.fstat(file)
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or not stat.S_ISREG(facts.st_mode):
            mode = stat.S_IMODE(facts.st_mode)
            raise PermissionError(f"is of user {facts.st_uid} with mode {mode:o} instead of {os.geteuid()} with 600")
        return os.read(file, 1000)
    finally:
        os.close(file)

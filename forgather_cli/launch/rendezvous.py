"""What the ranks of one world tell each other outside of collectives.

Rank 0 shares its config; any rank shares that it failed, and where it stands when it is asked. Ranks that wait in a
collective hear of it all the same, in their watch threads. Ranks that our launcher has started on one node meet in the
job's folder, others in the TCPStore by which they find each other, and in which messages are signed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from forgather_cli.documents.regular_files import write_whole
from forgather_cli.errors import SetupError, ranks_named
from forgather_cli.launch.exit_status import FAILED, ExitStatus, Kind
from forgather_cli.launch.place import Place
from forgather_cli.launch.processes import is_running
from forgather_cli.run_dir import RunDir
from forgather_cli.terminal.bars import doing

SECRET = "FORGATHER_LAUNCH_SECRET"
"""Environment variable: what the ranks sign with, where the file of rank 0 does not do."""
_UNSIGNED = "-" * 64  # as long as a signature
_T = TypeVar("_T")
_CONNECT = 600.0  # seconds until all ranks must have been started
_NOT_SEEN = (
    "output_dir: {root} of rank 0 is not what {host} sees there; set output_dir to a directory that all nodes share"
)
FAREWELL = 20.0
"""Seconds that the rank which serves the store waits for the others to disconnect."""


@dataclass(frozen=True)
class Shared:
    """What rank 0 tells the others to train."""

    root: str
    """The run's directory, absolute."""
    config: str
    """Name of the config file in it."""
    sha256: str
    """Of that file."""
    going_on: bool = False
    """Resume from the newest checkpoint, whatever the config says: after a restart."""


class Rendezvous:
    """This rank's connection to the others of its world. Safe to use from several threads; no call waits for others."""

    store: Store
    """Messages to all ranks, by key."""

    def __init__(self, place: Place, folder: Path | None = None) -> None:
        """Connect to the store, which rank 0 serves unless torchrun does. Raises SetupError if that fails.

        ``folder``: the store is files in it instead, for ranks of one node; only this user may read it.
        """
        self._place, self._folder = place, folder
        self._server: Any = None
        self._raw: Any = None
        self._signed: SignedStore | None = None
        if folder is not None:
            self.store = FolderStore(folder)
        else:
            if place.rank == 0 and not place.agent_store:
                self._server = _connect(place, offer=True)
            self._raw = _connect(place)
            secret = b""  # until rank 0 has told
            if place.rank == 0:
                secret = os.environ.get(SECRET, "").encode() or secrets.token_hex(32).encode()
            self.store = self._signed = SignedStore(self._raw, self._prefix(place.attempt), secret)
        self._say_where()

    def _prefix(self, attempt: int) -> str:
        """Of all keys. torchrun's store outlives a restart, and one attempt must not see another's messages."""
        return f"forgather/{attempt if self._place.agent_store else 0}/"

    def _say_where(self) -> None:
        self.store.set(f"place/{self._place.rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def meet(self, what: str) -> Callable[[], str]:
        """Tell the others that this rank is about to do ``what`` with all of them. What is returned says which ranks it
        waits for.
        """
        self.store.set(f"meets/{what}/{self._place.rank}", "1")

        def awaited() -> str:
            missing = [rank for rank in range(self._place.size) if self.store.get(f"meets/{what}/{rank}") is None]
            return f"{what}: waiting for {ranks_named(missing)}" if missing else what

        return awaited

    def all_here(self) -> None:
        """All ranks are connected and know the secret: from now on only signed messages count."""
        if self._signed is not None:
            self._signed.strict = True

    def group_store(self) -> Any:
        """A torch Store for the process group."""
        from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

        if self._folder is None:
            return PrefixStore(f"{self._prefix(self._place.attempt)}group", _connect(self._place))
        path = self._folder / "process-group"
        os.close(os.open(path, os.O_CREAT, 0o600))  # torch would let all read it
        store = FileStore(str(path))
        store.set_timeout(timedelta(seconds=_CONNECT))
        return store

    # ------------------------------------------------------------------------------------------------------- the run

    def share(self, run: RunDir, *, going_on: bool) -> None:
        """On rank 0: tell the others what to train. With a folder there is no need: their launcher has told them."""
        if self._signed is None:
            return
        if SECRET not in os.environ:  # ranks of other nodes see the run's directory
            write_whole(run.secret, self._signed.secret, mode=0o600)
        config = run.newest_config()
        shared = Shared(str(run.root.resolve()), config.name, _sha256(config), going_on)
        self.store.set("shared", json.dumps(asdict(shared)))

    def shared(self) -> tuple[Shared | None, str]:
        """(what rank 0 has shared, None if nothing yet; what is wrong with a message that does not count)."""
        if self._signed is None:
            return None, ""
        found, secret, problem = _shared_in(self._signed)
        if found is None:
            return None, problem
        with contextlib.suppress(OSError):
            if _sha256(Path(found.root, found.config)) == found.sha256:
                self._signed.secret = secret
                self._say_where()
                return found, ""
        return None, _NOT_SEEN.format(root=found.root, host=socket.gethostname())

    def earlier_root(self) -> str | None:
        """The run directory of an earlier attempt, if the store is still the same."""
        for attempt in reversed(range(self._place.attempt)):
            found, _, _ = _shared_in(SignedStore(self._raw, self._prefix(attempt), b""))
            if found is not None:
                return found.root
        return None

    # ------------------------------------------------------------------------------------------------------- failures

    def fail(self, status: ExitStatus) -> bool:
        """Report a failure to all ranks; False if another rank has done so already. A cause outranks consequences."""
        if not status.is_cause and self.store.get("failed/cause") is not None:
            return False
        return self.store.add("failed/cause" if status.is_cause else "failed/noticed", status.to_json())

    def failure(self) -> ExitStatus | None:
        """The failure that some rank has reported. A store that is gone counts as one, of the rank that served it."""
        try:
            text = self.store.get("failed/cause") or self.store.get("failed/noticed")
        except Exception as error:  # whatever the store's library makes of a lost connection
            me, reason = self._place.rank, (str(error).splitlines() or [type(error).__name__])[0]
            message = f"rank {me} has lost the store of the ranks, whose process or node is gone ({reason})"
            return ExitStatus(me, Kind.LOST, FAILED, message)
        return None if text is None else ExitStatus.from_json(text)

    def dead_neighbour(self) -> int | None:
        """A rank on this node whose process is gone although it has not left."""
        first = self._place.rank - self._place.local_rank
        for rank in range(first, min(first + self._place.local_size, self._place.size)):
            text = self.store.get(f"place/{rank}")
            host, pid = json.loads(text) if text is not None else (None, 0)
            if host == socket.gethostname() and not is_running(pid) and self.store.get(f"left/{rank}") is None:
                return rank
        return None

    def leave(self, *, patience: float = FAREWELL) -> None:
        """Disconnect from the store. The rank that serves it waits ``patience`` seconds for all others to do so."""
        self.store.set(f"left/{self._place.rank}", "1")
        end = time.monotonic() + patience
        while self._server is not None and time.monotonic() < end:
            if all(self.store.get(f"left/{rank}") for rank in range(self._place.size)):
                return
            time.sleep(0.05)


# -------------------------------------------------------------------------------------------------------------- stores


class Store(Protocol):
    """Messages by key."""

    def get(self, key: str) -> str | None:
        """The message that counts; None if there is none."""

    def set(self, key: str, text: str) -> None: ...

    def add(self, key: str, text: str) -> bool:
        """Set a message if there is none that counts; False if there is one."""

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


# ----------------------------------------------------------------------------------------------------------- the secret


def _shared_in(store: SignedStore) -> tuple[Shared | None, bytes, str]:
    """(what rank 0 has shared there, the secret it is signed with, what is wrong with it).

    The secret is found in the directory that the message itself names, so it proves who wrote it only by its owner.
    """
    raw = store.raw("shared")
    if raw is None:
        return None, b"", ""
    root: Any = "?"
    try:
        told = json.loads(raw[len(_UNSIGNED) :])
        root = told["root"]
        secret = _find_secret(RunDir(Path(root)).secret)
        if store.is_signed("shared", raw, secret):
            return Shared(**told), secret, ""
    except PermissionError as error:
        problem = f"output_dir: {root}/{error}; set it to a directory that keeps owner and mode of files, or {SECRET} "
        return None, b"", f"{problem}to one secret in the environment of all nodes"
    except (OSError, ValueError, TypeError, LookupError):
        pass
    return None, b"", _NOT_SEEN.format(root=root, host=socket.gethostname())


def _find_secret(path: Path) -> bytes:
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


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """What ``call`` returns, None if it raises or takes longer: the other side may hang, or be gone."""
    answers: list[_T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _connect(place: Place, *, offer: bool = False) -> Any:
    timeout = timedelta(seconds=_CONNECT)
    try:
        with doing("importing torch"):
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            with doing(f"waiting for rank 0 at {place.address}:{place.port}"):
                return TCPStore(place.address, place.port, is_master=offer, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        where = f"{place.address}:{place.port}"
        if offer and "EADDRINUSE" in str(error):
            raise SetupError(
                f"MASTER_PORT: port {place.port} of this machine is in use, the ranks cannot meet there; "
                "start them with another one"
            ) from error
        reason = str(error).splitlines()[0]
        raise SetupError(f"MASTER_ADDR: the ranks cannot meet at {where} ({reason}); give rank 0's address") from error

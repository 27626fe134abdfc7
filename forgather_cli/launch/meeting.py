"""What the ranks of one world tell each other outside of collectives: through the store by which they find each other.

Rank 0 shares its config; any rank shares that it failed, or that a signal asks for a stop. Ranks that wait in a
collective hear of it all the same, in their watch threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from forgather_cli.errors import SetupError
from forgather_cli.launch.ending import LOST, Ending
from forgather_cli.launch.job import is_running
from forgather_cli.launch.outcome import FAILED
from forgather_cli.launch.place import Place

_T = TypeVar("_T")
_CONNECT = 600.0  # seconds until all ranks must have been started
FAREWELL = 20.0
"""Seconds that the rank with the store stays for the others."""


@dataclass(frozen=True)
class Shared:
    """What rank 0 gives to the others."""

    root: str
    """The run's directory, absolute."""
    lock: str
    """Text of its lock."""
    config: str
    """YAML."""
    going_on: bool = False
    """After a restart: from the newest checkpoint, whatever the config says."""


class Meeting:
    """This rank's connection to the store of its world. Safe to use from several threads; no call waits for others."""

    def __init__(self, place: Place) -> None:
        """Connect, or offer the store. Raises SetupError where that cannot be."""
        self._place = place
        self._lock = threading.Lock()
        self._server: Any = None
        if place.hosts_store:
            self._server = _connect(place, offer=True)
        self._raw = _connect(place)
        self._store = self._prefixed(self._raw)
        self._store.set(f"place/{place.rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def rendezvous_store(self) -> Any:
        """A connection of its own for the process group, which waits in it."""
        return self._prefixed(_connect(self._place))

    def _prefixed(self, store: Any) -> Any:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(f"forgather/{self._place.attempt if self._place.store_survives else 0}", store)

    # ------------------------------------------------------------------------------------------------------- the run

    def share(self, shared: Shared) -> None:
        """Of rank 0."""
        self._call(lambda store: store.set("shared", json.dumps(asdict(shared))))
        with self._lock:
            self._raw.set("forgather/root", shared.root)

    def earlier_root(self) -> str | None:
        """The run directory of the attempt before, where the store is still the same."""
        with self._lock:
            return self._raw.get("forgather/root").decode() if self._raw.check(["forgather/root"]) else None

    def shared(self) -> Shared | None:
        """What rank 0 has shared, None as long as it has not."""
        text = self._read("shared")
        return None if text is None else Shared(**json.loads(text))

    # ---------------------------------------------------------------------------------------------- failures and stops

    def fail(self, ending: Ending) -> bool:
        """Tell the world; False if another rank has told before. What explains the others goes before what does not."""
        text = self._read("failed")
        if text is not None and (Ending.from_json(text).is_cause or not ending.is_cause):
            return False
        old = "" if text is None else text.decode()
        told = self._call(lambda store: store.compare_set("failed", old, ending.to_json()))
        return bool(told.decode() == ending.to_json())

    def failure(self) -> Ending | None:
        """What some rank has told. A store that is gone is the failure of the rank that offered it."""
        try:
            text = self._read("failed")
        except Exception as error:  # whatever the store's library makes of a lost connection
            return _store_is_gone(self._place.rank, error)
        return None if text is None else Ending.from_json(text)

    def ask_to_stop(self, signum: int) -> None:
        self._call(lambda store: store.set("stop", json.dumps([signum, self._place.rank])))

    def stop_asked(self) -> tuple[int, int] | None:
        """The signal that some rank has got, and the rank."""
        text = self._read("stop")
        if text is None:
            return None
        signum, rank = json.loads(text)
        return int(signum), int(rank)

    def say_busy(self) -> None:
        """This rank is saving, and those that wait for it are to be patient."""
        self._call(lambda store: store.set("busy", str(time.time())))

    def busy_since(self, seconds: float) -> bool:
        """True if some rank has been saving within the last ``seconds``."""
        text = self._read("busy")
        return text is not None and time.time() - float(text) < seconds

    def dead_neighbour(self) -> int | None:
        """A rank on this node whose process is gone although it has not left."""
        first = self._place.rank - self._place.local_rank
        for rank in range(first, min(first + self._place.local_size, self._place.size)):
            text = self._read(f"place/{rank}")
            host, pid = json.loads(text) if text is not None else (None, 0)
            if host == socket.gethostname() and not is_running(pid) and self._read(f"left/{rank}") is None:
                return rank
        return None

    def leave(self, *, patience: float = FAREWELL) -> None:
        """Say that this rank needs the store no more. The rank that offers it stays until all have, or no longer."""
        if self._read(f"left/{self._place.rank}") is None:
            self._call(lambda store: store.set(f"left/{self._place.rank}", "1"))
            self._call(lambda store: store.add("left", 1))
        end = time.monotonic() + patience
        while self._server is not None and time.monotonic() < end:
            if self._call(lambda store: store.add("left", 0)) >= self._place.size:
                return
            time.sleep(0.05)

    # ------------------------------------------------------------------------------------------------ where ranks stand

    def tell(self, key: str, text: str) -> None:
        """Leave a word for the other ranks, in place of what lay there."""
        self._call(lambda store: store.set(key, text))

    def told(self, key: str) -> str | None:
        """What some rank has left."""
        text = self._read(key)
        return None if text is None else text.decode()

    def claim(self, key: str, name: str) -> bool:
        """Leave a word where none lies, or an empty one; False if another rank was first."""
        return bool(self._call(lambda store: store.compare_set(key, "", name)).decode() == name)

    # ------------------------------------------------------------------------------------------------------- the store

    def _read(self, key: str) -> bytes | None:
        def read(store: Any) -> bytes | None:
            return bytes(store.get(key)) if store.check([key]) else None

        return self._call(read)

    def _call(self, use: Callable[[Any], _T]) -> _T:
        with self._lock:
            return use(self._store)


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
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=_CONNECT)
    try:
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


def _store_is_gone(rank: int, error: Exception) -> Ending:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Ending(
        rank, LOST, FAILED, f"rank {rank} has lost the store of the ranks, whose process or node is gone ({reason})"
    )

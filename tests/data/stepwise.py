"""Processes of tests that tell what they do, and go on when they are told so."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from forks import fork


class Stepwise:
    """A forked process that runs ``function(connection, *args)`` of a module, and has a connection's other end here."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self.process = fork(function, theirs, *args, daemon=False)
        theirs.close()
        self.pid: int = self.process.pid

    def hears(self) -> str:
        """What it tells next; "" when it has ended."""
        try:
            return str(self._connection.recv())
        except (EOFError, ConnectionResetError):
            return ""

    def hears_all(self) -> list[str]:
        """What it tells until it ends."""
        return list(iter(self.hears, ""))

    def tell(self) -> None:
        try:
            self._connection.send(None)
        except BrokenPipeError:  # it has ended
            return

    def ends(self) -> str:
        """The last that it tells."""
        told = self.hears_all()
        self.process.join(120)
        return told[-1] if told else ""

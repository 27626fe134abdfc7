"""A network between worker and server that is cut, or held, where a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import wait


class Proxy:
    """Passes on what comes to ``port`` to ``target``, in threads.

    ``most`` is asked for each connection: it is cut after so many bytes of both ways, never where that is None. ``saw``
    is told what the client sends, before it goes on; where it raises OSError the connection is cut there.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.most: Callable[[], int | None] = lambda: None
        self.saw: Callable[[bytes], None] = lambda content: None
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._pass_on, args=(self._listener.accept()[0],), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        left = self.most()
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._target)) as server:
            other = {client: server, server: client}
            while left is None or left > 0:
                for source in wait(list(other)):  # select takes no descriptor above 1,023
                    assert isinstance(source, socket.socket)
                    content = source.recv(4096)[:left]
                    if not content:
                        return
                    if source is client:
                        self.saw(content)
                    left = None if left is None else left - len(content)
                    other[source].sendall(content)
            self.cuts += 1

"""An HTTP server (uvicorn) that neither strangers nor stuck clients can fill.

uvicorn 0.54 times a connection only after a response, its ``limit_concurrency`` answers 503 to friends too, and
asyncio's servers (Python 3.11) log a traceback for each of ``backlog`` attempts to accept where files have run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from forgather_cli.control.accept import accepted

log = logging.getLogger(__name__)

HEAD = 10.0
"""Seconds in which a TLS handshake, and the line and headers of a request, must be whole."""
SILENCE = 60.0
"""Seconds in which some byte of a request's body must come, or some of its answer be taken."""
_MOST = 4096  # connections; or half of the files that the process may open: each may have one open beside it
_LOOK = 0.25  # of HEAD, between two looks at a connection
_PAUSE = 0.1  # seconds before the next try to accept, where that fails

Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case."""


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with deadlines for what a client sends and takes."""

    def __init__(self, *, knows: Callable[[Headers], bool], head: float, silence: float, **uvicorns: Any) -> None:
        """``knows``: whether a request with these headers is of no stranger."""
        super().__init__(**uvicorns)
        self._knows, self._head, self._silence = knows, head, silence
        self.is_known = False
        """It has sent a request of no stranger."""
        self.since = self.loop.time()
        """When what is waited for began, or last went on: a request's headers as a whole; its body, or its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self._look()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        in_request = not self._is_between
        super().data_received(data)
        if in_request or self.cycle is not before:
            self.since = self.loop.time()
            self.is_known = self.is_known or self._knows(self.headers)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self.since = self.loop.time()
        super().pause_writing()

    def drop(self) -> None:
        """Close the connection at once."""
        self.connections.discard(self)
        self.transport.abort()

    @property
    def _is_between(self) -> bool:
        """No request is under way, or not all of its headers are here."""
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        if self not in self.connections:
            return
        waited, closes = self.loop.time() - self.since, self.transport.is_closing()
        # the application may take its time; a connection that closes has still something to send
        stands = closes or self.flow.write_paused or (self.cycle and self.cycle.more_body and not self.flow.read_paused)
        if self._is_between and not closes and waited > self._head:
            log.warning("a connection was closed: it sent no whole request within %g s", self._head)
            self.drop()
        elif stands and waited > self._silence:
            log.warning("a connection was closed: it stood still in the middle of a request for %g s", self._silence)
            self.drop()
        else:
            self.loop.call_later(self._head * _LOOK, self._look)


class OncePerMinute(logging.Filter):
    """Lets one line of each kind (its text without values) pass in a minute, which tells how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, tuple[float, int]] = {}
        """Kind -> when the next may pass, and how many have not since the last one."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = record.msg, time.monotonic()
        after, more = self._kinds.get(kind, (now, 0))
        if now < after:
            self._kinds[kind] = after, more + 1
            return False
        self._kinds[kind] = now + 60, 0
        record.msg += f" (and {more} times more in the time before)" if more else ""
        return True


class _Uvicorn(uvicorn.Server):
    """Signals are ours (``launch/signals.py``)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(
    app: Any,
    listener: socket.socket,
    knows: Callable[[Headers], bool],
    *,
    tls: tuple[str | None, str | None] = (None, None),
    head: float = HEAD,
    silence: float = SILENCE,
) -> AsyncIterator[None]:
    """Answer what comes to ``listener`` by an ASGI application, meanwhile. ``tls``: files of a certificate and its key.

    Where there are too many connections, the one is closed that has waited longest, strangers first: those who have
    not yet sent a request whose headers ``knows`` likes.
    """
    config = uvicorn.Config(
        app, ws="none", loop="asyncio", lifespan="off", log_config=None, log_level="warning", access_log=False,
        server_header=False, timeout_graceful_shutdown=2, ssl_certfile=tls[0], ssl_keyfile=tls[1],
    )  # fmt: skip
    server, its_log, filter = _Uvicorn(config), logging.getLogger("uvicorn.error"), OncePerMinute()
    config.load()
    make = partial(
        BoundedProtocol, knows=knows, head=head, silence=silence, config=config, server_state=server.server_state,
        app_state={},
    )  # fmt: skip
    for each in (log, its_log):
        each.addFilter(filter)
    tasks = [asyncio.create_task(server.serve([])), asyncio.create_task(_accept(listener, make, server, head))]
    try:
        yield
    finally:
        # over TLS a connection that a client keeps is closed after the grace period, which is no error
        level = its_log.level
        its_log.setLevel(logging.CRITICAL)
        server.should_exit = True
        tasks[1].cancel()
        await asyncio.wait(tasks)
        its_log.setLevel(level)
        for each in (log, its_log):
            each.removeFilter(filter)


async def _accept(
    listener: socket.socket, make: Callable[[], BoundedProtocol], server: uvicorn.Server, head: float
) -> None:
    """Connections one by one, so that never more than the bound are open."""
    loop, tls, connections = asyncio.get_running_loop(), server.config.ssl, server.server_state.connections
    begun: dict[asyncio.Task[Any], float] = {}  # in their TLS handshake, and since when
    listener.setblocking(False)

    def end(task: asyncio.Task[Any]) -> None:
        begun.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a connection was not made: %s", error)

    while True:
        try:
            connection = await accepted(listener)
        except OSError as error:  # no more files, or the client is gone already
            log.warning("a connection cannot be accepted: %s", error.strerror)
            await asyncio.sleep(_PAUSE)
            continue
        limit = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": head}
        if len(begun) + len(connections) >= (most := min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)):
            log.warning("there are %d connections: those that wait longest are closed, strangers first", most)
            open_ones = [each for each in connections if isinstance(each, BoundedProtocol)]
            oldest = min(open_ones, key=lambda each: (each.is_known, each.since), default=None)
            first = next(iter(begun), None)
            if first is not None and (oldest is None or oldest.is_known or begun[first] < oldest.since):
                del begun[first]
                first.cancel()
            elif oldest is not None:
                oldest.drop()
        limit = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": head}
        task = loop.create_task(loop.connect_accepted_socket(make, connection, **limit))  # type: ignore[arg-type]
        begun[task] = loop.time()
        task.add_done_callback(end)
        await asyncio.sleep(0)  # it begins

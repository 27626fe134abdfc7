"""The HTTP server of one job. Nothing that a client does, or fails to do, stops training or changes its files.

One thread runs an event loop with a task for each connection; h11 parses the protocol. A request that is admitted is
answered in a thread of its own, which may wait for a slow disk. A connection serves one request. Nothing that a client
sends becomes part of a path.

From a connection to its answer: _accept -> _serve -> _receive -> _answer_in_thread -> _respond -> _route.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11

from forgather_cli.control import listing
from forgather_cli.control.accept import accepted
from forgather_cli.control.command_queue import CommandQueue
from forgather_cli.control.command_record import COMMANDS, command_name
from forgather_cli.errors import ControlError

log = logging.getLogger(__name__)

PORTS = range(8900, 9000)
MAX_BODY = 4096  # bytes; a command has fewer than 100
MAX_CLIENTS = 64  # connections at once; one more drops the oldest, those without the token first
MAX_ANSWERS = 16  # requests answered at once, fewer than clients; further ones are told to come back
DEADLINE = 10.0  # seconds that a client gets for all it has to send, and as many to take its answer
_LINGER = 2.0  # seconds a client may go on sending after its answer
_ACCEPT_PAUSE = 0.1  # seconds, after a connection could not be taken (no file descriptors left)
_STRANGER, _ADMITTED, _ANSWERED = range(3)  # the higher, the later a client is dropped

Document = dict[str, Any]
Answer = tuple[int, bytes, dict[str, str]]
"""HTTP status, JSON, headers."""


class ControlServer:
    """Serves one job from a thread of its own until ``close``."""

    def __init__(
        self,
        job_id: str,
        commands: CommandQueue,
        reports: Mapping[str, Callable[[], Document]],
        *,
        host: str,
        ports: Iterable[int],
        token: str | None,
    ) -> None:
        """Listen on the first free port. ``token`` None: any client is served. Raises OSError.

        ``reports``: by name, the functions that ``GET /jobs/<id>/<name>`` calls, in other threads; one is "status".
        """
        self.job_id, self._commands, self._reports = job_id, commands, reports
        self._host, self._token = host, token
        self._listener = _listen(host, ports)
        self.port = int(self._listener.getsockname()[1])
        self._clients: dict[asyncio.Task[None], _Client] = {}  # the oldest first
        self._closed = threading.Event()
        with (
            contextlib.ExitStack() as three
        ):  # descriptors: half a loop of asyncio (3.11) prints a traceback when it goes
            for _ in range(3):
                three.callback(os.close, os.dup(self._listener.fileno()))
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept())
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def close(self) -> None:
        """Stop listening; answers that have begun are completed. May be called twice."""
        if not self._closed.is_set():
            self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._closed.wait(5.0)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._accepting)
        except asyncio.CancelledError:  # by close
            pass
        except Exception as error:  # the edge of the thread
            log.error("control: the server ended (%s: %s); training continues", type(error).__name__, error)
        finally:
            self._loop.close()

    # ------------------------------------------------------------------------------------------------- the event loop

    async def _accept(self) -> None:
        """Accept connections until this task is cancelled; then complete only the answers that have begun.

        Uses sockets directly: asyncio's streams would accept a hundred connections before reading from the first.
        """
        try:
            while True:
                try:
                    connection = await accepted(self._listener)
                except OSError:  # it still waits: without a pause this would be tried again at once
                    await asyncio.sleep(_ACCEPT_PAUSE)
                    continue
                if len(self._clients) >= MAX_CLIENTS:
                    dropped, _ = min(self._clients.items(), key=lambda item: item[1].standing)  # the first of equals
                    del self._clients[dropped]
                    dropped.cancel()
                client = _Client(connection)
                self._clients[self._loop.create_task(self._serve(client))] = client
                # a client at work has sent its request by now: it is read before others come, so no crowd keeps it out
                await asyncio.sleep(0)
        finally:
            _close(self._listener)
            self._closed.set()
            for task, client in self._clients.items():
                if client.standing != _ANSWERED:
                    task.cancel()
            if self._clients:
                await asyncio.wait([*self._clients], timeout=2 * DEADLINE)

    async def _serve(self, client: _Client) -> None:
        """One connection: read its request, send the answer, discard what it still sends."""
        try:
            try:
                async with asyncio.timeout(DEADLINE):
                    await self._receive(client)
                answer = await self._answer_in_thread(client)
            except h11.RemoteProtocolError as error:  # among them a body that ends before its Content-Length
                answer = _Refused(error.error_status_hint, f"this is no HTTP request: {error}").answer
            except _Refused as refused:
                answer = refused.answer
            async with asyncio.timeout(DEADLINE):
                await self._loop.sock_sendall(client.connection, client.message(answer))
            client.standing = _STRANGER
            client.connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER):  # closed on unread bytes, the system drops the answer too
                while await self._loop.sock_recv(client.connection, 65536):
                    pass
        except Exception as error:  # it was too slow, is gone, or no thread could be started
            log.debug("control: %s: %s", type(error).__name__, error)
        finally:
            self._clients.pop(asyncio.current_task(self._loop), None)  # type: ignore[arg-type]
            _close(client.connection)

    async def _receive(self, client: _Client) -> None:
        """Read a whole request. Raises _Refused, ProtocolError, and OSError if the client closes without one."""
        while not isinstance(event := client.http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                client.http.receive_data(await self._loop.sock_recv(client.connection, 65536))
            elif isinstance(event, h11.Request):
                client.request = event
                self._check_sender({name.decode(): value.decode("latin-1") for name, value in event.headers})
                client.standing = _ADMITTED
            elif isinstance(event, h11.Data):
                client.body += event.data
                if len(client.body) > MAX_BODY:
                    raise _Refused(413, f"a request has at most {MAX_BODY} bytes")
            else:
                raise ConnectionAbortedError("closed before it asked for anything")

    def _check_sender(self, headers: Mapping[str, str]) -> None:
        """Check the token, before path and method, and that no browser sends it. Raises _Refused."""
        given = headers.get("authorization", "").encode("latin-1")
        if self._token is not None and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise _Refused(
                401,
                "the job's token is missing or wrong; see auth_token beside its endpoint.json",
                {"WWW-Authenticate": 'Bearer realm="forgather"'},
            )
        if "origin" in headers:  # pages of any site may send to this machine; without a token nothing else helps
            raise _Refused(403, "browsers are not served")
        if self._token is None:  # a page whose own name leads here (DNS rebinding) names itself, not this machine
            with contextlib.suppress(ValueError):
                name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
                here = name in {"localhost", self._host.lower(), socket.gethostname().lower()}
                if here or ipaddress.ip_address(name):
                    return
            raise _Refused(403, "the Host header names another machine; address the job by IP address or host name")

    async def _answer_in_thread(self, client: _Client) -> Answer:
        """Run ``_respond`` in a new thread. Raises _Refused if too many such threads run."""
        if sum(each.standing == _ANSWERED for each in self._clients.values()) >= MAX_ANSWERS:
            raise _Refused(503, "too many requests at once; ask again", {"Retry-After": "1"})
        client.standing = _ANSWERED
        answer: Future[Answer] = Future()
        work = threading.Thread(target=lambda: answer.set_result(self._respond(client)), name="control answer")
        work.daemon = True
        work.start()
        return await asyncio.wrap_future(answer)

    # ------------------------------------------------------------------------------------------------- answers' threads

    def _respond(self, client: _Client) -> Answer:
        """The answer to a request; an exception becomes an HTTP error."""
        assert client.request is not None
        method, target = client.request.method.decode(), client.request.target.decode()
        try:
            status, document = self._route(method, target.partition("?")[0].strip("/").split("/"), bytes(client.body))
            return status, _json(document), {}
        except _Refused as refused:
            return refused.answer
        except Exception as error:  # the edge of the thread
            log.debug("control: %s %s failed", method, target, exc_info=True)
            return 500, _json({"error": f"{type(error).__name__}: {error}"}), {}

    def _route(self, method: str, path: list[str], body: bytes) -> tuple[int, Document]:
        """(HTTP status, document) for a path. Raises _Refused."""
        if path[:1] == ["jobs"] and len(path) > 2 and path[1] != self.job_id:
            raise _Refused(404, f"no such job; this is {self.job_id}")
        match path:
            case ["jobs"]:
                _only("GET", method)
                found = listing.jobs({self.job_id: self._reports["status"]})
                return 200, {"jobs": [listing.document(entry, status) for entry, status in found]}
            case ["jobs", _, name] if name in self._reports:
                _only("GET", method)
                return 200, self._reports[name]()
            case ["jobs", _, "control"]:
                _only("POST", method)
                return 202, self._submit(body)
            case ["jobs", _, "commands", command_id] if (command := self._commands.get(command_id)) is not None:
                _only("GET", method)
                return 200, command.document()
        below = ", ".join([*self._reports, "control", "commands/<id of a command>"])
        raise _Refused(404, f"no such path; there are /jobs and /jobs/{self.job_id}/ with {below}")

    def _submit(self, body: bytes) -> Document:
        """Queue the command in a request's body; returns its record. Raises _Refused."""
        try:
            name = command_name(json.loads(body)["command"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _Refused(400, 'send {"command": ...} as JSON', commands=list(COMMANDS)) from None
        if name is None:
            raise _Refused(400, f"no such command; there are {', '.join(COMMANDS)}", commands=list(COMMANDS))
        try:
            return self._commands.submit(name).document()
        except ControlError as error:
            raise _Refused(429, str(error)) from None


class _Client:
    """One connection and what it has sent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.http = connection, h11.Connection(h11.SERVER)
        self.standing = _STRANGER
        self.request: h11.Request | None = None
        self.body = bytearray()

    def message(self, answer: Answer) -> bytes:
        """An answer as bytes, to be sent in one packet: a second small one would wait for the first one's receipt."""
        status, content, headers = answer
        about = {"Content-Type": "application/json", "Content-Length": str(len(content)), "Connection": "close"}
        message: bytes = self.http.send(
            h11.Response(status_code=status, reason=HTTPStatus(status).phrase, headers=[*(about | headers).items()])
        )
        if self.request is None or self.request.method != b"HEAD":
            message += self.http.send(h11.Data(data=content))
        return message


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None, **details: Any) -> None:
        self.answer: Answer = (status, _json({"error": message, **details}), headers or {})
        super().__init__(message)


def _only(allowed: str, method: str) -> None:
    if method != allowed and (method, allowed) != ("HEAD", "GET"):
        raise _Refused(405, f"use {allowed}", {"Allow": allowed})


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    """A socket on the first port that nobody has. Raises OSError."""
    taken: list[int] = []
    for port in ports:
        try:
            if ":" in host:  # :: is every address, IPv4 included
                both = socket.has_dualstack_ipv6()
                listener = socket.create_server((host, port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=both)
            else:
                listener = socket.create_server((host, port), backlog=512)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken.append(port)
        else:
            listener.setblocking(False)
            return listener
    which = f"port {taken[0]} is" if len(taken) == 1 else f"all ports from {taken[0]} to {taken[-1]} are"
    raise OSError(errno.EADDRINUSE, f"{which} in use on {host}")


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # data workers may have inherited it and live longer
    connection.close()


def _json(document: Document) -> bytes:
    return json.dumps(document, allow_nan=False).encode() + b"\n"

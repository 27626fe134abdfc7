"""The HTTP endpoint of one job. Whatever clients do, or fail to do, training goes on and its files stay what they are.

One thread reads all connections and h11 speaks the protocol; what may be answered gets a thread of its own, since an
answer may wait for a slow disk. A connection serves one request. Nothing that a client sends becomes part of a path.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11

from forgather_cli.control.commands import CommandQueue
from forgather_cli.control.records import COMMANDS, command_name
from forgather_cli.errors import ControlError

log = logging.getLogger(__name__)

PORTS = range(8900, 9000)
MAX_BODY = 4096  # bytes; a command has fewer than 100
MAX_CLIENTS = 64  # connections read at once; one more drops the oldest, those without the token first
MAX_ANSWERS = 16  # requests answered at once; further ones are told to come back
DEADLINE = 10.0  # seconds that a client gets for all it has to send, and as many to take its answer
_LINGER = 2.0  # seconds a refused client may go on sending: closed on unread bytes, the system drops the answer too
_ACCEPT_PAUSE = 0.1  # seconds, after a connection could not be taken (no file descriptors left)

Document = dict[str, Any]


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
        """Listens on the first free port. ``token`` None: whoever connects is served. Raises OSError.

        ``reports``: what ``GET /jobs/<id>/<name>`` answers, called in other threads; "status" is one of them.
        """
        self.job_id, self._commands, self._reports = job_id, commands, reports
        self._host, self._token = host, token
        self._listener = _listen(host, ports)
        self.port = int(self._listener.getsockname()[1])
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: list[_Client] = []  # the oldest first
        self._places = threading.BoundedSemaphore(MAX_ANSWERS)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Answers under way go on in their threads. Twice is as good as once."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")  # to close it would not do, where data workers have inherited it
        self._thread.join(5.0)

    # ---------------------------------------------------------------------------------------------- the server's thread

    def _serve(self) -> None:
        try:
            while True:
                until = min((client.until for client in self._clients), default=None)
                found = self._selector.select(None if until is None else max(0.0, until - time.monotonic()))
                keys = sorted((key for key, _ in found), key=lambda key: key.fileobj is self._listener)
                for key in keys:  # those who are there come before new ones
                    if key.fileobj is self._wake:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.data)
                now = time.monotonic()
                for client in [each for each in self._clients if each.until <= now]:
                    self._drop(client)
        except Exception as error:  # the edge of the thread
            log.error("control: the server ended (%s: %s); training goes on", type(error).__name__, error)
        finally:
            for client in list(self._clients):
                self._drop(client)
            self._selector.close()
            for each in (self._listener, self._wake, self._waker):
                _close(each)

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):  # gone again
            return
        except OSError:  # it still waits: without a pause this would be tried again at once
            time.sleep(_ACCEPT_PAUSE)
            return
        connection.setblocking(False)
        if len(self._clients) >= MAX_CLIENTS:  # min finds the first of equals
            self._drop(min(self._clients, key=lambda each: each.admitted))
        client = _Client(connection)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._read(client)  # a client at work has sent its request by now, and thus cannot be kept out by silent ones

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(65536)
            if client.refused:
                if not data:
                    self._drop(client)
                return
            try:
                client.http.receive_data(data)
                self._advance(client)
                return
            except h11.RemoteProtocolError as error:  # among them a body that ends before its Content-Length
                refused = _Refused(error.error_status_hint, f"this is no HTTP request: {error}")
            except _Refused as error:
                refused = error
            client.send(refused.status, _json(refused.document), refused.headers)
            client.connection.shutdown(socket.SHUT_WR)
            client.refused, client.admitted, client.until = True, False, time.monotonic() + _LINGER
        except BlockingIOError:
            return
        except (OSError, h11.ProtocolError):
            self._drop(client)

    def _advance(self, client: _Client) -> None:
        """Go on with a request as far as it has arrived; a whole one is answered. Raises _Refused, ProtocolError."""
        while (event := client.http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                client.request = event
                self._check_sender({name.decode(): value.decode("latin-1") for name, value in event.headers})
                client.admitted = True
            elif isinstance(event, h11.Data):
                client.body += event.data
                if len(client.body) > MAX_BODY:
                    raise _Refused(413, f"a request has at most {MAX_BODY} bytes")
            elif isinstance(event, h11.EndOfMessage):
                if not self._places.acquire(blocking=False):
                    raise _Refused(503, "too many requests at once; ask again", {"Retry-After": "1"})
                self._forget(client)
                client.connection.settimeout(DEADLINE)
                try:
                    threading.Thread(target=self._answer, args=(client,), name="control answer", daemon=True).start()
                except RuntimeError as error:  # no thread could be started
                    self._places.release()
                    _close(client.connection)
                    log.debug("control: %s", error)
                return
            else:  # closed before it asked for anything
                self._drop(client)
                return

    def _check_sender(self, headers: Mapping[str, str]) -> None:
        """The token comes first, whatever path or method it is for. Raises _Refused."""
        given = headers.get("authorization", "").encode("latin-1")
        if self._token is not None and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise _Refused(
                401,
                "the job's token is missing or wrong; see auth_token beside its endpoint.json",
                {"WWW-Authenticate": 'Bearer realm="forgather"'},
            )
        if "origin" in headers:  # pages of any site may send to this machine; without a token nothing else helps
            raise _Refused(403, "browsers are not served")
        if self._token is None and not self._is_named(headers.get("host", "")):
            raise _Refused(403, "the Host header names another machine; address the job by IP address or host name")

    def _is_named(self, host: str) -> bool:
        """True for this machine's names and addresses: a page whose own name leads here (DNS rebinding) has another."""
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            if name in {"localhost", self._host.lower(), socket.gethostname().lower()}:
                return True
            return bool(ipaddress.ip_address(name))
        return False

    def _forget(self, client: _Client) -> None:
        self._clients.remove(client)
        self._selector.unregister(client.connection)

    def _drop(self, client: _Client) -> None:
        self._forget(client)
        _close(client.connection)

    # ------------------------------------------------------------------------------------------------- answers' threads

    def _answer(self, client: _Client) -> None:
        assert client.request is not None
        method, target = client.request.method.decode(), client.request.target.decode()
        headers: dict[str, str] = {}
        try:
            status, document = self._result(method, target.partition("?")[0].strip("/").split("/"), bytes(client.body))
            content = _json(document)
        except _Refused as refused:
            status, content, headers = refused.status, _json(refused.document), refused.headers
        except Exception as error:  # the edge of the thread
            log.debug("control: %s %s failed", method, target, exc_info=True)
            status, content = 500, _json({"error": f"{type(error).__name__}: {error}"})
        try:
            client.send(status, content, headers)
        except OSError as error:
            log.debug("control: %s %s: %s", method, target, error)
        finally:
            _close(client.connection)
            self._places.release()

    def _result(self, method: str, path: list[str], body: bytes) -> tuple[int, Document]:
        """(HTTP status, document) for a client that may ask. Raises _Refused."""
        if path[:1] == ["jobs"] and len(path) > 2 and path[1] != self.job_id:
            raise _Refused(404, f"no such job; this is {self.job_id}")
        match path:
            case ["jobs"]:
                _only("GET", method)
                return 200, {"jobs": [self._reports["status"]()]}
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
        self.until = time.monotonic() + DEADLINE
        self.request: h11.Request | None = None
        self.admitted = False  # its headers are there, and it may ask
        self.refused = False  # it has its answer, and may still be sending
        self.body = bytearray()

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        """Raises OSError."""
        about = {"Content-Type": "application/json", "Content-Length": str(len(content)), "Connection": "close"}
        message = self.http.send(
            h11.Response(status_code=status, reason=HTTPStatus(status).phrase, headers=[*(about | headers).items()])
        )
        if self.request is None or self.request.method != b"HEAD":
            message += self.http.send(h11.Data(data=content))
        self.connection.sendall(message)  # in one packet: a second small one would wait for the first one's receipt


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None, **details: Any) -> None:
        self.status, self.headers, self.document = status, headers or {}, {"error": message, **details}
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

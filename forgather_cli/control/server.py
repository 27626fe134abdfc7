"""The HTTP endpoint of one job. Whatever clients do, or fail to do, training goes on and its files stay what they are.

Requests are small and few, so each gets a thread of its own and a connection serves one. Nothing that a client sends
becomes part of a path.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import io
import json
import logging
import selectors
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from typing import Any

from forgather_cli.control.commands import CommandQueue
from forgather_cli.control.records import COMMANDS, command_name
from forgather_cli.errors import ControlError

log = logging.getLogger(__name__)

PORTS = range(8900, 9000)
MAX_BODY = 4096  # bytes; a command has fewer than 100
MAX_CLIENTS = 16  # served at once; others are told to come back
DEADLINE = 10.0  # seconds that one client gets for all it has to send
_DRAINED = 1 << 20  # bytes of an oversized body that are read and thrown away, so that the answer is read
_ACCEPT_PAUSE = 0.1  # seconds, after a connection could not be taken (no file descriptors left)

Document = dict[str, Any]


class ControlServer:
    """Serves one job from a thread of its own until ``close``. ``status`` is called in other threads."""

    def __init__(
        self,
        job_id: str,
        commands: CommandQueue,
        status: Callable[[], Document],
        *,
        host: str,
        ports: Iterable[int],
        token: str | None,
    ) -> None:
        """Listens on the first free port. ``token`` None: whoever connects is served. Raises OSError."""
        self.job_id, self.commands, self.status, self.token = job_id, commands, status, token
        self._http = _listen(host, ports, self)
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    def close(self) -> None:
        """Stop listening. Answers under way go on in their threads. Twice is as good as once."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")  # to close it would not do, where data workers have inherited it
        self._thread.join(5.0)
        with contextlib.suppress(OSError):
            self._http.socket.shutdown(socket.SHUT_RDWR)  # data workers may have inherited it and live longer
        self._http.server_close()
        self._wake.close()
        self._waker.close()

    def _serve(self) -> None:
        """Without polling: ``serve_forever`` wakes up twice a second, and its ``shutdown`` waits for the next time."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                selector.register(self._http.socket, selectors.EVENT_READ)
                while not any(key.fileobj is self._wake for key, _ in selector.select()):
                    self._http.handle_request()
        except Exception as error:  # the edge of the thread
            log.error("control: the server ended (%s: %s); training goes on", type(error).__name__, error)


class _HTTPServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """``http.server``'s asks the name service for the host's full name, which may take seconds."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128
    timeout = 0  # ``handle_request`` is called when there is one

    def __init__(self, host: str, port: int, job: ControlServer) -> None:
        self.job = job
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # the connection still waits: without a pause this would be tried again at once
            time.sleep(_ACCEPT_PAUSE)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            request.settimeout(1.0)
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("control: a request failed", exc_info=True)


def _listen(host: str, ports: Iterable[int], job: ControlServer) -> _HTTPServer:
    """A server on the first port that nobody has. Raises OSError."""
    taken: list[int] = []
    for port in ports:
        try:
            return _HTTPServer(host, port, job)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            taken.append(port)
    which = f"port {taken[0]} is" if len(taken) == 1 else f"all ports from {taken[0]} to {taken[-1]} are"
    raise OSError(errno.EADDRINUSE, f"{which} in use on {host}")


class _Until(io.RawIOBase):
    """Reads a socket until a deadline for the whole request: a timeout per read is renewed by every byte."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the client is too slow")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, **details: Any) -> None:
        self.status, self.document = status, {"error": message, **details}
        super().__init__(message)


class _Handler(BaseHTTPRequestHandler):
    """One request. The token is looked at first, whatever path or method it is for."""

    server: _HTTPServer
    timeout = DEADLINE
    wbufsize = -1  # one packet: the second of two small ones would wait for the first one's receipt
    server_version, sys_version = "forgather", ""
    error_content_type, error_message_format = "application/json", '{"error": "%(message)s"}\n'

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Until(self.connection, DEADLINE))

    def _answer(self) -> None:
        try:
            body = self._body()  # read whatever it is: a connection closed on unread bytes loses the answer too
            self._check_sender()
            if isinstance(body, _Refused):
                raise body
            status, document = self._result(body)
        except _Refused as refused:
            status, document = refused.status, refused.document
        except TimeoutError:  # http.server closes the connection
            raise
        except Exception as error:  # the edge of the thread
            log.debug("control: %s %s failed", self.command, self.path, exc_info=True)
            status, document = 500, {"error": f"{type(error).__name__}: {error}"}
        self._send(status, document)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _answer

    def _check_sender(self) -> None:
        token = self.server.job.token
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise _Refused(401, "the job's token is missing or wrong; see auth_token beside its endpoint.json")
        if "Origin" in self.headers:  # pages of any site may send to this machine; without a token nothing else helps
            raise _Refused(403, "browsers are not served")

    def _result(self, body: bytes) -> tuple[int, Document]:
        """(HTTP status, document) for a client that may ask. Raises _Refused."""
        job = self.server.job
        path = self.path.partition("?")[0].strip("/").split("/")
        if path == ["jobs"]:
            self._only("GET")
            return 200, {"jobs": [job.status()]}
        if path[0] != "jobs" or len(path) < 3:
            raise _Refused(404, "no such path; there are /jobs and /jobs/<id>/status, control, commands/<command id>")
        if path[1] != job.job_id:
            raise _Refused(404, f"no such job; this is {job.job_id}")
        if path[2:] == ["status"]:
            self._only("GET")
            return 200, job.status()
        if path[2:] == ["control"]:
            self._only("POST")
            return 202, self._submit(body)
        if path[2] == "commands" and len(path) == 4:
            self._only("GET")
            command = job.commands.get(path[3])
            if command is None:
                raise _Refused(404, "no such command")
            return 200, command.document()
        raise _Refused(404, "no such path; a job has status, control and commands/<command id>")

    def _only(self, method: str) -> None:
        if self.command != method and (self.command, method) != ("HEAD", "GET"):
            raise _Refused(405, f"use {method}")

    def _submit(self, body: bytes) -> Document:
        try:
            asked = json.loads(body)["command"]
            name = command_name(asked)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _Refused(400, 'send {"command": ...} as JSON', commands=list(COMMANDS)) from None
        if name is None:
            raise _Refused(400, f"no such command; there are {', '.join(COMMANDS)}", commands=list(COMMANDS))
        try:
            return self.server.job.commands.submit(name).document()
        except ControlError as error:
            raise _Refused(429, str(error)) from None

    def _body(self) -> bytes | _Refused:
        if "Transfer-Encoding" in self.headers:
            return _Refused(411, "send a Content-Length")
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 16):
            return _Refused(400, "Content-Length is no number")
        if int(length) > MAX_BODY:
            for _ in range(0, min(int(length), _DRAINED), MAX_BODY):
                if not self.rfile.read(MAX_BODY):
                    break
            return _Refused(413, f"a request has at most {MAX_BODY} bytes")
        return self.rfile.read(int(length))

    def _send(self, status: int, document: Document) -> None:
        content = json.dumps(document, allow_nan=False).encode() + b"\n"
        self.connection.settimeout(DEADLINE)
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Bearer realm="forgather"')
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("control: " + format, *args)

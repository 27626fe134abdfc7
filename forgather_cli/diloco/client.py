"""HTTP requests to the server: one connection, JSON, weights in ranges, and a limit on bytes per second."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forgather_cli.diloco.wire import EVICTED, FENCED, VERSION_HEADER, WIRE_VERSION
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import open_file
from forgather_cli.errors import ConfigError, ControlError, TrainingError

_CHUNK = 1 << 16  # bytes
_CONNECT = 30.0  # seconds that the server may be silent within one request
_IDLE = 2.0  # seconds after which a connection is not used again: the server or what is between may have dropped it


class Away(ControlError):
    """The server does not answer."""


class Fenced(ControlError):
    """The server has a newer start of this worker, or none: register again."""


class TokenBucket:
    """Lets at most ``rate`` bytes per second pass, and a chunk more; counts them. For all clients of a rank."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._free = rate, time.monotonic()
        self._lock = threading.Lock()
        self.sent = self.received = 0
        """Bytes, headers included as far as they are known."""

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may pass."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(now, self._free) + count / self._rate
            wait = self._free - now
        time.sleep(max(0.0, wait))


class Client:
    """Requests to one server. Not for several threads at once; ``copy`` is for another one."""

    def __init__(
        self,
        address: str,
        token: str,
        bucket: TokenBucket | None = None,
        *,
        setting: str = "callbacks.diloco.server_addr",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``address``: HOST:PORT or https://HOST:PORT, given by ``setting``. ``tls``: what to trust in the place of the
        system's certificates.

        Raises ConfigError for what is no address.
        """
        self.address, self._token, self._setting = address, token, setting
        self.headers: dict[str, str] = {}
        """Of all requests, besides those of the wire."""
        self.bucket = bucket or TokenBucket(None)
        scheme, _, place = address.rpartition("://")
        host, _, port = place.strip("/").rpartition(":")
        if scheme not in ("", "http", "https") or not host or not port.isdecimal():
            raise ConfigError(f"{setting}: must be HOST:PORT or https://HOST:PORT, got {address!r}")
        self._host, self._port = host.strip("[]"), int(port)
        self._tls = (tls or ssl.create_default_context()) if scheme == "https" else None
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0
        """When it last brought an answer."""

    def copy(self) -> Client:
        """Another connection to the same server, which shares the limit on bytes per second."""
        made = Client(self.address, self._token, self.bucket, setting=self._setting, tls=self._tls)
        made.headers = self.headers
        return made

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST a document, or GET without one; what is answered. Raises Away, Fenced, ConfigError, and TrainingError
        where the server has given this worker up.
        """
        content = b"" if body is None else json.dumps(body).encode()
        with self._request("GET" if body is None else "POST", path, content) as answer:
            if not (document := _document(self._content(answer))):
                raise http.client.HTTPException("what is there answers no JSON")
            return document

    def put(self, path: str, file: Path) -> None:
        """PUT a file. Raises as ``call``."""
        with open_file(file) as body, self._request("PUT", path, self._limited(body), file.stat().st_size) as answer:
            answer.read()

    def has(self, path: str) -> bool:
        """Whether GET ``path`` is there. Raises as ``call``."""
        with self._request("GET", path, b"", missing=True) as answer:
            answer.read()
            return answer.status == 200

    def get(self, path: str) -> bytes:
        """Raises as ``call``."""
        with self._request("GET", path, b"") as answer:
            return self._content(answer)

    def read(self, path: str, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> None:
        """Fill the buffers ``into`` with these ranges of bytes of a file of the server's. Raises as ``call``."""
        content = json.dumps({"ranges": ranges}).encode()
        with self._request("POST", path, content) as answer:
            for buffer in into:
                done = 0
                while done < len(buffer):
                    self.bucket.take(min(_CHUNK, len(buffer) - done))
                    count = answer.readinto(buffer[done : done + _CHUNK])
                    if not count:
                        raise ConnectionResetError("the body was cut")
                    self.bucket.received += count
                    done += count
            answer.read()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ------------------------------------------------------------------------------------------------------------ HTTP

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: bytes | Iterator[bytes], size: int | None = None, *, missing: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        size = len(body) if isinstance(body, bytes) else size
        headers = {"Authorization": f"Bearer {self._token}", VERSION_HEADER: str(WIRE_VERSION), **self.headers}
        headers |= {"Content-Length": str(size), "Content-Type": "application/octet-stream"} if size else {}
        try:
            if time.monotonic() - self._used > _IDLE:
                self.close()
            if self._connection is None:
                kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
                more: Any = {"context": self._tls} if self._tls else {}
                self._connection = kind(self._host, self._port, timeout=_CONNECT, **more)
            try:
                self._connection.request(method, path, body, headers)
            except (BrokenPipeError, ConnectionResetError):
                if self._connection.sock is None:
                    raise  # else a server that does not want the body has said why
            answer = self._connection.getresponse()
            head = sum(len(key) + len(value) + 4 for key, value in headers.items())
            self.bucket.sent += head + len(method) + len(path) + 40 + (size or 0)
            self.bucket.received += len(str(answer.headers))
            if answer.status >= 400 and not (missing and answer.status == 404):
                raise self._failure(answer.status, _document(self._content(answer)))
            yield answer
            self._used = time.monotonic()
        except ssl.SSLCertVerificationError as error:
            self.close()
            what = f"{self._setting}: {self.address} has no certificate to trust ({error.verify_message})"
            remedy = "name the file of its own by callbacks.diloco.ca_file, or by SSL_CERT_FILE for a command"
            raise ConfigError(f"{what}; {remedy}") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            why = f"{error or type(error).__name__}"
            raise Away(f"no DiLoCo server answers at {self.address}: {why}") from error
        except BaseException:
            self.close()
            raise

    def _failure(self, status: int, document: dict[str, Any]) -> Exception:
        why = f"the DiLoCo server at {self.address}: {document.get('error') or f'HTTP status {status}'}"
        kinds: dict[str, type[Exception]] = {FENCED: Fenced, EVICTED: TrainingError}
        return Away(why) if status >= 500 else kinds.get(str(document.get("code")), ConfigError)(why)

    def _limited(self, body: Any) -> Iterator[bytes]:
        while chunk := body.read(_CHUNK):
            self.bucket.take(len(chunk))
            yield chunk

    def _content(self, answer: http.client.HTTPResponse) -> bytes:
        """The whole body. Raises ConnectionResetError for one that was cut, also within the headers."""
        content = b""
        while chunk := answer.read(_CHUNK):
            self.bucket.take(len(chunk))
            self.bucket.received += len(chunk)
            content += chunk
        if answer.length != 0 and not answer.chunked:
            raise ConnectionResetError("the answer was cut")
        return content


def _document(content: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = parse_json(content)
        if isinstance(found, dict):
            return found
    return {}

"""One HTTP request as the server sees it (ASGI): its body as it comes, and the ways to answer it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather_cli.diloco import wire
from forgather_cli.diloco.wire import WireError
from forgather_cli.documents.json_and_yaml import parse_json

CHUNK = 1 << 20
"""Bytes that are read and written at once."""
_LINGER = 2.0  # seconds a client may go on sending after its answer

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Gone(Exception):
    """The client has left in the middle of its request."""


@dataclass
class Request:
    """What is asked, and by which way it is answered."""

    method: str
    path: list[str]
    headers: dict[str, str]
    receive: Receive
    send: Send
    is_read: bool = False
    """Whether the whole body has come."""

    async def body(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Gone where it is cut."""
        while not self.is_read:
            message = await self.receive()
            if message["type"] != "http.request":
                raise Gone
            self.is_read = not message.get("more_body", False)
            yield message.get("body", b"")

    async def document(self) -> dict[str, Any]:
        """The body as a JSON object. Raises WireError, Gone."""
        content = b""
        async for chunk in self.body():
            content += chunk
            if len(content) > wire.MAX_JSON:
                raise WireError(413, f"a message has at most {wire.MAX_JSON} bytes; send weights as parts")
        try:
            found = parse_json(content)
        except ValueError as error:
            raise WireError(400, f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise WireError(400, f"the body must be a JSON object, got {type(found).__name__}")
        return found

    async def answer(self, status: int, document: dict[str, Any], **headers: str) -> None:
        """Send a JSON document; then take what is still coming, since closing on it would drop the answer too."""
        content = json.dumps(document).encode()
        listed = {"content-type": "application/json", "content-length": str(len(content)), **headers}
        raw = [(key.replace("_", "-").encode(), value.encode()) for key, value in listed.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})
        await self.send({"type": "http.response.body", "body": content, "more_body": not self.is_read})
        if not self.is_read:
            left = 4 * CHUNK
            with contextlib.suppress(Gone, TimeoutError):
                async with asyncio.timeout(_LINGER):
                    async for chunk in self.body():
                        if (left := left - len(chunk)) < 0:
                            break
            await self.send({"type": "http.response.body", "body": b""})

    async def answer_file(self, path: Path, ranges: Sequence[tuple[int, int]]) -> int:
        """Send byte ranges of a file, one behind the other; returns how many bytes. Raises WireError."""
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError as error:
            raise WireError(
                404, "these weights are no longer here: newer rounds have begun; register anew", wire.FENCED
            ) from error
        with file:
            size, length = os.fstat(file.fileno()).st_size, sum(stop - start for start, stop in ranges)
            if any(not 0 <= start <= stop <= size for start, stop in ranges):
                raise WireError(400, f"ranges: must lie in the file of {size} bytes; see its header")
            head = [(b"content-type", b"application/octet-stream"), (b"content-length", str(length).encode())]
            await self.send({"type": "http.response.start", "status": 200, "headers": head})
            for start, stop in ranges:
                for at in range(start, stop, CHUNK):
                    content = await asyncio.to_thread(os.pread, file.fileno(), min(CHUNK, stop - at), at)
                    await self.send({"type": "http.response.body", "body": content, "more_body": True})
            await self.send({"type": "http.response.body", "body": b""})
        return length

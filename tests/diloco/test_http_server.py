"""The HTTP server of ``http_server.py`` against strangers and clients that stand still, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from diloco.client import certificate

from forgather_cli.diloco import http_server
from forgather_cli.diloco.http_server import OncePerMinute, serving

KNOWN = b"Authorization: yes\r\n"
HEAD = 0.4


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Takes the whole body; answers ``/big`` with 64 MB, and everything else with what came."""
    content, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        content, more = content + message.get("body", b""), message.get("more_body", False)
    answer = bytes(1 << 26) if scope["path"] == "/big" else content
    length = str(len(answer)).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
    await send({"type": "http.response.body", "body": answer})


def knows(headers: http_server.Headers) -> bool:
    return (b"authorization", b"yes") in headers


def run(test: Callable[[int], Coroutine[Any, Any, None]], served: Any = app, **more: Any) -> None:
    """``test(port)`` beside the server."""

    async def all_of_it() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            async with serving(served, listener, knows, **{"head": HEAD, "silence": 2 * HEAD, **more}):
                async with asyncio.timeout(120):
                    await test(listener.getsockname()[1])

    asyncio.run(all_of_it())


@contextlib.asynccontextmanager
async def connected(port: int, **more: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **more)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def closed(reader: asyncio.StreamReader) -> float:
    """Seconds until the server has closed the connection."""
    begun = asyncio.get_running_loop().time()
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    return asyncio.get_running_loop().time() - begun


async def asked(port: int, body: bytes = b"well", head: bytes = KNOWN, **more: Any) -> bytes:
    async with connected(port, **more) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return await reader.readexactly(len(body))


def test_headers_that_do_not_come_close_the_connection_however_slowly_they_drip() -> None:
    async def test(port: int) -> None:
        async with connected(port) as (idle, _), connected(port) as (reader, writer):
            ended = asyncio.create_task(closed(reader))
            with contextlib.suppress(ConnectionError):
                for letter in b"GET / HTTP/1.1\r\nHost: " + b"x" * 1000:
                    if ended.done():
                        break
                    writer.write(bytes([letter]))
                    await asyncio.sleep(0.05)
            assert HEAD * 0.5 < await ended < 30 * HEAD, "long before all has dripped"
            await closed(idle)
        async with connected(port) as (reader, writer):  # the second request of one that was answered
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + KNOWN + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"GET / HTTP")
            assert await closed(reader) < 10 * HEAD

    run(test)


def test_a_body_may_be_slow_but_not_stand_still() -> None:
    async def test(port: int) -> None:
        async with connected(port) as (reader, writer), connected(port) as (stuck, other):
            for each in (writer, other):
                each.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + KNOWN + b"Content-Length: 12\r\n\r\n")
            ended = asyncio.create_task(closed(stuck))
            for _ in range(12):  # longer than either deadline
                writer.write(b"x")
                await asyncio.sleep(HEAD / 4)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await ended < 30 * HEAD

    run(test)


def test_an_answer_that_nobody_takes_is_given_up() -> None:
    async def test(port: int) -> None:
        async with connected(port, limit=1024) as (reader, writer):
            writer.write(b"GET /big HTTP/1.1\r\nHost: x\r\n" + KNOWN + b"\r\n")
            await asyncio.sleep(5 * HEAD)
            came = 0
            with contextlib.suppress(ConnectionResetError):
                while chunk := await reader.read(1 << 20):
                    came += len(chunk)
            assert came < 1 << 26

    run(test)


def test_a_known_one_that_waits_for_its_answer_is_left_alone() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(6 * HEAD)
        await app(scope, receive, send)

    async def test(port: int) -> None:
        assert await asked(port) == b"well"

    run(test, slow)


@pytest.fixture
def few_files() -> Iterator[None]:
    """Twice what is open now and 100 more, so that the server takes about 150 connections."""
    before, now = resource.getrlimit(resource.RLIMIT_NOFILE), len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * now + 200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("tls", [False, True])
def test_idle_strangers_give_way_and_a_friend_is_answered(
    tmp_path: Path, tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """More strangers who say nothing than the server may have connections; over TLS they do not even greet."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # which a process with many files open has more of
    files = {"tls": certificate(tmp_path, "ours")} if tls else {}
    context = ssl.create_default_context(cafile=files["tls"][0]) if tls else None
    caplog.set_level("WARNING", "forgather_cli.diloco.http_server")  # whatever a run of this process has asked for

    async def test(port: int) -> None:
        async with connected(port, ssl=context) as (reader, writer):
            for come in (contextlib.nullcontext(), strangers(port, most + 350)):
                async with come:
                    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + KNOWN + b"Content-Length: 4\r\n\r\nwell")
                    assert (await reader.readuntil(b"well")).startswith(b"HTTP/1.1 200"), "on the connection of before"
                    assert await asked(port, ssl=context) == b"well", "on a new one"

    run(test, head=60.0, **files)  # not by it are strangers closed, nor the friend before they have all come
    assert 1 <= len(caplog.records) < 10, "one line for each kind"


@contextlib.asynccontextmanager
async def strangers(port: int, count: int) -> AsyncIterator[None]:
    """So many connections of another process, on which nothing is said."""
    code = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
port, count = map(int, sys.argv[1:])
kept = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
print(flush=True)
sys.stdin.read()
"""
    words, pipe = (sys.executable, "-c", code, str(port), str(count)), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert await process.stdout.readline() == b"\n"
    yield
    await process.communicate(b"")  # it ends with what it reads


def test_one_line_of_a_kind_and_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now, log, filter = [0.0], logging.getLogger("some"), OncePerMinute()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log.addFilter(filter)
    for second in range(121):
        now[0] = float(second)
        log.warning("a kind, %d", second)
        log.warning("another kind")
    first = [record.getMessage() for record in caplog.records if "another" not in record.getMessage()]
    assert first[0] == "a kind, 0"
    assert [("60" in first[1], "59" in first[1]), ("120" in first[2], "59" in first[2])] == [(True, True)] * 2
    assert len(caplog.records) == 6

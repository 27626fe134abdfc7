"""The endpoint of a job under good and bad clients: real sockets against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from control.entries import entry
from program import document, shown

from forgather_cli.callbacks.base import CommandCounts
from forgather_cli.control import command_record, registry, server
from forgather_cli.control.accept import accepted
from forgather_cli.control.command_queue import MAX_OPEN, CommandQueue
from forgather_cli.control.server import MAX_ANSWERS, MAX_BODY, MAX_CLIENTS, ControlServer
from forgather_cli.run_dir import RunDir

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def queue(tmp_path: Path) -> CommandQueue:
    return CommandQueue(RunDir(tmp_path), "job", step=lambda: 5)


@contextlib.contextmanager
def serving(
    queue: CommandQueue, status: Callable[[], Any], name: str = "job", token: str | None = TOKEN
) -> Iterator[ControlServer]:
    served = ControlServer(name, queue, {"status": status}, host="127.0.0.1", ports=[0], token=token)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture
def job(queue: CommandQueue) -> Iterator[ControlServer]:
    with serving(queue, lambda: {"step": 5}) as served:
        yield served


def ask(
    port: int, method: str, path: str, body: Any = None, token: str | None = TOKEN, **headers: str
) -> tuple[int, Any, http.client.HTTPResponse]:
    """(status, document, response)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None, answer


HEAD = f"POST /jobs/job/control HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"


def raw(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_commands_are_taken_and_their_answers_read(job: ControlServer, queue: CommandQueue, tmp_path: Path) -> None:
    code, told, _ = ask(job.port, "POST", "/jobs/job/control", {"command": "save_checkpoint"})
    assert (code, told["command"], told["state"], told["asked_at_step"]) == (202, "save", "queued", 5)
    written = tmp_path / "control" / f"{told['id']}.json"
    assert json.loads(written.read_text()) == told
    assert queue.asked() == CommandCounts(saves=1)
    queue.on_agreed(CommandCounts(saves=1))
    assert ask(job.port, "GET", f"/jobs/job/commands/{told['id']}")[1]["state"] == "applied"
    queue.finish(queue.open()[0].done(Path("somewhere")))
    _, now, _ = ask(job.port, "GET", f"/jobs/job/commands/{told['id']}")
    assert (now["state"], now["checkpoint"]) == ("done", str(Path("somewhere").absolute()))
    assert json.loads(written.read_text()) == now
    assert command_record.read(RunDir(tmp_path), told["id"]) == command_record.from_document(now)


def test_status_and_jobs(job: ControlServer) -> None:
    assert ask(job.port, "GET", "/jobs/job/status")[:2] == (200, {"step": 5})
    assert ask(job.port, "GET", "/jobs/job/status?x=1")[:2] == (200, {"step": 5})
    assert ask(job.port, "HEAD", "/jobs")[:2] == (200, None)
    assert ask(job.port, "HEAD", "/jobs", token=None)[:2] == (401, None)
    assert ask(job.port, "POST", "/jobs", {})[2].headers["Allow"] == "GET"


def test_jobs_are_all_of_the_registry_as_control_list_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: CommandQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with contextlib.ExitStack() as stack:
        served = []
        for name, token in {"mine": TOKEN, "other": TOKEN[::-1]}.items():
            status = {"state": f"training {name}", "step": 5, "max_steps": 9, "metrics": {}, "eta_seconds": 1}
            served.append(stack.enter_context(serving(queue, lambda status=status: status, name, token)))
            registry.register(entry(name, port=served[-1].port), token)
        parent, port = os.getppid(), served[0].port  # whose server says that this is another job
        started = registry.start_of(parent)
        registry.register(entry("strange", pid=parent, process_start_time=started, port=port), TOKEN)
        registry.register(entry("gone", pid=2**22 + 1), TOKEN)
        registry.register(entry("foreign", hostname="elsewhere"), TOKEN)
        code, told, _ = ask(served[0].port, "GET", "/jobs")
        assert document(capsys, "control", "list", "--all") == told["jobs"]
        lines = shown(capsys, "control", "list", "--all").splitlines()
    jobs = {job["job_id"]: job for job in told["jobs"]}
    rows = {name: (job["running"], job["state"], job["status"] and job["status"]["step"]) for name, job in jobs.items()}
    assert rows == {
        "mine": (True, "training mine", 5), "other": (True, "training other", 5),
        "strange": (True, "does not answer", None), "gone": (False, "cut", None),
        "foreign": (None, "on elsewhere", None),
    }  # fmt: skip
    assert all(any(name in line and state in line for line in lines) for name, (_, state, _) in rows.items()), lines
    assert code == 200
    assert TOKEN not in json.dumps(told)


@pytest.mark.parametrize(
    "header",
    [None, "Bearer", *(f"Bearer {token}" for token in ("0" * 64, TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "\u00fc")),
     TOKEN, f"Basic {TOKEN}", f"bearer{TOKEN}"],
)  # fmt: skip
def test_without_the_token_nothing_is_told_or_done(job: ControlServer, queue: CommandQueue, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("GET", "/jobs/job/status"), ("GET", "/"), ("POST", "/jobs/job/control"), ("PUT", "/x")):
        code, told, answer = ask(job.port, method, path, {"command": "stop"}, None, **headers)
        assert (code, list(told)) == (401, ["error"])
        assert str(answer.headers["WWW-Authenticate"]).startswith("Bearer")
        assert TOKEN not in json.dumps(told) + str(answer.headers)
    assert queue.asked() == CommandCounts()


def test_without_authentication_browsers_are_still_refused(queue: CommandQueue) -> None:
    with serving(queue, dict, token=None) as served:
        assert ask(served.port, "GET", "/jobs/job/status", token=None)[0] == 200
        stop = {"command": "stop"}
        assert ask(served.port, "POST", "/jobs/job/control", stop, None, Origin="http://evil.example")[0] == 403
        # a page of evil.example whose name has come to lead here: the same site for the browser, which sends no Origin
        for host in ("evil.example", f"evil.example:{served.port}", "localhost.evil.example", "[", ""):
            code, told, _ = ask(served.port, "GET", "/jobs/job/status", None, None, Host=host)
            assert (code, list(told)) == (403, ["error"]), host
            assert ask(served.port, "POST", "/jobs/job/control", stop, None, Host=host)[0] == 403
        assert queue.asked() == CommandCounts()
        for host in (f"localhost:{served.port}", "127.0.0.1", "[::1]:8900", "192.0.2.7:8900", socket.gethostname()):
            assert ask(served.port, "GET", "/jobs/job/status", None, None, Host=host)[0] == 200, host
        assert ask(served.port, "POST", "/jobs/job/control", stop, None)[0] == 202


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/", 404), ("GET", "/jobs/", 200), ("GET", "/jobs/other/status", 404), ("GET", "/jobs/job", 404),
        ("GET", "/jobs/../job/status", 404), ("GET", "/jobs/%2e%2e/status", 404), ("GET", "/jobs/job/../../etc", 404),
        ("GET", "/jobs/job/commands/../../config", 404), ("GET", "/jobs/job/commands/nothing", 404),
        ("GET", "/jobs/job/commands/..%2f..%2fconfig", 404), ("GET", "/jobs/job/control", 405),
        ("POST", "/jobs/job/status", 405), ("DELETE", "/jobs", 405), ("OPTIONS", "/jobs", 405),
        ("POST", "/jobs/other/control", 404), ("GET", "/" + "x" * 5000, 404), ("GET", "//jobs", 200),
    ],
)  # fmt: skip
def test_there_is_nothing_but_one_job(
    job: ControlServer, queue: CommandQueue, method: str, path: str, code: int
) -> None:
    answered, told, _ = ask(job.port, method, path, {"command": "stop"} if method == "POST" else None)
    assert answered == code
    assert code == 200 or told["error"]
    assert queue.asked() == CommandCounts()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"7", b'"save"', b"{}", b'{"command": 7}', b'{"command": null}', b"\xff\xfe",
     b"[" * 4000, b'{"command": ["save"]}', b'{"command": "sing"}', b'{"command": "set"}', b'{"command": ""}'],
)  # fmt: skip
def test_what_is_no_command_is_answered_with_those_there_are(
    job: ControlServer, queue: CommandQueue, body: bytes
) -> None:
    code, told, _ = ask(job.port, "POST", "/jobs/job/control", body)
    assert (code, told["commands"]) == (400, ["save", "stop", "save_and_stop", "abort"])
    assert queue.asked() == CommandCounts()


@pytest.mark.parametrize(
    ("length", "code"), [(str(MAX_BODY + 1), b"413"), ("10000000000", b"413"), ("-1", b"400"), ("ten", b"400"),
                         ("9" * 400, b"400"), ("\u00b2", b"400")],
)  # fmt: skip
def test_a_body_has_a_size_and_that_has_a_bound(job: ControlServer, length: str, code: bytes) -> None:
    assert raw(job.port, f"{HEAD}Content-Length: {length}\r\n\r\n".encode("latin-1") + b"x" * 5000).split()[1] == code


def test_a_body_that_is_cut_off_is_not_acted_on_and_may_come_in_chunks(job: ControlServer, queue: CommandQueue) -> None:
    body, chunked = b'{"command": "save"}', f"{HEAD}Transfer-Encoding: chunked\r\n\r\n13\r\n".encode()
    longer = f"{HEAD}Content-Length: {len(body) + 11}\r\n\r\n".encode()  # the body by itself is a command
    for cut in (chunked + body + b"\r\n", longer + body):
        answer = raw(job.port, cut)
        assert answer.split()[1] == b"400"
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert queue.asked() == CommandCounts()
    assert raw(job.port, chunked + body + b"\r\n0\r\n\r\n").split()[1] == b"202"
    assert queue.asked() == CommandCounts(saves=1)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 100, b"GET\r\n\r\n", b"\r\n\r\n", b"SING /jobs HTTP/1.1\r\n\r\n", b"GET /jobs HTTP/9.9\r\n\r\n",
     b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET /jobs HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
     b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200],
)  # fmt: skip
def test_what_is_no_request_changes_nothing_and_is_told_so_in_json(
    job: ControlServer, queue: CommandQueue, data: bytes
) -> None:
    head, _, body = raw(job.port, data).partition(b"\r\n\r\n")
    if data:
        assert head.split()[1] in (b"400", b"401", b"431")
        assert b"Content-Type: application/json" in head
        assert json.loads(body)["error"]
    assert queue.asked() == CommandCounts()
    assert ask(job.port, "GET", "/jobs/job/status")[0] == 200


def test_slow_clients_are_cut_off_and_others_served_meanwhile(
    job: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DEADLINE", 1.0)
    began = time.monotonic()
    dripping = [socket.create_connection(("127.0.0.1", job.port)) for _ in range(MAX_CLIENTS - 1)]
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.05):
            for connection in dripping:
                with contextlib.suppress(OSError):
                    connection.sendall(b"G")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert ask(job.port, "GET", "/jobs/job/status")[0] == 200
        for connection in dripping:  # each byte comes in time, the request does not
            connection.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
        assert time.monotonic() - began < 60
    finally:
        ended.set()
        thread.join()
        for connection in dripping:
            connection.close()
    assert ask(job.port, "GET", "/jobs/job/status")[0] == 200


def test_silent_clients_keep_out_none_with_the_token(job: ControlServer, queue: CommandQueue) -> None:
    body = b'{"command": "save"}'
    begun = socket.create_connection(("127.0.0.1", job.port), timeout=120)
    begun.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
    silent: list[socket.socket] = []
    ended = threading.Event()

    def crowd() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                silent.append(socket.create_connection(("127.0.0.1", job.port), timeout=120))
            while len(silent) > 5 * MAX_CLIENTS:
                silent.pop(0).close()

    thread = threading.Thread(target=crowd)
    thread.start()
    try:
        for _ in range(50):
            assert ask(job.port, "GET", "/jobs/job/status")[0] == 200
        while len(silent) < 2 * MAX_CLIENTS:  # others were there after this one, which has shown the token
            assert thread.is_alive()
        begun.sendall(body[5:])
        assert begun.recv(4096).split()[1] == b"202"
        assert queue.asked() == CommandCounts(saves=1)
    finally:
        ended.set()
        thread.join()
        for connection in [begun, *silent]:
            connection.close()


def test_requests_beyond_those_answered_at_once_are_told_to_come_back(queue: CommandQueue) -> None:
    ready, begun = threading.Event(), threading.Semaphore(0)

    def slow() -> dict[str, Any]:
        begun.release()
        assert ready.wait(60)
        return {"step": 5}

    with serving(queue, slow) as served, ThreadPoolExecutor(MAX_ANSWERS) as pool:
        waiting = [pool.submit(ask, served.port, "GET", "/jobs/job/status") for _ in range(MAX_ANSWERS)]
        try:
            for _ in waiting:
                assert begun.acquire(timeout=60)
            code, told, answer = ask(served.port, "GET", "/jobs/job/status")
            assert (code, answer.headers["Retry-After"]) == (503, "1")
            assert told["error"]
        finally:
            ready.set()
        assert {each.result()[0] for each in waiting} == {200}
        assert ask(served.port, "GET", "/jobs/job/status")[0] == 200


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_comes_as_the_server_closes_is_not_lost(turns: int) -> None:
    """Whenever it stops to accept, it has the connection or has left it to the system, and nothing is printed."""
    said: list[Any] = []

    async def closing(listener: socket.socket) -> socket.socket:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        accepting = asyncio.create_task(accepted(listener))
        await asyncio.sleep(0)
        with socket.create_connection(listener.getsockname()):
            for _ in range(turns):
                await asyncio.sleep(0)
            accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                return await accepting
            await asyncio.sleep(0)
            return listener.accept()[0]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        with asyncio.run(closing(listener)):
            assert said == []


def test_many_clients_at_once_lose_no_command(job: ControlServer, queue: CommandQueue) -> None:
    def tell(_: int) -> int:
        while (code := ask(job.port, "POST", "/jobs/job/control", {"command": "save-and-stop"})[0]) == 503:
            time.sleep(0.01)
        return code

    with ThreadPoolExecutor(32) as pool:
        codes = list(pool.map(tell, range(MAX_OPEN + 20)))
    assert sorted(codes) == [202] * MAX_OPEN + [429] * 20
    assert queue.asked() == CommandCounts(saves=MAX_OPEN, stops=MAX_OPEN)
    assert len(queue.open()) == MAX_OPEN


def test_commands_are_applied_in_their_order_and_once(queue: CommandQueue) -> None:
    first, second, third = queue.submit("save"), queue.submit("stop"), queue.submit("save_and_stop")
    queue.on_agreed(CommandCounts(saves=1))
    assert [c.id for c in queue.applied()] == [first.id]
    queue.on_agreed(CommandCounts(saves=1, stops=1))
    assert [c.id for c in queue.applied()] == [first.id, second.id]
    queue.finish(queue.applied()[0].done(Path("one")))
    queue.finish(first.failed("too late"))  # has its answer
    found = queue.get(first.id)
    assert (found.state, found.reason) == ("done", None)
    queue.on_agreed(CommandCounts(saves=2, stops=2))
    assert [c.id for c in queue.applied()] == [second.id, third.id]


def test_answers_that_cannot_be_written_stop_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "control").write_text("a file where the directory should be")
    queue = CommandQueue(RunDir(tmp_path), "job")
    queue.finish(queue.submit("save").done(Path("somewhere")))
    assert not queue.has_open
    assert "the answer to control's save cannot be written" in caplog.text


def test_a_status_that_fails_is_an_answer(queue: CommandQueue) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("changed size during iteration")

    with serving(queue, broken) as served:
        assert ask(served.port, "GET", "/jobs/job/status")[0] == 500
        assert ask(served.port, "POST", "/jobs/job/control", {"command": "save"})[0] == 202


def test_the_first_free_port_is_taken_and_none_is_an_error(queue: CommandQueue) -> None:
    def make(*ports: int, host: str = "127.0.0.1") -> ControlServer:
        return ControlServer("job", queue, {"status": dict}, host=host, ports=[*ports], token=TOKEN)

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = [each.getsockname()[1] for each in (one, two)]
    first, second = make(*ports), make(*ports)
    assert [first.port, second.port] == ports
    with pytest.raises(OSError, match=f"all ports from {ports[0]} to {ports[1]} are in use on 127.0.0.1") as failed:
        make(*ports)
    assert failed.value.errno == errno.EADDRINUSE
    began = time.monotonic()
    first.close()
    first.close()
    assert time.monotonic() - began < 5, "it did not wait in vain"
    third = make(ports[0])
    assert third.port == ports[0]
    for each in (second, third):
        each.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", ports[1]))
    with pytest.raises(OSError, match=r"assign requested address"):
        make(0, host="192.0.2.1")

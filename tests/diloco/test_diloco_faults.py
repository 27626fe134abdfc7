"""Real workers and a real server through faults: kills at awkward instants, cut networks, frozen and mistaken workers,
full disks, restored servers. No sample is used twice or lost, and whoever can go on does.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import random
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from diloco.client import FakeWorker, certificate, serving
from diloco.proxy import Proxy
from diloco.reference import final_weights
from diloco.workers import ALL, BATCH, ROUNDS, STEPS, composed, finish, is_audited, largest_difference, served, worker
from program import forgather, until

from forgather_cli.diloco.client import Away, Client, Fenced
from forgather_cli.errors import ForgatherError
from forgather_cli.run_dir import RunDir


def test_kills_in_uploads_and_saves_and_cut_connections_change_no_bit(tmp_path: Path) -> None:
    with served(tmp_path, "diloco.eviction=null") as server, Proxy(server.client.port) as proxy:
        parts, port = server.run.submissions / "parts", f"diloco.port={server.client.port}"
        b = worker(server, "b", ALL)
        a = worker(server, "a", ALL, address=proxy.address)
        uploaded = bytearray()

        def kill_in_upload(content: bytes) -> None:
            if uploaded or b"PUT /parts/" in content:
                uploaded.extend(content)
            if len(uploaded) > 10_000:
                a.process.kill()
                raise ConnectionResetError

        proxy.saw = kill_in_upload
        a.finish()
        assert len(uploaded) > 10_000
        proxy.saw = lambda content: None
        until(lambda: not list(parts.glob(".*")))  # until the server has seen it
        for part in parts.iterdir():
            assert hashlib.sha256(part.read_bytes()).hexdigest() == part.stem

        rng = random.Random(7)
        proxy.most = lambda: rng.choice((rng.randint(1, 2_000), rng.randint(2_000, 200_000)))
        # it dies when its second change is made, and not yet in a checkpoint: its first one is all it knows of
        in_save = ("save_steps=1000", "+callbacks.fault={_target_:faults.Fault,faults:[save-kill],rank:0,after:5}")
        a = worker(server, "a", ALL, *in_save, address=proxy.address)
        until(lambda: (server.run.weights / "round-00000001.safetensors").exists(), 0)
        server.process.kill()  # before anybody was told
        server.process.wait()
        is_open = server.run.rounds.read_text().count("\n") > 1  # the next start does not save what this one has closed
        with serving(server.run.root, port, resume=True) as again:
            until(lambda: is_open or any(server.run.checkpoints.glob("*step-00000001*")), 0)  # while it is written
            again.process.kill()
        with serving(server.run.root, port, resume=True) as again:
            a.finish()
            assert a.process.poll() == -signal.SIGKILL
            assert RunDir(tmp_path / "a").checkpoint_steps()[-1] == STEPS
            first = [sent for sent in again.ledger()[1]["closed"]["submissions"] if sent["worker"] == "a"]
            assert forgather("diloco", "save", str(again.run.root)) == 0
            (parts / f"{first[0]['parts'][0]}.safetensors").unlink(missing_ok=True)  # as some later save would
            a = worker(again, "a", ALL, address=proxy.address)
            finish(a, b)
            assert proxy.cuts > 3
            until(lambda: again.is_at(ROUNDS))
            found, used = again.client.latest(), again.used_samples()
            late = worker(again, "late", ALL)
            finish(late)
            (told,) = [each for each in again.client.status()["workers"] if each["worker"] == "late"]
            assert told["state"] == "left", "it had no step to train, and nobody waits for it"
            assert is_audited(again.run)
    expected = final_weights([composed(ALL)] * 2, tmp_path / "reference", rounds=ROUNDS, steps=STEPS)
    assert largest_difference(found, expected) == 0.0
    assert used == list(range(2 * ROUNDS * STEPS * BATCH))


def test_workers_that_freeze_die_or_stop_cost_the_others_nothing(tmp_path: Path) -> None:
    """Of three: b freezes as it fetches the second round and comes back when that is long over, c dies in it and never
    does, and a, which goes on alone, is ended by a callback."""
    with served(tmp_path, "diloco.eviction=6", workers=3) as server, Proxy(server.client.port) as proxy:
        early = ("max_steps=1000", "eval_strategy=steps", "eval_steps=7",
                 "+callbacks.early_stopping={patience:1,threshold:1000.0}")  # fmt: skip
        dies = ("max_steps=1000", "+callbacks.fault={_target_:faults.Fault,faults:[step-kill],rank:0,after:4}")
        thawed = threading.Event()

        def freeze(content: bytes) -> None:
            if b"GET /weights/1/header" in content and not thawed.is_set():
                b.process.send_signal(signal.SIGSTOP)
                thawed.wait(120)

        proxy.saw = freeze
        a, c = worker(server, "a", *early), worker(server, "c", *dies)
        b = worker(server, "b", f"max_steps={6 * STEPS}", address=proxy.address)
        a.read_until("waiting for the other workers")
        twin = worker(server, "twin", ALL, "callbacks.diloco.worker_id=a")
        assert twin.finish() == 2, twin.output
        assert f"process {a.process.pid} on {socket.gethostname()}" in twin.output
        c.finish()
        finish(a)
        b.process.send_signal(signal.SIGCONT)
        thawed.set()
        finish(b)
        until(lambda: server.is_at(6))
        lines = server.ledger()
        assert is_audited(server.run)
    counted = [[sent["worker"] for sent in line["closed"]["submissions"]] for line in lines[1:]]
    assert counted == [["a", "b", "c"], ["a"], ["a"], ["a"], [], ["b"]]
    assert lines[2]["closed"]["evicted"] == ["b", "c"]
    assert lines[2]["members"][0]["ranges"][0][0] < lines[1]["cursor"], "their samples pass on to a"


def test_tls_void_changes_a_full_disk_and_a_stop_in_a_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ours, key), (another, _) = (certificate(tmp_path, name) for name in ("ours", "another"))
    tls = (f"diloco.tls_certificate={ours}", f"diloco.tls_key={key}")
    with served(tmp_path, *tls, workers=1) as server:
        address = f"https://127.0.0.1:{server.client.port}"
        trusts = f"callbacks.diloco.ca_file={ours}"
        for wrong, named in ((another, "no certificate to trust"), ("missing.pem", "ca_file")):
            process = worker(server, "x", ALL, f"callbacks.diloco.ca_file={wrong}", address=address)
            assert (process.finish(), named in process.output) == (2, True), process.output
            assert "Traceback" not in process.output

        void = f"+callbacks.glitch={{_target_:diloco.glitches.Wrong,every:{STEPS}}}"
        process = worker(server, "void", "max_steps=100", void, trusts, address=address)
        assert process.finish() == 1, process.output
        assert "rejected 3 rounds of this worker in a row" in process.output
        closed = [line["closed"] for line in server.ledger()[1:]]
        assert [[name for name, _ in each["rejected"]] for each in closed] == [["void"]] * len(closed)

        before = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        slow = "+callbacks.glitch={_target_:diloco.glitches.Slow,after:" + f"{(len(closed) + 2) * STEPS + 1}}}"
        a = worker(server, "a", "max_steps=100", slow, trusts, address=address)
        assert "trying again" in a.read_until("the server's disk: ")
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, before)
        until((tmp_path / "a" / "slow").exists)
        capsys.readouterr()
        assert forgather("diloco", "status", str(server.run.root), "--json") == 0
        assert [each["state"] for each in json.loads(capsys.readouterr().out)["workers"]] == ["training", "evicted"]
        assert forgather("diloco", "stop", "--now", str(server.run.root)) == 0
        (tmp_path / "a" / "go").touch()
        finish(a)
        ended = json.loads(RunDir(tmp_path / "a").exit.read_text())
        assert ended["reason"] == "stopped by the DiLoCo server: stopped by a command"
        assert is_audited(server.run)


def test_a_change_that_is_void_leaves_no_trace_though_its_worker_is_killed_untold(tmp_path: Path) -> None:
    """What its compression has lost is not sent the next time: all ends as if it was never killed."""
    ends = []
    for is_killed in (True, False):
        (root := tmp_path / ("killed" if is_killed else "not")).mkdir()
        with served(root, "diloco.compression=int8", workers=3) as server:
            others = [FakeWorker(server.client, name, "int8") for name in "ab"]
            for other in others:
                other.register(data=None, tokenizer=None)
            wrong = f"+callbacks.glitch={{_target_:diloco.glitches.Wrong,every:{2 * STEPS}}}"
            c = worker(server, "c", ALL, wrong)
            for number in range(ROUNDS):
                for other in others:
                    assert other.next(number - 1)["state"] == "open", c.output
                until(lambda: server.client.status()["waits_for"] == ["a", "b"])
                if number == 1 and is_killed:
                    c.process.kill()
                    c.finish()
                    c = worker(server, "c", ALL, wrong)
                    c.read_until("waiting for the other workers")  # it has asked again
                for other in others:
                    other.submit({name: values / 10 for name, values in other.change(number).items()}, 10)
            finish(c)
            until(lambda: server.is_at(ROUNDS))
            closed = [line["closed"] for line in server.ledger()[1:]]
            assert [[name for name, _ in each["rejected"]] for each in closed] == [[], ["c"], []]
            assert "not finite" in c.output
            assert "round 1 of this worker does not count" in c.output
            ends.append(server.client.latest())
    assert largest_difference(*ends) == 0.0


def test_a_server_that_was_restored_from_an_older_copy(tmp_path: Path) -> None:
    slow = f"+callbacks.glitch={{_target_:diloco.glitches.Slow,after:{2 * STEPS + 1}}}"
    with served(tmp_path, workers=2) as server:
        port = f"diloco.port={server.client.port}"
        a, b = (worker(server, name, "max_steps=18", slow) for name in "ab")
        until((server.run.root / "checkpoints" / "step-00000001").exists)
        server.process.kill()
        shutil.copytree(server.run.root, tmp_path / "copy")
        with serving(server.run.root, port, resume=True):
            for name in "ab":
                until((tmp_path / name / "slow").exists)
    b.process.send_signal(signal.SIGSTOP)
    for name in "ab":
        (tmp_path / name / "go").touch()
    shutil.rmtree(server.run.root)
    (tmp_path / "copy").rename(server.run.root)
    at = len(server.run.rounds.read_text().splitlines()) - 1
    with serving(server.run.root, port, resume=True):
        assert a.finish() == 2, a.output
        assert f"a stands on round {2} (" in a.output
        assert f"it has round {at} (" in a.output
    with serving(server.run.root, port, "diloco.rewind=true", resume=True) as again:
        b.process.send_signal(signal.SIGCONT)
        a = worker(again, "a", "max_steps=18")
        for process in (a, b):
            finish(process)
            assert "has lost round 2" in process.output
        assert is_audited(again.run)


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[Client]:
    """A client of something that does this with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    answer(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    with contextlib.closing(Client(f"127.0.0.1:{listener.getsockname()[1]}", "t" * 16)) as client:
        yield client
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.mark.parametrize(("status", "error"), [("200 OK", None), ("409 Conflict", Fenced)])
def test_an_answer_that_is_cut_anywhere_is_asked_for_again(status: str, error: type[ForgatherError] | None) -> None:
    body = json.dumps({"state": "ok", "error": "register anew", "code": "fenced"})
    whole = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
    sizes = iter([*range(len(whole)), len(whole)])

    def cut(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(whole[: next(sizes)])

    with answering(cut) as client:
        for _ in range(len(whole)):
            with pytest.raises(Away):
                client.call("/status")
            client.close()
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            assert client.call("/status")["state"] == "ok"


def test_a_server_that_does_not_want_a_body_is_heard(tmp_path: Path) -> None:
    """It answers and hangs up while the body, more than the network holds, is still being sent."""
    body = json.dumps({"error": "the server's disk: No space left on device; try again later"}).encode()
    file = tmp_path / "part"
    file.write_bytes(bytes(32 << 20))

    def refuse(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        head = f"HTTP/1.1 507 Full\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
        connection.sendall(head + body)
        time.sleep(0.2)

    with answering(refuse) as client, pytest.raises(Away, match="No space left"):
        client.put("/parts/0", file)


def test_a_connection_that_was_idle_is_not_used_again(tmp_path: Path) -> None:
    """As servers drop those after some seconds."""

    class Short(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 2.5

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "13")
            self.end_headers()
            self.wfile.write(b'{"state":"o"}')

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Short) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with contextlib.closing(Client(f"127.0.0.1:{server.server_port}", "t" * 16)) as client:
            client.call("/status")
            time.sleep(2.7)
            assert client.call("/status") == {"state": "o"}
        server.shutdown()

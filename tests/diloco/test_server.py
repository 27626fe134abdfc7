"""A DiLoCo server as a process: three rounds and a half, killed in between, against plain PyTorch; and bad input."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from diloco.client import TINY, Client, FakeWorker, Served, serving
from diloco.workers import is_audited
from program import Process, forgather, until
from terminal import Terminal
from torch import Tensor
from typer.testing import CliRunner
from whole_batch import equal

from forgather_cli.cli.app import app
from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco.ledger import read_ledger
from forgather_cli.diloco.serve import listening, token_of
from forgather_cli.errors import SetupError
from forgather_cli.inference.source import load_source
from forgather_cli.run_dir import RunDir

Weights = dict[str, Tensor]
SETTINGS = (*TINY, "diloco.compression=fp32", "diloco.compression_down=bf16", "diloco.sync_every=2",
            "diloco.keep_submissions=true")  # fmt: skip


def reference(initial: Weights, rounds: list[list[tuple[int, Weights]]]) -> tuple[list[Weights], Weights]:
    """What workers hold after each round, and the master weights, by plain PyTorch: (targets, change) by slot."""
    master = {name: torch.nn.Parameter(values.clone()) for name, values in initial.items()}
    published, history = {name: values.clone() for name, values in initial.items()}, []
    sgd = torch.optim.SGD(master.values(), lr=0.7, momentum=0.9, nesterov=True)
    for sent in rounds:
        targets = sum(count for count, _ in sent)
        for name, weights in master.items():
            weights.grad = torch.zeros_like(weights)
            for count, change in sent:
                weights.grad += torch.tensor(count / targets, dtype=torch.float32) * change[name]
        sgd.step()
        for name, weights in master.items():
            published[name] = published[name] + (weights.detach() - published[name]).bfloat16().float()
        history.append(dict(published))
    return history, {name: weights.detach() for name, weights in master.items()}


@dataclass
class Story:
    run: Path
    workers: dict[str, FakeWorker]
    fetched: dict[int, Weights] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Rounds 0 to 3. The server is killed after round 0 was published, when one of two has sent its part of round 1."""
    root = tmp_path_factory.mktemp("story") / "run"
    with serving(root, *SETTINGS, "diloco.save_every=100") as served:
        told = Story(root, {name: FakeWorker(served.client, name) for name in "ab"})
        a, b, answers, initial = told.workers["a"], told.workers["b"], told.answers, served.client.weights(0)
        told.fetched[0] = initial
        answers["b registers"] = b.register()
        answers["alone"] = b.next(-1, wait=0.0)
        a.register()
        for worker in (b, a):  # the last slot first
            worker.next(-1)
            answers[f"{worker.name} sends 0"] = worker.submit(worker.change(0), ord(worker.name))
        told.fetched[1] = served.client.weights(a.next(0)["round"])
        line = read_ledger(served.run.rounds)[0]
        stood = {"round": 0, "hash": line.hash, "ranges": line.member("a").ranges}
        answers["a sends 0 again"] = a.submit(a.sent[0], **stood)
        answers["a sends 1"] = a.submit(a.change(1))
        served.end(signal.SIGKILL)
    with serving(root, "diloco.quorum=1", "diloco.grace=3", resume=True) as served:
        a.client = b.client = served.client
        a.register(), b.register()
        answers["weights 1 after the restart"] = equal(served.client.weights(1), told.fetched[1])
        answers["changes 1 after the restart"] = served.client.weights(1, "changes")
        answers["a sends 1 again"] = a.submit(a.sent[1])
        if b.next(0)["round"] == 1:  # unless the grace has passed already, on a machine that is busy
            b.submit(b.change(1))
        told.fetched[2] = served.client.weights(a.next(1)["round"])
        b.next(1)
        answers["a sends 2"] = a.submit(a.change(2), 50)
        told.fetched[3] = served.client.weights(a.next(2)["round"])
        answers["b sends 2"] = b.submit(b.change(2))
        b.next(2)
        broken = a.change(3)
        next(iter(broken.values()))[0] = float("nan")
        answers["a sends 3"] = a.submit(broken)
        answers["b sends 3"] = b.submit(b.change(3))
        told.fetched[4] = served.client.weights(b.next(3)["round"])
        answers["status"] = served.client.status()
        answers["saved"] = CliRunner().invoke(app, ["diloco", "save", str(root)])
        answers["shown"] = CliRunner().invoke(app, ["diloco", "status", str(root)])
        waiting = [threading.Thread(target=worker.next, args=(4,)) for worker in (a, b)]
        for thread in waiting:
            thread.start()
        until(lambda: not any(each["silent"] for each in served.client.status()["workers"]))  # they wait there
        answers["stopped"] = CliRunner().invoke(app, ["diloco", "stop", "--now", str(root)])
        for thread in waiting:
            thread.join()
        answers["exit code"] = served.process.wait(60)
    first = RunDir(root).weights / "round-00000000.safetensors"
    for path in set(first.parent.iterdir()) - {first}:
        path.unlink()
    with serving(root, resume=True) as served:  # of the checkpoint alone
        a.client = served.client
        a.register()
        answers["weights 4 after the resume"] = served.client.weights(4)
        waiting = [threading.Thread(target=a.next, args=(4,))]
        waiting[0].start()
        until(lambda: not served.client.status()["workers"][0]["silent"])  # it waits there
        answers["exit code of a signal"] = served.end()
        waiting[0].join()
    return told


def inode(path: Path) -> int:
    """0: there is none. At once: between two looks a directory may be set aside."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("before", ["nothing", "train", "server"])
def test_what_was_there_comes_back_where_a_start_of_the_other_kind_in_its_place_is_killed(
    tmp_path: Path, before: str
) -> None:
    """A start that is killed as soon as it has written what its directory is for; of a server alone, it is one."""
    run = RunDir(tmp_path / "run")
    training = ("train", "default", *TINY, "callbacks=minimal", "device=cpu", f"output_dir={run.root}")
    server = ("diloco", "server", "default", f"output_dir={run.root}", "diloco.port=0", *SETTINGS)
    if before == "train":
        assert forgather(*training, "max_steps=1") == 0
    elif before == "server":
        with serving(run.root, *SETTINGS) as served:
            assert served.client.status()["checkpoint"] == 0
            assert served.end() == 75
    made = inode(run.config)
    with Process(*(training if before == "server" else server), *["overwrite_output_dir=true"] * (made > 0)) as job:
        job.until(lambda: inode(run.config) not in (0, made), pause=0.001)
        job.process.kill()
    if before == "train":
        assert forgather("resume", str(run.root), "max_steps=2") == 0
        assert run.checkpoint_steps()[-1] == 2
        assert not run.diloco.exists()
    else:
        with serving(run.root, resume=True) as served:
            assert served.client.status()["state"] == "waiting"


def test_the_weights_are_those_of_plain_pytorch_bit_for_bit_also_after_a_kill(story: Story) -> None:
    assert is_audited(RunDir(story.run))
    rounds = [
        [(each.targets, story.workers[each.worker].sent[line.round - 1]) for each, _ in line.closed.submissions]
        for line in read_ledger(RunDir(story.run).rounds)[1:]
    ]
    assert [len(each) for each in rounds] == [2, len(rounds[1]), 1, 1]
    history, master = reference(story.fetched[0], rounds)
    for number, expected in enumerate(history, start=1):
        assert equal(story.fetched[number], expected), number
    assert story.answers["weights 1 after the restart"]
    assert equal(story.answers["weights 4 after the resume"], history[3])
    saved = safetensors.torch.load_file(RunDir(story.run).checkpoint(4) / "model" / "model.safetensors")
    assert equal({name: saved[name] for name in master}, master)


def test_what_workers_are_answered(story: Story) -> None:
    answers = story.answers
    assert answers["b registers"]["stood"] == "fresh"
    assert answers["b registers"]["settings"]["compression_down"] == "bf16"
    assert answers["alone"] == {"state": "waiting", "why": "1 of 2 workers have registered"}
    for name in ("b sends 0", "a sends 0", "a sends 1", "a sends 1 again", "a sends 2", "b sends 3"):
        assert answers[name] == {"status": "pending"}, name
    assert answers["a sends 0 again"] == {"status": "counted"}
    assert answers["b sends 2"] == {"status": "late", "reason": "round 2 has ended without it"}
    assert answers["a sends 3"]["status"] == "rejected"
    assert "not finite" in answers["a sends 3"]["reason"]
    assert story.workers["b"].offer == {"state": "stopped", "reason": "stopped by a command"}
    assert story.workers["a"].offer["state"] == "waiting", "at the signal"


def test_commands_show_save_and_stop(story: Story) -> None:
    answers, run = story.answers, RunDir(story.run)
    assert answers["status"]["round"] == 4
    assert [worker["worker"] for worker in answers["status"]["workers"]] == ["a", "b"]
    assert answers["saved"].output.strip() == str(run.checkpoint(4))
    assert "round 4 waits for a, b" in answers["shown"].output
    assert (answers["stopped"].exit_code, answers["exit code"]) == (0, 0)
    ended = json.loads(run.exit.read_text())
    assert (ended["state"], ended["step"], ended["code"]) == ("stopped", 4, answers["exit code of a signal"])
    assert not run.diloco_address.exists()
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [(record["step"], record["members"]) for record in records][-2:] == [(3, 1), (4, 1)]
    missing = CliRunner().invoke(app, ["diloco", "status", str(story.run)])
    assert "forgather resume" in str(missing.exception)


def test_replay_makes_the_same_weights_again_and_sees_others(story: Story) -> None:
    ran = CliRunner().invoke(app, ["diloco", "replay", str(story.run)])
    assert (ran.exit_code, ran.output.startswith("equal bit for bit after 4 rounds")) == (0, True), ran.output
    closed = read_ledger(RunDir(story.run).rounds)[1].closed
    part = story.run / "submissions" / "parts" / f"{closed.submissions[0][0].parts[0]}.safetensors"
    before = part.read_bytes()
    part.write_bytes(before[:-2] + bytes([before[-2] ^ 64]) + before[-1:])
    ran = CliRunner().invoke(app, ["diloco", "replay", str(story.run), "--json"])
    part.write_bytes(before)
    assert (ran.exit_code, json.loads(ran.output)["equal"]) == (1, False)


def test_the_run_is_a_run_like_any_other(story: Story) -> None:
    source = load_source(story.run, device="cpu")
    assert source.step == 4
    ran = CliRunner().invoke(app, ["generate", str(story.run), "--prompt", "a", "--max-new-tokens", "2"])
    assert ran.exit_code == 0, ran.output
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(RunDir(story.run).checkpoint(4) / "model")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, source.model(tokens), rtol=0, atol=1e-5)


def test_status_on_a_terminal_ends_with_the_server(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with serving(root, *TINY, source="diloco.workers=1") as served:  # without a recipe
        terminal = Terminal("diloco", "status", str(root))
        terminal.read_until("round -")
        assert CliRunner().invoke(app, ["diloco", "stop", "--now", str(root)]).exit_code == 0
        served.process.wait()
        assert terminal.finish() == 0, terminal.output
        assert "it has ended" in terminal.output


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("bad") / "run"
    with serving(root, *TINY, "diloco.compression=bf16", "diloco.workers=1") as served:
        yield served


@pytest.fixture(scope="module")
def worker(served: Served) -> FakeWorker:
    """Registered, with a round."""
    made = FakeWorker(served.client, "w", compression="bf16")
    made.register()
    made.next(-1)
    return made


def test_a_stranger_opens_nothing_and_another_version_is_told_both(served: Served) -> None:
    assert served.run.diloco_token.stat().st_mode & 0o777 == 0o600
    assert (len(served.client.token), served.client.token in served.said()) == (64, False)
    for path in ("/status", "/parts/0", "/nothing"):
        answer = Client(served.client.port, "x" * 64).ask("GET", path)
        assert (answer.status, "DILOCO_TOKEN" in answer.json["error"]) == (401, True)
    answer = Client(served.client.port, served.client.token, version="1").ask("GET", "/status")
    assert (answer.status, "2 here, 1 there" in answer.json["error"]) == (426, True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/register", b"{", 400),
        ("/register", b"[]", 400),
        ("/register", {"worker": 3}, 400),
        ("/next", {"generation": "1", "after": -1, "wait": 0}, 400),
        ("/next", {"generation": 10**9, "after": -1, "wait": 0}, 409),
        ("/submit", {"generation": 1, "round": 0, "hash": "", "parts": ["../x"], "targets": 1, "leaves": False,
                     "ranges": [], "speed": None}, 400),
        ("/heartbeat", b"x" * ((1 << 20) + 1), 413),
        ("/weights/0", {"ranges": [[0, 10**12]]}, 400),
        ("/weights/9", {"ranges": [[0, 1]]}, 404),
        ("/control", {"command": "stop_now"}, 403),
        ("/weights/" + "9" * 5_000, {"ranges": [[0, 1]]}, 404),
        ("/weights/" + "9" * 40, {"ranges": [[0, 1]]}, 404),
        ("/weights/0", {"ranges": [[0, 10**30]]}, 400),
        ("/parts/" + "9" * 5_000, b"", 404),
        ("/next", b'{"generation": 1, "after": NaN, "wait": 0}', 400),
        ("/next", b'{"generation": 1, "after": -1, "wait": Infinity}', 400),
        ("/heartbeat", b'{"generation": 1, "tokens_per_second": NaN}', 400),
        ("/heartbeat", {"generation": 1, "step": 10**400}, 400),
        ("/heartbeat", b'{"generation": 1, "step": %s}' % (b"9" * 5_000), 400),
    ],
)  # fmt: skip
def test_messages_that_are_refused(served: Served, worker: FakeWorker, path: str, body: Any, status: int) -> None:
    answer = served.client.ask("POST", path, body)
    assert answer.status == status, answer.content
    assert answer.json["error"]


@pytest.mark.parametrize(
    "more", [{"batch": 10**30}, {"batch": 0}, {"batch": 2**21}, {"pid": -1}, {"round": 10**400}, {"host": "h" * 257}]
)
def test_registrations_with_impossible_numbers(worker: FakeWorker, more: dict[str, Any]) -> None:
    told = FakeWorker(worker.client, "x").registration(**more)
    answer = worker.client.ask("POST", "/register", told)
    assert (answer.status, next(iter(more)) in answer.json["error"]) == (400, True), answer.content
    assert len(answer.content) < 1000


def test_control_wants_a_token_of_its_own(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = served.run.diloco_control_token
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    assert (str(file) in served.said(), token in served.said()) == (True, False)
    answer = Client(served.client.port, token).ask("POST", "/control", {"command": "rm"})
    assert (answer.status, "stop_now" in answer.json["error"]) == (400, True)
    address = ("--server", f"127.0.0.1:{served.client.port}")

    def saved(*words: str) -> Any:
        return CliRunner().invoke(app, ["diloco", "save", *address, *words])

    monkeypatch.delenv("DILOCO_CONTROL_TOKEN", raising=False)
    assert "DILOCO_CONTROL_TOKEN, or give --control-token-file" in str(saved().exception)
    assert "a member's token gives no control" in str(
        saved("--control-token-file", str(served.run.diloco_token)).exception
    )
    assert saved("--control-token-file", str(file)).exit_code == 0 or served.client.status()["round"] is None
    monkeypatch.setenv("DILOCO_CONTROL_TOKEN", token)
    assert "control" not in str(saved().exception)


def test_parts_that_nobody_names_are_bounded_and_go_with_the_round(tmp_path: Path) -> None:
    """Twice a change for each worker, by the generation that it shows; one that shows none has the others' together."""
    with serving(tmp_path / "run", *TINY, "diloco.compression=fp32", "diloco.workers=2") as served:
        a, b = workers = [FakeWorker(served.client, name) for name in "ab"]
        for worker in workers:
            worker.register()
        for worker in workers:
            worker.next(-1)
        size = sum(map(len, a.parts(a.change(0))))

        def put(content: bytes, worker: FakeWorker | None = None) -> int:
            more = {"Forgather-Generation": str(worker.generation)} if worker else {}
            return served.client.ask("PUT", f"/parts/{hashlib.sha256(content).hexdigest()}", content, **more).status

        def stored() -> int:
            return sum(path.stat().st_size for path in (served.run.submissions / "parts").glob("*.safetensors"))

        assert [put(bytes([number]) * size, a) for number in range(3)] == [202, 202, 413]
        assert [put(bytes([9]) * size, worker) for worker in (b, a)] == [202, 200], "it is there"
        assert put(b"other", FakeWorker(served.client, "z", generation=7)) == 409
        assert [put(bytes([20 + number]) * size) for number in range(5)] == [202, 202, 202, 202, 413]
        assert stored() == 7 * size
        a.register()  # what its start before has sent goes
        for worker in workers:
            assert worker.submit(worker.change(0))["status"] == "pending"
        for worker in workers:
            assert worker.next(0)["round"] == 1
        assert stored() == 6 * size, "what was named, and what is of nobody knows whom, until a save"
        assert put(bytes([0]) * size, a) == 202
        a.register()
        assert put(bytes([1]) * size, a) == 202
        assert put(bytes([0]) * size, a) == 202, "those of its start before are gone"


def half_sent(client: Client, content: bytes, generation: int) -> socket.socket:
    """A PUT of a part that has come to its middle."""
    head = (
        f"PUT /parts/{hashlib.sha256(content).hexdigest()} HTTP/1.1\r\nHost: x\r\nForgather-Wire: {client.version}\r\n"
    )
    head += f"Authorization: Bearer {client.token}\r\nForgather-Generation: {generation}\r\n"
    connection = socket.create_connection(("127.0.0.1", client.port))
    connection.settimeout(60)
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[: len(content) // 2])
    return connection


def test_a_part_that_comes_twice_at_once_is_counted_once_and_stays(tmp_path: Path) -> None:
    with serving(tmp_path / "run", *TINY, "diloco.compression=fp32", "diloco.workers=2") as served:
        a, b = workers = [FakeWorker(served.client, name, num_parts=1) for name in "ab"]
        for worker in workers:
            worker.register()
        for worker in workers:
            worker.next(-1)
        folder = served.run.submissions / "parts"
        ((content,), size) = a.parts(a.change(0)), len(a.parts(a.change(0))[0])
        names = [hashlib.sha256(bytes([number]) * size).hexdigest() for number in range(3)]

        def put(number: int) -> int:
            whose = {"Forgather-Generation": str(b.generation)}
            return served.client.ask("PUT", f"/parts/{names[number]}", bytes([number]) * size, **whose).status

        def coming() -> int:
            return len(list(folder.glob(".tmp-*")))

        with half_sent(served.client, bytes([0]) * size, b.generation):
            until(coming)
        until(lambda: not coming())
        assert put(0) == 202
        with half_sent(served.client, content, a.generation) as slow:
            until(coming)
            assert a.submit(a.change(0))["status"] == "pending", "its parts have come by another connection"
            slow.sendall(content[len(content) // 2 :])
            assert b" 202 " in slow.recv(1000)
        with half_sent(served.client, bytes([1]) * size, b.generation):
            until(coming)
            assert put(1) == 413, "twice of it, and another one, are too many"
        until(lambda: not coming())
        assert [put(1), put(2)] == [202, 413], "the one that was cut takes nothing of its count"
        a.register()  # what it has sent and not named goes
        assert (folder / f"{hashlib.sha256(content).hexdigest()}.safetensors").exists()


def test_in_async_mode_parts_of_nobody_knows_whom_go_with_each_save(tmp_path: Path) -> None:
    settings = (*TINY, "diloco.compression=fp32", "diloco.mode=async", "diloco.workers=2", "diloco.save_every=1")
    with serving(tmp_path / "run", *settings) as served:
        a, b = workers = [FakeWorker(served.client, name, shows_generation=name == "a") for name in "ab"]
        for worker in workers:
            worker.register()
        for worker in workers:
            worker.next(-1)
        size = sum(map(len, a.parts(a.change(0))))

        def is_saved(number: int) -> bool:
            return served.client.status()["checkpoint"] == number

        def stored() -> int:
            found = 0
            for path in (served.run.submissions / "parts").glob("*.safetensors"):
                with contextlib.suppress(FileNotFoundError):  # a save has deleted it since
                    found += path.stat().st_size == size
            return found

        for round in range(3):
            for number in range(5):
                content = bytes([10 * round + number]) * size
                answer = served.client.ask("PUT", f"/parts/{hashlib.sha256(content).hexdigest()}", content)
                assert answer.status == (202 if number < 4 else 413)
            assert a.submit(a.change(round))["status"] == "counted"
            a.next(round)
            until(partial(is_saved, round + 1))
            until(lambda: not stored())
        assert b.submit(b.change(0))["status"] == "counted", "what it names is kept"


def test_many_registrations_do_not_rewrite_the_file_of_all(tmp_path: Path) -> None:
    with serving(tmp_path / "run", *TINY, "diloco.workers=2000") as served:
        written = inode(served.run.diloco_workers)
        for number in range(300):
            FakeWorker(served.client, f"w{number}").register()
        lines = served.run.diloco_workers.read_bytes().splitlines()
        assert (inode(served.run.diloco_workers), len(lines)) == (written, 301)
        served.end(signal.SIGKILL)
    with serving(tmp_path / "run", resume=True) as served:
        assert len(served.client.status()["workers"]) == 300
        answer = served.client.ask("POST", "/register", FakeWorker(served.client, "w7").registration(secret="another"))
        assert (answer.status, answer.json["code"]) == (409, "held")


def test_parts_that_are_wrong_too_long_or_cut_leave_nothing(served: Served, worker: FakeWorker) -> None:
    folder, client = served.run.submissions / "parts", served.client
    before = sorted(folder.iterdir())
    wrong = hashlib.sha256(b"other").hexdigest()
    assert client.ask("PUT", f"/parts/{wrong}", b"content").status == 400
    assert client.ask("PUT", f"/parts/{wrong}", b"", **{"Content-Length": str(10**12)}).status == 413
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        head = f"PUT /parts/{wrong} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.token}\r\n"
        head += f"Forgather-Wire: {client.version}\r\n"
        connection.sendall(f"{head}Content-Length: 5\r\n\r\noth".encode())
    assert client.ask("GET", f"/parts/{wrong}").status == 404
    until(lambda: sorted(folder.iterdir()) == before)  # the server has seen the cut
    assert client.ask("PUT", f"/parts/{wrong}", b"other").status == 202
    assert client.ask("GET", f"/parts/{wrong}").status == 200
    assert client.ask("PUT", f"/parts/{wrong}", b"other").status == 200


def test_submissions_that_do_not_count(worker: FakeWorker) -> None:
    change, offer = worker.change(0), worker.offer
    parts = worker.put(worker.parts(change))
    told = {"generation": worker.generation, "round": 0, "hash": offer["hash"], "parts": parts, "targets": 1,
            "leaves": False, "ranges": offer["ranges"]}  # fmt: skip
    for wrong, status in (
        ({"hash": "0" * 64}, 409),
        ({"ranges": [[0, 10**9]]}, 400),
        ({"round": 7}, 400),
        ({"generation": worker.generation + 5}, 409),
    ):
        assert worker.client.ask("POST", "/submit", {**told, **wrong}).status == status, wrong
    lacking = worker.client.post("/submit", **{**told, "parts": [parts[0], "0" * 64]})
    assert lacking == {"status": "lacking", "parts": ["0" * 64]}
    answer = worker.client.post("/submit", **{**told, "parts": parts[:1]})
    assert answer["status"] == "rejected"
    assert "rows" in answer["reason"]
    assert worker.next(0)["round"] == 1, "the round goes on without it"
    heartbeat = {"step": 7, "tokens_per_second": 12.5, "sent": 1, "received": 2}
    assert worker.client.post("/heartbeat", generation=worker.generation, **heartbeat) == {"state": "ok"}
    (shown,) = worker.client.status()["workers"]
    assert (shown["step"], shown["tokens_per_second"]) == (7, 12.5)


def test_a_token_that_is_too_short_is_told_by_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "token").write_text("short")
    with pytest.raises(SetupError, match=r"diloco\.token_file: .*token must hold 16 letters"):
        token_of(tmp_path / "unused", "DILOCO_TOKEN", str(file))
    monkeypatch.setenv("DILOCO_CONTROL_TOKEN", "short")
    with pytest.raises(SetupError, match=r"DILOCO_CONTROL_TOKEN: .*kept must hold 16 letters"):
        token_of(tmp_path / "kept", "DILOCO_CONTROL_TOKEN")


def test_a_port_in_use_is_a_set_up_mistake(served: Served) -> None:
    taken = DilocoServerSettings(port=served.client.port)
    with pytest.raises(SetupError, match="choose another one"), listening(taken):
        pass

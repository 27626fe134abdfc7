"""A server and workers whose files cannot be read any more: they go on, or say which command does."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
from pathlib import Path

import pytest
from diloco.client import TINY, FakeWorker, serving
from diloco.workers import ALL, ROUNDS, finish, is_audited, served, worker
from program import printed, until
from safetensors.torch import load_file
from whole_batch import equal

from forgather_cli.checkpoint.choice import would_resume
from forgather_cli.run_dir import RunDir


@pytest.mark.parametrize("is_gone", [True, False])
def test_who_takes_part_is_made_again_and_what_was_sent_is_sent_again(is_gone: bool, tmp_path: Path) -> None:
    """Where nobody says so, a worker may have another secret, and one that does not come back is given up."""
    settings = (*TINY, "diloco.compression=fp32", "diloco.sync_every=2", "diloco.workers=3", "diloco.eviction=3")
    with serving(tmp_path / "run", *settings) as server:
        workers = [FakeWorker(server.client, name) for name in "abc"]
        for each in workers:
            each.register()
        for each in workers:
            each.next(-1)
        a, b, _ = workers
        assert a.submit(a.change(0))["status"] == "pending"
        server.end(signal.SIGKILL)
    run = RunDir(tmp_path / "run")
    (manifest,) = run.submissions.glob("round-*.json")
    for path in (run.diloco_workers, manifest):
        path.unlink() if is_gone else path.write_bytes(path.read_bytes()[9:])
    with serving(tmp_path / "run", resume=True) as server:
        a.client = b.client = server.client
        assert a.register(secret="another")["stood"] == "fresh"
        b.register()
        for each in (a, b):
            each.next(-1)
            each.submit(each.change(0))
        waiting = [threading.Thread(target=each.next, args=(0,)) for each in (a, b)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        closed = server.ledger()[1]["closed"]
        assert [sent["worker"] for sent in closed["submissions"]] == ["a", "b"]
        assert closed["evicted"] == ["c"]
        assert is_audited(server.run)
        for path in () if is_gone else (run.diloco_workers, manifest):
            assert f"{path}: cannot be read" in server.said()
            assert path.with_name(f"{path.name}.bak").exists()


def test_a_worker_that_has_lost_its_id_is_told_how_it_goes_on_as_the_same(tmp_path: Path) -> None:
    with served(tmp_path, "diloco.eviction=1", workers=1) as server:
        stop = ("+callbacks.fault={_target_:faults.Fault,faults:[step-stop],rank:0,after:4}",)
        first = worker(server, "a", ALL, *stop)
        assert first.finish() == 75, first.output
        identity = tmp_path / "a" / "diloco_worker" / "worker.json"
        whole = json.loads(identity.read_bytes())
        identity.write_bytes(identity.read_bytes()[:-9])
        refused = worker(server, "a", ALL)
        assert refused.finish() == 2, refused.output
        (said,) = [line for line in refused.output.splitlines() if line.startswith("error: ")]
        assert f"{identity}: cannot be read" in said
        assert "remove it, and resume with callbacks.diloco.worker_id=ID" in said
        identity.unlink()
        until(lambda: server.client.status()["workers"][0]["silent"] > 1)
        finish(worker(server, "a", ALL))  # with callbacks.diloco.worker_id=a
        assert server.is_at(ROUNDS - 1)
        assert json.loads(identity.read_bytes())["secret"] != whole["secret"]
        assert is_audited(server.run)


def test_a_ledger_that_cannot_be_read_names_a_command_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path / "run", *TINY, "diloco.sync_every=2", "diloco.workers=1", "diloco.save_every=1") as server:
        a = FakeWorker(server.client, "a", compression="bf16")
        a.register()
        a.next(-1)
        a.submit(a.change(0))
        a.next(0)
        until(lambda: server.run.checkpoint(1).exists())
        server.end(signal.SIGKILL)
    os.chdir(tmp_path)
    run = RunDir(tmp_path / "run")
    whole = run.rounds.read_bytes()
    said = []
    for damaged in (b"", whole[: whole.index(b"\n") + 1], b"foreign line\n" + whole):
        run.rounds.write_bytes(damaged)
        done = printed(capsys, "resume", "run")
        assert done.code == 2
        assert done.err.count("error: ") == 1
        said.append(done.err)
    assert "has no round 1 as step-00000001 knows it" in said[0]
    assert "line 1 is no round" in said[2]
    (command,) = {each.strip().rpartition("newest checkpoint: ")[2] for each in said}
    assert command == "forgather diloco server run output_dir=NEW"
    source = shlex.split(command)[3]
    assert would_resume(run).step == 1
    with serving(tmp_path / "NEW", "diloco.workers=1", source=source) as server:
        assert server.client.status()["checkpoint"] == 0
        begun = server.client.weights(0)
        saved = load_file(run.checkpoint(1) / "model" / "model.safetensors")
        assert equal(begun, {name: saved[name] for name in begun})
    run.diloco_token.write_bytes(b"")
    run.rounds.write_bytes(whole)
    assert "openssl rand -hex 32" in printed(capsys, "resume", "run").err

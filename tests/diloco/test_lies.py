"""A member that holds the token and errs or lies: it weighs nothing, and neither it nor strangers keep others from
training.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from diloco.client import TINY, Client, FakeWorker, serving
from program import Process, forgather
from saving import resign
from torch import Tensor

from forgather_cli.diloco.ledger import read_ledger, round_hash
from forgather_cli.run_dir import RunDir

SETTINGS = (*TINY, "diloco.compression=fp32", "diloco.sync_every=2", "diloco.eviction=null",
            "diloco.save_every=100", "diloco.keep_submissions=true")  # fmt: skip
MOST = 8 * 16
"""Targets of the samples that a member is given: 2 steps of 4 rows of 16."""


def joined(client: Client, names: str = "ab") -> list[FakeWorker]:
    """Workers that have registered and stand in their round."""
    workers = [FakeWorker(client, name, num_parts=1) for name in names]
    for worker in workers:
        worker.register()
    for worker in workers:
        worker.next(-1)
    return workers


def filled(worker: FakeWorker, value: float) -> dict[str, Tensor]:
    """A change that is the same everywhere."""
    return {name: torch.full(shape, value) for name, shape in worker.client.shapes.items()}


def small(worker: FakeWorker) -> dict[str, Tensor]:
    """What an honest one sends."""
    return {name: values / 10 for name, values in worker.change(worker.offer["round"]).items()}


def part(rows: str) -> bytes:
    return safetensors.torch.save({"model.norm.weight": torch.zeros(16)}, {"rows": rows})


NAN, INF = float("nan"), float("inf")
LIES: list[tuple[str, dict[str, Any]]] = [
    *(("targets", {"targets": wrong}) for wrong in (10**400, 10**18, MOST + 1, -1, 1.5, NAN, True, "many", None)),
    ("step", {"step": 10**30}),
    ("step", {"step": 1.5}),
    ("tokens_per_second", {"tokens_per_second": -1}),
    ("sent", {"sent": True}),
    ("tokens_per_second", {"tokens_per_second": NAN}),
    ("received", {"received": -1}),
    ("sent", {"sent": "much"}),
    ("finite", {"change": NAN}),
    ("finite", {"change": -INF}),
    ("rows", {"parts": []}),
    *(("", {"part": part(rows)}) for rows in ('{"model.norm.weight": [0, 1e999]}', '{"model.norm.weight": [0, -1]}',
       f'{{"model.norm.weight": [0, {10**30}]}}', '{"model.norm.weight": 3}', "[[[[", "[]")),
]  # fmt: skip


def lie(liar: FakeWorker, told: dict[str, Any]) -> Any:
    more = dict(told)
    change = filled(liar, more.pop("change")) if "change" in more else small(liar)
    if "part" in more:
        more["parts"] = liar.put([more.pop("part")])
    return liar.submit(change, **more)


def test_lies_weigh_nothing_and_leave_what_infinite_changes_leave(tmp_path: Path) -> None:
    """Five of eleven lie at a time, each in every other round, and the server is killed in between; then the same with
    NaN.
    """
    ends = []
    for name in ("lies", "void"):
        with serving(tmp_path / name, *SETTINGS, "diloco.workers=11") as served:
            workers = joined(served.client, "abcdefghijk")
            liars, honest = workers[:5], workers[5:]
            trained(liars, honest, LIES[:10], name)
            served.end(signal.SIGKILL)
        with serving(tmp_path / name, resume=True) as served:
            at = read_ledger(served.run.rounds)[-1].round - 1
            for worker in workers:
                worker.client = served.client
                worker.register()
                worker.next(at)
            trained(liars, honest, LIES[10:], name)
            lines = read_ledger(served.run.rounds)
            ends.append((lines[-1].hash, lines[-1].members, served.client.latest()))
            rejected = [[who for who, _ in line.closed.rejected] for line in lines[1:] if line.closed]
            assert rejected == [list("abcde"), []] * (len(LIES) // 5)
            assert "Traceback" not in served.said()
            assert served.end() == 75
    assert ends[0][:2] == ends[1][:2]
    assert all(torch.equal(ends[0][2][name], values) for name, values in ends[1][2].items())


def trained(
    liars: list[FakeWorker], honest: list[FakeWorker], lies: list[tuple[str, dict[str, Any]]], run: str
) -> None:
    """Rounds with as many lies as there are liars, and one without after each."""
    for at in range(0, len(lies), len(liars)):
        for lying in (True, False):
            number = honest[0].offer["round"]
            for liar, (_, told) in zip(liars, lies[at : at + len(liars)], strict=True):
                lie(liar, {} if not lying else told if run == "lies" else {"change": NAN})
            for worker in honest:
                assert worker.submit(small(worker), MOST, speed="fast")["status"] == "pending"
            for worker in honest:
                assert worker.next(number)["answer"] == ["counted", ""]
            for liar, (named, told) in zip(liars, lies[at : at + len(liars)], strict=True):
                status, reason = liar.next(number)["answer"]
                assert status == ("rejected" if lying else "counted"), (told, reason)
                assert run == "void" or not lying or named in reason, (told, reason)
                assert len(reason) < 400


def play(workers: list[FakeWorker], changes: list[dict[str, Tensor]]) -> None:
    """A round of all in sync mode."""
    number = workers[0].offer["round"]
    for worker, change in zip(workers, changes, strict=True):
        worker.submit(change, 10)
    for worker in workers:
        worker.next(number)


def test_three_rejections_in_a_row_evict_and_nobody_waits(tmp_path: Path) -> None:
    """Though no silence does; and who has left is not called evicted."""
    with serving(tmp_path / "run", *SETTINGS, "diloco.workers=3") as served:
        liar, leaver, honest = joined(served.client, "abc")
        for number in range(3):
            assert lie(liar, {"targets": 10**18})["status"] == "rejected"
            if number == 0:
                report = {"step": 7, "tokens_per_second": 12.5, "sent": 3, "received": 4}
                leaver.submit(small(leaver), **report)
                (shown,) = [each for each in served.client.status()["workers"] if each["worker"] == "b"]
                assert shown | report == shown, "before any heartbeat"
            if number == 1:
                served.client.post("/leave", generation=leaver.generation)
            honest.submit(small(honest))
            assert honest.next(number)["answer"] == ["counted", ""]
            if number < 2:
                liar.next(number)
        states = {each["worker"]: each["state"] for each in served.client.status()["workers"]}
        assert states == {"a": "evicted", "b": "left", "c": "training"}
        answer = served.client.ask("POST", "/next", {"generation": liar.generation, "after": 2, "wait": 0})
        assert (answer.status, answer.json["code"]) == (409, "evicted")
        assert "targets" in answer.json["error"]
        honest.submit(small(honest))
        assert honest.next(3)["round"] == 4, "alone"
        lines = read_ledger(served.run.rounds)
        members = ["".join(member.worker for member in line.members) for line in lines]
        assert members == ["abc", "abc", "ac", "c", "c"]
        assert [(line.closed.evicted, line.closed.left) for line in lines if line.closed] == [
            ((), ()), ((), ("b",)), (("a",), ()), ((), ())]  # fmt: skip


def test_a_change_that_is_too_large_counts_for_little_and_it_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In whole, what is bounded is twice an honest one; the log, the status and the worker have the setting."""
    ends = []
    for value in (3e38, 0.4):
        with serving(tmp_path / f"{value}", *SETTINGS, "diloco.workers=3") as served:
            liar, *honest = joined(served.client, "abc")
            size = math.sqrt(sum(math.prod(shape) for shape in served.client.shapes.values()))
            for number in range(2):
                liar.submit(filled(liar, value))
                for worker in honest:
                    worker.submit(filled(worker, 0.01))
                for worker in (liar, *honest):
                    assert worker.next(number)["answer"] == ["counted", ""]
                assert "diloco.max_share=2" in liar.offer["bounded"]
                assert honest[0].offer["bounded"] == ""
            said = [line for line in served.said().splitlines() if re.search(r"WARNING a: round \d: its weight", line)]
            assert len(said) == 1
            assert forgather("diloco", "status", str(served.run.root), "--once") == 0
            assert "a: round 1: its weight in the mean is lowered" in capsys.readouterr().out.replace("\n", " ")
            ends.append(served.client.latest())
            for line in read_ledger(served.run.rounds)[1:]:
                weights = [weight * math.hypot(*sent.norms) for sent, weight in line.closed.submissions]
                assert weights[0] == pytest.approx(2 * weights[1], rel=1e-4)
                assert math.hypot(*line.closed.submissions[0][0].norms) == pytest.approx(value * size)
    assert all(torch.allclose(ends[0][name], values, atol=1e-2) for name, values in ends[1].items())


def test_what_the_weighted_sum_cannot_hold_is_rejected_where_members_are_trusted(tmp_path: Path) -> None:
    with serving(tmp_path / "run", *SETTINGS, "diloco.max_share=null") as served:
        liar, honest = joined(served.client)
        for number in range(2):
            lie(liar, {"change": 3e38}), honest.submit(small(honest))
            assert liar.next(number)["answer"][0] == "rejected"
            assert honest.next(number)["answer"] == ["counted", ""]
        closed = read_ledger(served.run.rounds)[2].closed
        assert [sent.worker for sent, _ in closed.submissions] == ["b"]
        ((who, why),) = closed.rejected
        assert (who, "fp32" in why) == ("a", True)
        assert all(values.isfinite().all() for values in served.client.latest().values())
        served.end()
    with serving(tmp_path / "run", resume=True) as served:
        assert all(values.isfinite().all() for values in served.client.latest().values())


@pytest.mark.parametrize("what", ["targets", "change"])
def test_a_ledger_that_has_counted_a_lie_before_goes_on_without_it(tmp_path: Path, what: str) -> None:
    """As versions without bounds have written it: in round 0, and another round was closed behind it."""
    run = tmp_path / "run"
    with serving(run, *SETTINGS) as served:
        liar, honest = joined(served.client)
        lying, worse = filled(liar, 0.01), filled(liar, 3e38)
        for number in range(2):
            liar.submit(lying if number == 0 else filled(liar, 0.0)), honest.submit(filled(honest, 0.01))
            liar.next(number), honest.next(number)
        place = served.run
        served.end(signal.SIGKILL)
    lines = read_ledger(place.rounds)
    if what == "targets":
        told = {"targets": 10**400}
    else:
        [content] = liar.parts(worse)
        told = {"parts": (hashlib.sha256(content).hexdigest(),)}
        (place.submissions / "parts" / f"{told['parts'][0]}.safetensors").write_bytes(content)
    written = lines[:1]
    for line in lines[1:]:
        sent = tuple((replace(one, **(told if one.worker == "a" and line.round == 1 else {})), weight)
                     for one, weight in line.closed.submissions)  # fmt: skip
        closed, parent = replace(line.closed, submissions=sent), written[-1].hash
        written.append(replace(line, closed=closed, parent=parent, hash=round_hash(parent, line.round, closed)))
    place.rounds.write_text("".join(without_norms(json.loads(line.to_json())) for line in written))
    for path in place.submissions.glob("round-*.json"):
        manifest = {key: value for key, value in json.loads(path.read_text()).items() if key != "norms"}
        path.write_text(json.dumps(manifest | (told if "round-00000000-slot-0000" in path.name else {})))
    with serving(run, resume=True) as served:
        assert "rounds.jsonl" in served.said()
        assert "of a" in served.said()
        liar.client = honest.client = served.client
        for worker in (liar, honest):  # who stood on a round that is gone comes back
            assert worker.register(round=2, parent=written[2].hash)["stood"] == "rewound"
            assert worker.next(-1)["round"] == 1
            worker.submit(filled(worker, 0.01))
        assert honest.next(1)["answer"] == ["counted", ""]
        first, second = (line.closed for line in read_ledger(place.rounds)[1:])
        if what == "targets":
            assert ([sent.worker for sent, _ in first.submissions], first.rejected[0][0]) == (["b"], "a")
        else:  # it counts now, for what may be
            assert [(sent.worker, weight < 1e-35) for sent, weight in first.submissions] == [("a", True), ("b", False)]
        assert len(second.submissions) == 2
        assert all(values.isfinite().all() for values in served.client.latest().values())
        assert served.end() == 75


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's run that has stopped in round 4, with checkpoints of rounds 2 to 4."""
    with serving(tmp_path_factory.mktemp("stopped") / "run", *SETTINGS, "diloco.save_every=1") as served:
        workers = joined(served.client)
        for _ in range(4):
            play(workers, [small(worker) for worker in workers])
        assert served.end() == 75
    return served.run.root


def forge(run: RunDir, what: str, bad: int) -> None:
    """Make the newest ``bad`` checkpoints of a run in round 4 such as a version without bounds may have left them."""
    for step in range(5 - bad, 5):
        file = "optimizer/optimizer.safetensors" if what == "momentum" else "model/model.safetensors"
        tensors = safetensors.torch.load_file(run.checkpoint(step) / file)
        if what != "norms":
            next(iter(tensors.values())).fill_(NAN if what == "void" else 1e38)
        safetensors.torch.save_file(tensors, run.checkpoint(step) / file, {"format": "pt"})
        resign(run.checkpoint(step))
    if what == "norms":
        lines = [json.loads(line) for line in run.rounds.read_text().splitlines()]
        lines[5 - bad]["closed"]["submissions"][0]["norms"] = [1e38]
        run.rounds.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("what", "bad", "keeps", "healthy"),
    [("weights", 2, True, 4), ("norms", 1, False, 3), ("weights", 2, False, 2), ("momentum", 1, False, 3),
     ("void", 1, False, 3)],
)  # fmt: skip
def test_a_server_goes_on_from_the_newest_healthy_round(
    stopped: Path, tmp_path: Path, what: str, bad: int, keeps: bool, healthy: int
) -> None:
    """Whether it ``keeps`` what workers have sent, of which rounds can be made again, or not."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(stopped, run.root)
    forge(run, what, bad)
    if not keeps:
        shutil.rmtree(run.submissions)
    hashes = [json.loads(line)["hash"] for line in run.rounds.read_text().splitlines()]
    with serving(run.root, resume=True) as served:
        assert served.said().count("goes on") == 1
        assert f"goes on from round {healthy}" in served.said()
        files = [file for file in (run.rounds, run.dropped_rounds) if file.exists()]
        assert [json.loads(line)["hash"] for file in files for line in file.read_text().splitlines()] == hashes
        workers = [FakeWorker(served.client, name, num_parts=1) for name in "ab"]
        for worker in workers:
            come_back(worker, hashes[4], healthy)
        for _ in range(2):
            play(workers, [filled(worker, 0.005) for worker in workers])
            assert [worker.offer["answer"] for worker in workers] == [["counted", ""]] * 2
        assert all(values.norm() < 100 for values in served.client.latest().values())
        if what == "momentum":  # who comes back only after another start
            served.end(signal.SIGKILL)
            with serving(run.root, resume=True) as again:
                come_back(FakeWorker(again.client, "a"), hashes[4], healthy + 2)
                assert again.end() == 75
        else:
            assert served.end() == 75
    assert run.checkpoint_steps()[-1] == healthy + 2


def come_back(worker: FakeWorker, parent: str, healthy: int) -> None:
    """Register as one that stands on round 4, and be taken back to the newest."""
    answer = worker.register(round=4, parent=parent)
    assert answer["stood"] == ("known" if healthy == 4 else "rewound")
    assert worker.next(-1)["round"] == healthy


def test_a_server_without_a_healthy_checkpoint_says_so_and_leaves_all_as_it_is(stopped: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(stopped, run.root)
    forge(run, "weights", 3)
    before = run.rounds.read_bytes()
    with Process("resume", str(run.root)) as refused:
        assert refused.finish() == 2
    assert refused.output.count("error: ") == 1
    assert all(f"step-0000000{step}: weights" in refused.output for step in (2, 3, 4))
    assert (run.checkpoint_steps(), run.rounds.read_bytes()) == ([2, 3, 4], before)


def without_norms(line: dict[str, Any]) -> str:
    if (closed := line["closed"]) is not None:
        for sent in closed["submissions"]:
            del sent["norms"]
        del closed["offered"], closed["left"]
    return json.dumps(line) + "\n"

"""Servers' runs that a version left behind which rejected by size are replayed, and go on.

Commit 7b8eec5 has served ``tests/golden/diloco-*``, with ``diloco.workers=4 diloco.compression=int4`` and
``diloco.keep_submissions=true``, to four members as below, of whom d sent a change 500 times as large in every other
round, which was rejected; it was ended with a round open.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from diloco.client import Client, FakeWorker, serving
from program import forgather
from safetensors.torch import load_file

from forgather_cli.diloco.fragments import fragments
from forgather_cli.diloco.ledger import read_ledger
from forgather_cli.run_dir import RunDir

GOLDEN = Path(__file__).parents[1] / "golden"


def team(client: Client) -> list[FakeWorker]:
    """Registered, each in its round."""
    workers = [FakeWorker(client, name, "int4", num_parts=1) for name in "abcd"]
    for worker in workers:
        worker.register()
    for worker in workers:
        worker.next(-1)
    return workers


def train(workers: list[FakeWorker], rounds: int) -> None:
    """Each sends a change for the round that it stands in, and waits for its next."""
    for _ in range(rounds):
        before = [worker.offer["round"] for worker in workers]
        for worker, number in zip(workers, before, strict=True):
            names = fragments(worker.client.shapes, count := len(worker.offer["weights"]))[number % count]
            change = {name: worker.change(number)[name] * 0.1 for name in sorted(names)}
            worker.submit(change, 16 + 16 * (worker.name == "b"))
        for worker, number in zip(workers, before, strict=True):
            worker.next(number)


@pytest.mark.parametrize("name", ["diloco-fragments", "diloco-async"])
def test_a_run_of_before_is_replayed_and_goes_on_bit_for_bit(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are read, and never computed again: also where the server must make all of its rounds anew."""
    shutil.copytree(GOLDEN / name, tmp_path / name)
    run = RunDir(tmp_path / name)
    before, lines = run.rounds.read_bytes(), read_ledger(run.rounds)
    assert any(line.closed and "max_change" in dict(line.closed.rejected).get("d", "") for line in lines)
    assert forgather("diloco", "replay", str(run.root)) == 0
    assert f"equal bit for bit after {len(lines) - 1} rounds" in capsys.readouterr().out
    newest = run.checkpoint(len(lines) - 1) / "model" / "model.safetensors"
    wanted = load_file(newest)
    shutil.rmtree(run.checkpoint(len(lines) - 1))
    with serving(run.root, "diloco.port=0", resume=True) as served:
        assert "max_change: counts no more" in served.said()
        made = served.client.latest()
        assert all(values.equal(wanted[each]) for each, values in made.items())
        train(team(served.client), 2)
        assert served.end() == 75
    assert run.rounds.read_bytes().startswith(before)
    assert all(not line.closed.rejected for line in read_ledger(run.rounds)[len(lines) :])
    assert forgather("diloco", "replay", str(run.root), "--json") == 0
    assert json.loads(capsys.readouterr().out)["equal"]

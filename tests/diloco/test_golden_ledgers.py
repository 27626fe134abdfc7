"""Servers' runs that a version left behind which rejected by size are replayed, and go on (``golden_ledgers.py``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from diloco.client import serving
from diloco.golden_ledgers import CASES, GOLDEN, team, train
from program import forgather
from safetensors.torch import load_file

from forgather_cli.diloco.ledger import read_ledger
from forgather_cli.run_dir import RunDir


@pytest.mark.parametrize("name", CASES)
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

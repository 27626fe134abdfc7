"""Short campaigns with a member that lies, and without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from diloco_campaign import Campaign
from diloco_honest import HonestCampaign
from forks import Program


def forked(words: list[str], environment: dict[str, str], output: Path) -> Program:
    """Members need not start interpreters."""
    output.touch()
    environment = {**environment, "PYTHONUNBUFFERED": "1"}
    program = Program(("-m", "forgather_cli", *words), str(output.parent), environment, file=str(output))
    program.stdout.close()
    return program


@pytest.mark.parametrize("more", [{}, {"mode": "async", "seconds": 5.0}], ids=["sync", "async"])
def test_a_liar_changes_no_weights_whoever_is_killed_and_throws_nobody_out(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    trial = Campaign(tmp_path, [("single", "single")], lying=True, launch=forked, **more).trial(int(time.time()))
    mode = f"--mode {more['mode']} " if more else ""
    repeat = f"scripts/diloco_campaign 1 --lying {mode}--layouts single single --seed {trial.seed}"
    assert not trial.problems, f"{trial}\nto repeat: {repeat}"


def test_nobody_who_is_honest_is_rejected(tmp_path: Path) -> None:
    seed = int(time.time())
    trial = HonestCampaign(tmp_path, launch=forked).trial(seed, sync_every=4)
    assert not trial.problems, f"{trial}\nto repeat: scripts/diloco_campaign 1 --honest --seed {seed}"

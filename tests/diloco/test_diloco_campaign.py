"""Short campaigns with a member that lies, and without."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
from diloco_campaign import Campaign
from diloco_honest import HonestCampaign
from forks import Program


def forked(words: list[str], environment: dict[str, str], output: Path) -> Program:
    """Members need not start interpreters."""
    program = Program(("-m", "forgather_cli", *words), str(output.parent), {**environment, "PYTHONUNBUFFERED": "1"})

    def copy() -> None:
        with program.stdout as source, output.open("a") as target:
            shutil.copyfileobj(source, target)

    threading.Thread(target=copy, daemon=True).start()
    return program


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"), [("single", "single")], lying=True, launch=forked)


def test_beside_a_liar_the_weights_are_those_without_it_whoever_is_killed(campaign: Campaign) -> None:
    trial = campaign.trial(int(time.time()))
    assert not trial.problems, (
        f"{trial}\nto repeat: scripts/diloco_campaign 1 --lying --layouts single single --seed {trial.seed}"
    )


def test_whoever_plays_with_what_may_count_throws_nobody_out_in_async_mode(tmp_path: Path) -> None:
    seed = int(time.time())
    pairs = [("single", "single")]
    trial = Campaign(tmp_path, pairs, lying=True, mode="async", launch=forked, seconds=5.0).trial(seed)
    assert not trial.problems, (
        f"{trial}\nto repeat: scripts/diloco_campaign 1 --lying --mode async --layouts single single --seed {seed}"
    )


def test_nobody_who_is_honest_is_rejected(tmp_path: Path) -> None:
    seed = int(time.time())
    trial = HonestCampaign(tmp_path, launch=forked).trial(seed, sync_every=4)
    assert not trial.problems, f"{trial}\nto repeat: scripts/diloco_campaign 1 --honest --seed {seed}"

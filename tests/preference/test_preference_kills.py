"""A run on pairs that is killed while its reference is computed, and again (``scripts/crash_campaign --preferences``),
and that the campaign finds what it looks for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from crash_campaign import Trial
from crash_check import other_values
from crash_draw import PREFERENCES, Plan, draw
from crashes import NAMES, trial_of

LATER = {"record", "temporary", "manifest", "rename"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Path]:
    """A trial of two kills, the second in training, and the uninterrupted run."""

    def fits(plan: Plan) -> bool:
        first, second = (kill.instant for kill in plan.kills)
        # of writes one is always seen, of more only those that come apart for whoever looks late
        is_sure = (first.event, first.count) == ("reference", 1)
        return is_sure and second.event in LATER and plan.moved_to is None

    return trial_of(PREFERENCES, fits, tmp_path_factory.mktemp("kills"))


def test_a_killed_run_has_the_reference_and_the_weights_of_the_uninterrupted_one(killed: tuple[Trial, Path]) -> None:
    trial, _ = killed
    repeat = f"scripts/crash_campaign 1 --preferences --seed {trial.plan.seed} --layouts {','.join(NAMES)}"
    assert not trial.problems, f"{trial}\nto repeat it: {repeat}"
    assert trial.kills[0].event == "reference"


def test_a_third_of_the_kills_are_while_the_reference_is_computed() -> None:
    plans = [draw(seed, recipes=PREFERENCES) for seed in range(200)]
    share = sum(plan.kills[0].instant.event == "reference" for plan in plans) / len(plans)
    assert 0.25 < share < 0.45
    assert {plan.recipe for plan in plans} == set(PREFERENCES)


def test_other_values_are_reported(killed: tuple[Trial, Path], tmp_path: Path) -> None:
    _, reference = killed
    shutil.copytree(reference.parent / "cache" / "references", tmp_path / "cache" / "references")
    assert not other_values(tmp_path / "run", reference)
    path = next(tmp_path.glob("cache/references/[!.]*/values"))
    values = bytearray(path.read_bytes())
    values[0] ^= 1
    path.write_bytes(values)
    assert other_values(tmp_path / "run", reference)

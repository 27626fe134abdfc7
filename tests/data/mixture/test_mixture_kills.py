"""A mixture's run that is killed beside a change of weights, and again (``scripts/crash_campaign --mixtures``), and
that the campaign finds what it looks for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from crash_campaign import Trial
from crash_check import read_as
from crash_draw import MIXTURES, Kill, Plan, draw
from crashes import NAMES, trial_of


def beside_the_change(plan: Plan, kill: Kill) -> bool:
    return kill.instant.event == "record" and abs(kill.instant.count - (plan.recipe.change or 0)) <= 1


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Path]:
    """A trial of two kills, the first behind a checkpoint, and the uninterrupted run."""

    def fits(plan: Plan) -> bool:
        saved = plan.save_steps < (plan.recipe.change or 0) - 1
        return saved and beside_the_change(plan, plan.kills[0])

    return trial_of(MIXTURES, fits, tmp_path_factory.mktemp("kills"))


def test_a_killed_run_has_read_and_learned_what_the_uninterrupted_one_has(killed: tuple[Trial, Path]) -> None:
    trial, _ = killed
    repeat = f"scripts/crash_campaign 1 --mixtures --seed {trial.plan.seed} --layouts {','.join(NAMES)}"
    assert not trial.problems, f"{trial}\nto repeat it: {repeat}"
    assert trial.kills


def test_many_kills_are_beside_a_change_or_inside_a_save() -> None:
    plans = [draw(seed, recipes=MIXTURES) for seed in range(200)]
    firsts = [(plan, plan.kills[0]) for plan in plans]
    assert 0.3 * len(plans) < sum(beside_the_change(plan, kill) for plan, kill in firsts) < 0.7 * len(plans)
    saves = {"temporary", "manifest", "rename", "retention", "final"}
    assert sum(kill.instant.event in saves for plan in plans for kill in plan.kills) > 0.3 * len(plans)
    assert {plan.recipe for plan in plans} == set(MIXTURES)


def test_what_was_read_otherwise_is_reported(killed: tuple[Trial, Path], tmp_path: Path) -> None:
    _, reference = killed
    run = shutil.copytree(reference, tmp_path / "run")
    *lines, last = (run / "mixture.jsonl").read_text().splitlines()
    line = json.loads(last)
    line["sources"]["code"][2] ^= 1
    line["stretches"].append({**line["stretches"][0], "begin": line["position"]})
    (run / "mixture.jsonl").write_text("\n".join([*lines, json.dumps(line)]) + "\n")
    audit, other = read_as(run, reference)
    assert "{'lost': 1, 'repeated': 1, " in audit
    assert other == "mixture.jsonl ends with another stretches"

"""Which checkpoint a resume takes, and that all who name it name that one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import saving
from program import forgather

from forgather_cli.checkpoint.choice import candidates, choose, would_resume
from forgather_cli.checkpoint.load import Reader, healthy_ones, instead_of, newest_valid
from forgather_cli.checkpoint.manifest import BestBy, Manifest
from forgather_cli.checkpoint.retention import clean, deletable, list_checkpoints
from forgather_cli.checkpoint.rollbacks import Rollback, append_rollback
from forgather_cli.errors import CheckpointError
from forgather_cli.launch.exit_status import ExitStatus, Kind
from forgather_cli.launch.run_lock import RunLock
from forgather_cli.launch.start import _conclude_run
from forgather_cli.run_dir import RunDir


def make_newer(run: RunDir, step: int) -> None:
    (run.checkpoint(step) / "manifest.json").write_text('{"format": "forgather-checkpoint", "format_version": 7}')


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Healthy ones of steps 1 to 3, not healthy ones of 4 and 5."""
    saving.saved_run(tmp_path, 1, 2, 3)
    return saving.saved_run(tmp_path, 4, 5, healthy=False)


def test_the_newest_whole_one_and_a_healthy_one_if_there_is_any(run: RunDir) -> None:
    assert [each.step for each in candidates(run)] == [3, 2, 1, 5, 4]
    assert [each.step for each in candidates(run) if each.healthy] == [3, 2, 1]
    steps = []
    for step in (3, 2, 1, 5):
        chosen = choose(run)
        assert (chosen.path, chosen.healthy) == (run.checkpoint(chosen.step), chosen.step < 4)
        assert len(chosen.why) == len(steps) + 1  # each damaged one, and what is to be known of the newest
        told = ", but no healthy one is left" if chosen.step > 3 else f"; {chosen.path} is used"
        assert f"{run.checkpoint(5)}: was saved while training looked diverged{told}" in chosen.why[-1]
        steps.append(chosen.step)
        (run.checkpoint(step) / "state.json").unlink()
    assert steps == [3, 2, 1, 5]
    (run.checkpoint(4) / "manifest.json").write_text("")
    with pytest.raises(CheckpointError, match="no usable checkpoint is left"):
        choose(run)
    assert would_resume(run) is None
    assert choose(RunDir(run.root / "nothing")) is None


def test_by_size_or_by_content(run: RunDir) -> None:
    saving.damage(run.checkpoint(3) / "model/model.safetensors", saving.flip(-1))
    assert (choose(run).step, choose(run, Manifest.problems).step) == (3, 2)


def test_what_the_run_has_gone_back_from_is_no_candidate(run: RunDir) -> None:
    append_rollback(run, Rollback(1, "2026-01-01T00:00:00+00:00", "x", 3, 1, 2, [5, 6], [{"epoch": 0, "sample": 3}]))
    assert [each.step for each in candidates(run)] == [1]
    (run.checkpoint(1) / "state.json").unlink()
    assert would_resume(run) is None


def test_nobody_falls_back_behind_a_newer_format(run: RunDir) -> None:
    make_newer(run, 3)  # a healthy one before it is left, and newer ones that are not
    for ask in (choose, newest_valid, healthy_ones, lambda run: Reader(run.checkpoint(3))):
        with pytest.raises(CheckpointError, match="format 7, this Forgather reads up to 1; upgrade forgather"):
            ask(run)
    assert would_resume(run) is None
    assert f"use {run.checkpoint(1)}, the newest other one" in instead_of(run.checkpoint(2))


def test_one_of_a_newer_format_that_is_older_is_in_nobody_s_way(run: RunDir) -> None:
    make_newer(run, 2)
    for ask in (choose, newest_valid, would_resume):
        assert ask(run).step == 3
    assert [each.step for each in healthy_ones(run)] == [3, 1]  # for a rollback, and for the best one
    for step in (1, 3):
        (run.checkpoint(step) / "state.json").unlink()
    assert (choose(run).step, choose(run).healthy) == (5, False)
    for step in (4, 5):
        (run.checkpoint(step) / "state.json").unlink()
    with pytest.raises(CheckpointError, match="checkpoint format 7"):  # nothing else is left
        choose(run)


def test_of_damaged_manifests_those_are_told_that_would_have_been_taken(tmp_path: Path) -> None:
    run = saving.saved_run(tmp_path, 2, 4, 6, 8)
    for step in (2, 8):
        (run.checkpoint(step) / "manifest.json").write_text("")
    [why] = choose(run).why
    assert str(run.checkpoint(8)) in why
    assert f"; {run.checkpoint(6)} is used" in why
    for step in (4, 6):
        (run.checkpoint(step) / "state.json").unlink()
    with pytest.raises(CheckpointError) as none_left:
        choose(run)
    assert all(str(run.checkpoint(step)) in str(none_left.value) for step in (2, 4, 6, 8))


def test_the_last_line_of_a_run_names_what_a_resume_takes(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> str:
        capsys.readouterr()
        with RunLock(run.root) as held:
            _conclude_run(held, ExitStatus(0, Kind.ERROR, 1, "broken"))
        return capsys.readouterr().err

    assert "to resume from step 3:" in told()
    (run.checkpoint(3) / "state.json").unlink()
    assert "to resume from step 2:" in told()
    for step in (1, 2, 4, 5):
        (run.checkpoint(step) / "state.json").unlink()
    assert told() == ""  # a resume would find none


def test_a_renamed_one_is_of_its_manifests_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = saving.saved_run(tmp_path, 1, 2, 3)
    run.checkpoint(1).rename(run.checkpoint(9))
    assert [each.step for each in candidates(run)] == [3, 2, 1]
    assert choose(run).step == 3
    listed = list_checkpoints(run)
    assert [(info.step, info.path.name, info.problem) for info in listed] == [
        (1, "step-00000009", None), (2, "step-00000002", None), (3, "step-00000003", None),
    ]  # fmt: skip
    gone = deletable(listed, limit=2, num_best=0, best_by=BestBy("loss", False))
    assert [info.path for info in gone] == [run.checkpoint(9)]
    assert forgather("checkpoint", "list", str(run.root)) == 0
    out = capsys.readouterr().out
    assert out.count("named step-") == 1
    assert "named step-00000009" in out
    clean(run)  # as a resume begins
    assert run.checkpoint_steps() == [1, 2, 3]
    assert len(caplog.records) == 1
    clean(run)
    assert len(caplog.records) == 1
    shutil.copytree(run.checkpoint(1), run.checkpoint(9))  # a copy stays, and is no newer than what it is of
    clean(run)
    assert run.checkpoint_steps() == [1, 2, 3, 9]
    assert newest_valid(run).step == 3

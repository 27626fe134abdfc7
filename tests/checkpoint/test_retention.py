"""Which checkpoints stay, which is best, and that listing them needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import saving
from program import modules_after

from forgather_cli.checkpoint.load import Reader, best_valid
from forgather_cli.checkpoint.manifest import BestBy
from forgather_cli.checkpoint.retention import (
    CheckpointInfo,
    clean,
    deletable,
    delete_abandoned,
    delete_checkpoints,
    list_checkpoints,
    pending,
    record,
)
from forgather_cli.checkpoint.rollbacks import Rollback
from forgather_cli.run_dir import RunDir


def info(step: int, loss: float | None = None, **more: Any) -> CheckpointInfo:
    metrics = {} if loss is None else {"eval_loss": loss}
    return CheckpointInfo(step, Path(f"step-{step:08d}"), 1, metrics=metrics, **{"healthy": True, **more})


def kept(
    found: list[CheckpointInfo], limit: int = 2, num_best: int = 1, greater: bool = False, **more: Any
) -> list[int]:
    gone = deletable(found, limit=limit, num_best=num_best, best_by=BestBy("eval_loss", greater), **more)
    return [i.step for i in found if i not in gone]


FOUND = [info(1, 3.0), info(2, 1.0), info(3), info(4, 2.0), info(5), info(6, 2.5)]


def test_the_newest_and_the_best_are_kept() -> None:
    assert kept(FOUND) == [2, 5, 6]
    assert kept(FOUND, greater=True) == [1, 5, 6]
    assert kept(FOUND, num_best=2) == [2, 4, 5, 6]
    assert kept(FOUND, num_best=0) == [5, 6]
    assert kept(FOUND, limit=10) == [1, 2, 3, 4, 5, 6]
    assert kept(FOUND, num_best=0, limit=1, protected={3}) == [3, 6]


def test_only_healthy_ones_with_a_finite_metric_are_best_and_the_earliest_of_equals() -> None:
    found = [info(1, 2.0), info(2, 2.0), info(3, 0.1, healthy=False), info(4, float("nan")), info(5), info(6)]
    assert kept(found, limit=1) == [1, 6]


def test_the_newest_healthy_one_stays_behind_unhealthy_ones() -> None:
    assert kept([info(step, healthy=step < 3) for step in range(1, 6)], num_best=0) == [2, 4, 5]


def test_damaged_ones_do_not_count_and_foreign_ones_stay() -> None:
    damaged = {"problem": "state.json is missing", "healthy": False}
    found = [info(1), info(2), info(3, **damaged), info(4, foreign=True, **damaged)]
    assert kept(found, limit=1) == [2, 4]
    assert kept(found, limit=2) == [1, 2, 4]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"save_total_limit": 2, "preserve_n_best": 1}, [2, 4, 5]),
        ({"save_total_limit": 1, "preserve_n_best": 0, "async_save": True}, [5]),
        ({"save_total_limit": 1, "preserve_n_best": 0, "load_best_model_at_end": True,
          "metric_for_best_model": "loss"}, [2, 5]),
    ],
)  # fmt: skip
def test_saving_thins_out(settings: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    saver = saving.checkpointer(tmp_path, **settings)
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 2.2], start=1):
        saving.save(saver, step, metrics={"eval_loss": loss})
    saver.close()
    assert saver.run.checkpoint_steps() == steps
    assert saving.debris(saver.run) == []


def test_the_checkpoint_just_published_stays_behind_later_steps_of_an_abandoned_branch(tmp_path: Path) -> None:
    saving.saved_run(tmp_path, 5, 6, 7)
    saver = saving.checkpointer(tmp_path, save_total_limit=2)
    saving.save(saver, 3)
    assert saver.run.checkpoint_steps() == [3, 6, 7]


def test_list_says_what_there_is(tmp_path: Path) -> None:
    saver = saving.checkpointer(tmp_path)
    saving.save(saver, 1, metrics={"loss": 2.0, "eval_loss": 1.5})
    saving.save(saver, 2, metrics={"loss": 2.0, "eval_loss": 1.2})
    saving.save(saver, 3, healthy=False)
    saving.save(saver, 4, info={"strategy": "single", "final": True})
    (saver.run.checkpoint(3) / "state.json").unlink()
    saver.run.checkpoint(9).mkdir()
    found = list_checkpoints(saver.run)
    assert [i.step for i in found] == [1, 2, 3, 4, 9]
    assert [i.step for i in found if i.best] == [2]
    assert [i.step for i in found if i.final] == [4]
    assert [i.step for i in found if i.healthy] == [i.step for i in found if i.problem is None] == [1, 2, 4]
    assert found[2].problem == "state.json is missing"
    assert "no manifest.json" in (found[4].problem or "")
    assert (found[4].world_size, found[4].rollbacks) == (0, 0)
    first = found[0]
    files = [p for p in first.path.rglob("*") if p.is_file()]
    assert first.size_bytes == sum(p.stat().st_size for p in files)
    assert abs(datetime.fromisoformat(first.created) - datetime.now(UTC)) < timedelta(minutes=1)
    assert (first.strategy, first.world_size, first.metrics) == ("single", 1, {"loss": 2.0, "eval_loss": 1.5})


def test_the_best_is_verified_and_the_next_best_stands_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = saving.checkpointer(tmp_path)
    for step, loss in enumerate([1.4, 1.1, 1.2, 1.1], start=1):
        saving.save(saver, step, metrics={"loss": 2.0, "eval_loss": loss})
    saving.save(saver, 5, metrics={"loss": 2.0, "eval_loss": 0.5}, healthy=False)

    def best(rule: BestBy | None = None, run: RunDir = saver.run) -> int | None:
        found = best_valid(run, rule)
        return None if found is None else found.step

    assert (best(), best(BestBy("loss", True)), best(BestBy("eval_loss", True))) == (2, 1, 1)
    assert (best(BestBy("accuracy", True)), best(run=RunDir(tmp_path / "none"))) == (None, None)
    assert not caplog.records
    saving.damage(saver.run.checkpoint(2) / "model" / "model.safetensors", lambda content: content.append(0))
    saving.damage(saver.run.checkpoint(4) / "manifest.json", lambda content: content.__setitem__(0, 0))
    assert best() == 3
    told = [record.getMessage() for record in caplog.records]
    assert any("step-00000004/manifest.json: " in line and "left out" in line for line in told)
    assert any("step-00000002: is damaged: model/model.safetensors has " in line for line in told)


def test_what_no_version_until_now_has_written_is_not_deleted_with_what_a_rollback_has_left(tmp_path: Path) -> None:
    run = saving.saved_run(tmp_path, 1, 2, 3, 4, 5)
    (run.checkpoint(2) / "manifest.json").unlink()
    (run.checkpoint(3) / "manifest.json").write_text('{"format": "forgather-checkpoint", "format_version": 7}')
    saving.damage(run.checkpoint(4) / "manifest.json", saving.flip(0))
    assert [info.foreign for info in list_checkpoints(run)] == [False, True, True, False, False]
    assert not any(info.abandoned for info in list_checkpoints(run))
    rollback = Rollback(1, "", "", 6, 1, 0, None, [0])
    run.rollbacks.write_text(f"{json.dumps(asdict(rollback))}\n")
    saving.save(saving.checkpointer(tmp_path), 6, info={"rollbacks": 1})
    assert [info.abandoned for info in list_checkpoints(run)] == [False, True, True, True, True, False]
    assert [info.usable for info in list_checkpoints(run)] == [True, False, False, False, False, True]
    delete_abandoned(run)
    assert (run.checkpoint_steps(), saving.debris(run)) == ([1, 2, 3, 6], [])


def test_best_is_what_the_newest_rule_says(tmp_path: Path) -> None:
    for step, metric in ((1, "loss"), (2, "loss"), (3, "eval_loss")):
        saver = saving.checkpointer(tmp_path, metric_for_best_model=metric)
        saving.save(saver, step, metrics={"loss": float(step), "eval_loss": 4.0 - step})
    for rule, best in ((None, 3), (BestBy("loss", False), 1)):
        assert [info.step for info in list_checkpoints(RunDir(tmp_path), rule) if info.best] == [best]


def test_a_name_is_given_back_to_what_was_replaced_alone(tmp_path: Path) -> None:
    clean(RunDir(tmp_path / "none"))
    run = saving.saved_run(tmp_path, 1, 2)
    run.checkpoint(1).rename(run.checkpoints / ".replaced-step-00000001-77.0")
    for name in ("replaced-step-00000002", "replaced-trial", "tmp-step-00000003", "trash-step-00000004"):
        (run.checkpoints / f".{name}-77.1" / "model").mkdir(parents=True)
    (run.checkpoints / ".tmp-step-00000002-77.4").write_text("half a manifest")
    (run.checkpoints / ".mine").write_text("not ours")
    clean(run)
    assert (run.checkpoint_steps(), saving.debris(run)) == ([1, 2], [".mine"])
    saving.assert_content(Reader(run.checkpoint(1)), 1)
    saving.assert_content(Reader(run.checkpoint(2)), 2)


def test_a_deleted_checkpoint_has_lost_its_name_on_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = saving.saved_run(tmp_path, 1), []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append((run.checkpoint_steps(), len(saving.debris(run)))))
    delete_checkpoints(list_checkpoints(run))
    assert (seen, saving.debris(run)) == ([([], 1)], [])


def test_an_edit_is_pending_until_the_next_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert record(None, {"a": 1}, {"settings": {"a": 0, "b": 2}}) == {
        "edited": {"settings": {"a": 1, "b": 2}, "starts": 0}
    }
    assert pending(run) is None
    saving.saved_run(tmp_path, 1)
    assert pending(run) is None
    saving.saved_run(tmp_path, 2, info=record(run, {"a": 1}, {}))
    assert pending(run) == (run.checkpoint(2), {"a": 1})
    for start in (1, 2):
        run.later_config(start).touch()
        assert pending(run) is None
    saving.saved_run(tmp_path, 3, info=record(run, {"a": 3}, {}))
    assert pending(run) == (run.checkpoint(3), {"a": 3})
    run.later_config(3).touch()
    assert pending(run) is None


def test_listing_verifying_and_choosing_do_not_import_torch(tmp_path: Path) -> None:
    saving.saved_run(tmp_path, 1)
    code = (
        "import sys, pathlib\n"
        "from forgather_cli.checkpoint.choice import Manifest, RunDir, choose\n"
        "from forgather_cli.checkpoint.retention import list_checkpoints\n"
        "run = RunDir(pathlib.Path(sys.argv[1]))\n"
        "assert choose(run, Manifest.problems).path == list_checkpoints(run)[0].path\n"
    )
    assert not {"torch", "numpy"} & modules_after(code, str(tmp_path))

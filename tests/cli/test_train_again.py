"""``forgather train RUN``: an old run from its start, with the same numbers, in a directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import yaml
from program import SMALL, forgather

SETTINGS = (
    "model=nano", "precision=fp32", "seq_len=32", "max_steps=6", "global_batch_size=2", "per_device_train_batch_size=2",
    "logging_steps=1", "eval_strategy=no", "callbacks=minimal", "deterministic=true",
)  # fmt: skip


def test_a_run_again_gives_the_same_numbers_beside_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = Path("runs/seed=42")  # a name with a sign that overrides have too
    assert forgather("train", *SETTINGS, f'output_dir="{old}"') == 0
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*")}
    assert forgather("train", "runs/seed=42") == 0
    (again,) = Path("outputs/default").iterdir()
    assert tiny.training_curve(again) == tiny.training_curve(old)
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*")} == before
    first, second = (yaml.safe_load((run / "config.yaml").read_text()) for run in (old, again))
    assert first.pop("output_dir") != second.pop("output_dir")
    assert first == second
    assert forgather("train", "runs/seed=42/config.yaml", "seed=7", "output_dir=other") == 0
    assert tiny.training_curve(Path("other")) != tiny.training_curve(old)
    assert forgather("resume", str(old), "max_steps=8") == 0
    assert forgather("train", str(old), "output_dir=anew") == 0  # from its start
    assert [step for step, _, _ in tiny.training_curve(Path("anew"))] == list(range(1, 9))


def test_only_a_run_that_has_begun_is_told_to_start_fresh(
    own_directory: None, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*SMALL, "save_strategy=no", "output_dir=run", "resume_from_checkpoint=true"]
    assert forgather("train", *words, "max_steps=2") == 0
    assert "starting fresh" not in caplog.text
    assert forgather("train", *words, "max_steps=4") == 0
    assert "no checkpoint in run yet: starting fresh" in caplog.text

"""``forgather train RUN``: an old run from its start, with the same numbers, in a directory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import yaml
from program import forgather

SETTINGS = (
    "model=nano", "precision=fp32", "seq_len=32", "max_steps=6", "global_batch_size=2", "per_device_train_batch_size=2",
    "logging_steps=1", "eval_strategy=no", "callbacks=minimal", "deterministic=true",
)  # fmt: skip


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, with a sign in its name that overrides have too."""
    monkeypatch.chdir(tmp_path)
    assert forgather("train", *SETTINGS, 'output_dir="runs/seed=42"') == 0
    return tmp_path / "runs" / "seed=42"


def test_a_run_again_gives_the_same_numbers_beside_the_old_one(old: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*")}
    assert forgather("train", "runs/seed=42") == 0
    (again,) = (old.parents[1] / "outputs" / "default").iterdir()
    assert tiny.training_curve(again) == tiny.training_curve(old)
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*")} == before
    first, second = (yaml.safe_load((run / "config.yaml").read_text()) for run in (old, again))
    assert first.pop("output_dir") != second.pop("output_dir")
    assert first == second
    assert forgather("train", "runs/seed=42/config.yaml", "seed=7", "output_dir=other") == 0
    other = old.parents[1] / "other"
    assert tiny.training_curve(other) != tiny.training_curve(old)


def test_a_run_that_was_resumed_begins_anew(old: Path) -> None:
    assert forgather("resume", str(old), "max_steps=8") == 0
    assert forgather("train", str(old), "output_dir=anew") == 0
    assert [step for step, _, _ in tiny.training_curve(old.parents[1] / "anew")] == list(range(1, 9))

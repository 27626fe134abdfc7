"""``logging_steps``, ``eval_steps`` and ``save_steps`` below 1: shares of the run, also by epochs and on a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from program import forgather, printed, refusal

from forgather_cli.errors import DataError
from forgather_cli.run_dir import RunDir

EPOCH = [
    "default", "model=nano", "data=synthetic", "seq_len=16", "num_samples=40", "num_eval_samples=4", "max_steps=-1",
    "global_batch_size=4", "warmup_steps=0", "callbacks=minimal", "precision=fp32", "device=cpu",
    "save_total_limit=null",
]  # fmt: skip
SHARES = ["logging_steps=0.25", "eval_steps=0.5", "save_steps=0.3", "logging_first_step=false"]


def steps_of(run: str) -> tuple[list[int], list[int], list[int]]:
    records = tiny.metrics(run)
    logged, evaluated = ([r["step"] for r in records if name in r] for name in ("grad_norm", "eval_loss"))
    return logged, evaluated, RunDir(Path(run)).checkpoint_steps()


def test_of_a_run_by_epochs_and_of_its_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = printed(capsys, "train", *EPOCH, *SHARES, "+callbacks.info={}", "output_dir=run")  # 10 steps
    assert told.code == 0
    assert "every 5 steps" in told.out + told.err
    assert steps_of("run") == ([3, 6, 9, 10], [5, 10], [3, 6, 9, 10])
    assert forgather("resume", "run", "num_train_epochs=2") == 0  # 20 steps
    assert steps_of("run") == ([3, 6, 9, 10, 15, 20], [5, 10, 20], [3, 6, 9, 10, 12, 18, 20])


def test_whole_steps_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = ["logging_steps=3", "eval_steps=5", "save_steps=3", "logging_first_step=false"]
    for run, words in {"shares": SHARES, "whole": whole}.items():
        assert forgather("train", *EPOCH, *words, f"output_dir={run}") == 0
    assert steps_of("shares") == steps_of("whole")
    assert tiny.training_curve("shares") == tiny.training_curve("whole")


def test_between_whole_steps_and_shares_nothing_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("1.5", "0", "-0.1", "true", "a"):
        assert refusal(capsys, "config", "show", *EPOCH, f"eval_steps={value}").startswith("error: eval_steps: must be")


def test_of_data_that_does_not_tell_its_length_it_is_refused(tmp_path: Path) -> None:
    trainer = tiny.script(tmp_path, data=tiny.stream(tiny.RandomTokens()), num_train_epochs=1, logging_steps=0.5)
    with pytest.raises(DataError, match=r"^logging_steps: .*max_steps"):
        trainer.train()
    tiny.script(tmp_path, data=tiny.stream(tiny.RandomTokens()), max_steps=2, logging_steps=0.5).train()

"""One run under three strategies, killed on the way twice, against the same run on one device without a break."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from program import Process, forgather, nobody_runs
from two_ranks import hold

from forgather_cli.launch.processes import children

SETTINGS = (
    "model=nano", "precision=fp32", "optimizer=adamw", "learning_rate=2e-3",
    "data.seq_len=32", "max_steps=30", "save_steps=4", "logging_steps=1", "eval_steps=10",
    "max_eval_samples=8", "async_save=false", "~callbacks.textgen", "~callbacks.tensorboard",
)  # fmt: skip


def killed_after_save(words: tuple[str, ...], step: int) -> None:
    """Start a job, which waits for it, and kill its launcher with SIGKILL once ``step`` is saved.

    Its ranks are killed with it; until they are gone they could still write.
    """
    with Process(*words) as job:
        job.read_until(rf"checkpoint saved: .*step-0*{step}\b")
        ranks = children(job.process.pid)
        assert len(ranks) > 1
        job.process.kill()
        job.finish()
    assert nobody_runs(ranks), "ranks outlive their launcher"


def test_pipeline_killed_then_fsdp2_killed_then_single_is_the_uninterrupted_single_run(tmp_path: Path) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert forgather("train", *SETTINGS, f"output_dir={alone}") == 0
    pipeline = ("trainer=pipeline", "nproc_per_node=2", "n_microbatches=4")
    killed_after_save(("train", *SETTINGS, *pipeline, *hold("on_save", 8), f"output_dir={run}"), 8)
    killed_after_save(("resume", str(run), "trainer=fsdp2", "nproc_per_node=4", "callbacks.hold.step=16"), 16)
    assert forgather("resume", str(run), "trainer=single") == 0
    expected, curve = tiny.training_curve(alone), tiny.training_curve(run)
    assert [step for step, _, _ in curve] == list(range(1, 31))
    for (step, loss, norm), (_, loss_alone, norm_alone) in zip(curve, expected, strict=True):
        assert loss == pytest.approx(loss_alone, rel=1e-5), step
        assert norm == pytest.approx(norm_alone, rel=1e-4), step
    evals = [[r["eval_loss"] for r in tiny.metrics(path) if "eval_loss" in r] for path in (alone, run)]
    assert evals[1] == pytest.approx(evals[0], rel=1e-5)
    assert json.loads((run / "exit.json").read_text())["code"] == 0

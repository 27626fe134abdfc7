"""``latest`` for the run that changed last, and ``forgather logs follow``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kept_runs import Job, make_outputs
from program import Process, document, forgather, refusal, shown


@pytest.fixture
def outputs(own_directory: None) -> Path:
    return make_outputs()


def test_latest_is_the_run_that_changed_last(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("resume latest", "checkpoint list latest", "eval latest", "logs follow latest", "logs slow latest"):
        forgather(*words.split())
        assert "latest: outputs/default/new" in capsys.readouterr().err
    os.utime(outputs / "default/old/logs/rank-0.log", (2e9, 2e9))
    assert [each["run"] for each in document(capsys, "logs", "summary", "latest")] == ["outputs/default/old"]


def test_a_log_is_followed_until_the_job_ends(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(outputs / "between")
    with Process("logs", "follow", "outputs/between") as process:
        process.read_until("what it has printed")
        for n in range(3):
            job.say(f"step {n} für alle")
            process.read_until(f"step {n} für alle")
        job.end()
        assert process.finish() == 0
    assert process.lines[-2:] == [
        "the last line", "outputs/between: ended at step 7, stopped, with exit code 0: told to",
    ]  # fmt: skip
    first, last = shown(capsys, "logs", "follow", "outputs/default/new").splitlines()  # one that was killed
    assert first == "what it has printed"
    assert "was started on nowhere" in last
    assert "has no log" in refusal(capsys, "logs", "follow", "nowhere")

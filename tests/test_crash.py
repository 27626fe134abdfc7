"""A short crash campaign: killed with SIGKILL at random moments, a resumed run equals an uninterrupted one."""

from __future__ import annotations

import time
from pathlib import Path

from crash_campaign import SMALL, campaign


def test_a_job_of_two_ranks_loses_nothing_whichever_process_is_killed(tmp_path: Path) -> None:
    overrides = [*SMALL, "trainer=ddp", "nproc_per_node=2"]
    report = campaign(trials=1, seed=int(time.time()), work=tmp_path, overrides=overrides)
    assert not report.failures, str(report)
    assert report.kills >= 1


def test_killed_runs_resume_to_the_last_bit(tmp_path: Path) -> None:
    report = campaign(trials=3, seed=int(time.time()), work=tmp_path, overrides=list(SMALL))
    assert not report.failures, str(report)
    assert report.kills >= 3

"""A rank that hangs is named, with where it stands; training goes on when it does; who is slow is told."""

from __future__ import annotations

import json
import os
import re
import signal
import traceback
from dataclasses import asdict
from pathlib import Path

import pytest
from program import Process, forgather
from two_ranks import RUN, start

from forgather_cli import distributed
from forgather_cli.launch.stacks import (
    COMPILES,
    RUNS,
    SILENT,
    WAITS,
    Collective,
    Standing,
    odd_first,
    table,
    waits_for_others,
)


def stalling(strategy: str, *acts: str, words: tuple[str, ...] = ()) -> Process:
    """A run that does these acts on rank 1, and looks for them after a second."""
    limits = ["max_steps=2000", "hang_report_after=1", "hang_timeout=300"]
    stall = ["+callbacks.stall._target_=stalls.Stall", f"+callbacks.stall.acts=[{','.join(acts)}]"]
    return start(*limits, "save_strategy=no", "eval_strategy=no", *stall, *words, strategy=strategy)


def reported(job: Process) -> dict[str, object]:
    """What hang.json says of the odd rank, once the terminal has it."""
    job.read_until(r"no progress for \d+ s: rank 1 [^;]*$")
    job.read_until(r"^rank +host")
    assert job.read_until(r"^\d").startswith("1 ")
    document = json.loads(RUN.hang.read_text())
    assert [each["rank"] for each in document["ranks"]] == [1, 0]
    assert document["ended_after_seconds"] is None
    odd, waiting = document["ranks"]
    assert waiting["doing"] == "waits for others"
    assert waiting["odd"] == ""
    return odd


def test_who_is_waited_for_is_named_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with stalling("ddp", "sleep", "data", "skip", words=("+callbacks.control={}",)) as job:
        job.read_until("step 5/")
        for number, does in enumerate(["runs", "reads data"]):
            Path(f"go-{number}").touch()
            odd = reported(job)
            assert "stalls.py" in odd["where"]
            assert odd["doing"] == does
            assert odd["collective"]["state"] == "completed"
            Path(f"end-{number}").touch()
            job.read_until(r"training continues after \d+ s")
            assert json.loads(RUN.hang.read_text())["ended_after_seconds"] >= 1
        Path("go-2").touch()
        odd = reported(job)
        assert odd["collective"]["state"] == "scheduled"
        assert forgather("control", "stacks", "run") == 0
        assert capsys.readouterr().out.splitlines()[1].startswith("1 ")
        assert forgather("control", "stacks", "run", "--json") == 0
        first, second = json.loads(capsys.readouterr().out)["ranks"]
        assert (first.pop("seconds") > odd.pop("seconds"), first, second["rank"]) == (True, odd, 0)


@pytest.mark.full
def test_who_is_slow_is_told() -> None:
    with stalling("ddp", "slow", words=("hang_report_after=0.5", "logging_steps=100", "callbacks.json=null")) as job:
        line = job.read_until(r"rank \d is slow")
    assert re.search(r"WARNING rank 1 is slow, .* stands at .*stalls.py:\d+ in on_step_begin", line), line


@pytest.mark.full
def test_a_stopped_process_does_not_answer() -> None:
    with stalling("pipeline", "none") as job:
        job.read_until("step 5/")
        pid = int(Path("pid-1").read_text())
        os.kill(pid, signal.SIGSTOP)
        odd = reported(job)
        assert odd["doing"] == "does not answer"
        assert f"kill -CONT {pid}" in odd["where"]
        os.kill(pid, signal.SIGCONT)
        job.read_until(r"training continues after \d+ s")


def test_a_disk_that_hangs_and_a_wrong_collective_are_named() -> None:
    """After evaluations and a save of 1.5 s, which are no reason for an alarm."""
    words = ("save_strategy=steps", "save_steps=5", "async_save=false", "save_timeout=12", "eval_strategy=steps",
             "eval_steps=1")  # fmt: skip
    with stalling("fsdp2", "late", "save", "mismatch", words=words) as job:
        Path("go-0").touch()
        job.read_until("step-00000015")
        assert not RUN.hang.exists(), job.output
        Path("go-1").touch()
        odd = reported(job)
        assert odd["doing"] == "saves"
        assert odd["seconds"] >= 6
        assert "stalls.py" in odd["where"]
        Path("end-1").touch()
        job.read_until(r"training continues after \d+ s")
        Path("go-2").touch()
        while (odd := reported(job))["collective"]["name"] != "broadcast":  # a step of a busy machine
            job.read_until(r"training continues after \d+ s")


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "pipeline"])
def test_a_long_quiet_run_raises_no_alarm(strategy: str) -> None:
    words = ["max_steps=6000", "eval_steps=100", "save_steps=200", "logging_steps=50", "hang_report_after=5"]
    with start(*words, strategy=strategy) as job:
        assert job.finish() == 0, job.output
    assert not RUN.hang.exists()
    assert not re.search("no progress|is slow", job.output), job.output


def test_a_message_between_ranks_is_a_wait_and_a_norm_in_the_same_file_is_none() -> None:
    for function, waits in ((distributed._all_gather, True), (distributed.clip_grad_norm, False)):
        entry = traceback.FrameSummary(distributed.__file__, 1, function.__name__, lookup_line=False, line="x")
        assert waits_for_others(traceback.StackSummary.from_list([entry])) == waits


def standing(rank: int, doing: str = WAITS, sequence: int = 1, *, group: str = "0", unusual: bool = False) -> Standing:
    collective = Collective(group, sequence, "all_reduce", [[3]], "scheduled")
    return Standing(rank, "here", 7, 5, 31.0, doing, collective, unusual, "file.py:1 in work")


@pytest.mark.parametrize(
    ("standings", "odd"),
    [
        ([standing(0), standing(1, RUNS), standing(2)], [1]),
        ([standing(0), standing(1, SILENT), standing(2, COMPILES)], [1, 2]),
        ([standing(0), standing(1), standing(2, sequence=0)], [2]),
        ([standing(0), standing(1, group="4", unusual=True)], [1]),
        ([standing(0), standing(1, group="4")], []),
        ([standing(0, RUNS), standing(1, RUNS), standing(2, RUNS, 0)], [2]),
        ([standing(0), standing(1)], []),
    ],
)
def test_the_odd_one_comes_first(standings: list[Standing], odd: list[int]) -> None:
    found = odd_first(standings)
    assert [each.rank for each in found if each.odd] == odd
    assert [each.rank for each in found] == odd + [each.rank for each in standings if each.rank not in odd]
    assert [Standing.from_document(asdict(each)) for each in found] == found
    assert len(table(found)) == len(standings) + 1

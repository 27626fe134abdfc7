"""ProfilerCallback: which steps it records, what it leaves, and what it says when the run ends too early."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from forgather_cli.errors import CallbackError, SetupError
from forgather_cli.run_dir import RunDir

SIX = ["max_steps=6", "+callbacks.profiler.start_step=2", "+callbacks.profiler.num_steps=3"]


def train(path: Path, *overrides: str) -> None:
    tiny.train(tiny.config(path, "save_strategy=no", *overrides), RunDir(path))


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def operators(trace: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]


def calls(trace: Path, name: str) -> int:
    return sum(event["name"] == name for event in operators(trace))


def test_the_steps_of_the_window_and_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, *SIX)
    assert files(tmp_path / "profile") == ["rank-0-steps-3-5.trace.json", "rank-0-steps-3-5.txt"]
    # one optimizer with one group of matrices and one of the rest: the fused kernel runs twice a step
    assert calls(tmp_path / "profile/rank-0-steps-3-5.trace.json", "aten::_fused_adamw_") == 3 * 2
    table = (tmp_path / "profile/rank-0-steps-3-5.txt").read_text()
    assert table.count("The 30 longest by") == 2
    assert max(int(n) for n in re.findall(r"ProfilerStep\*.* (\d+) +\[\] *$", table, re.MULTILINE)) == 3
    longest = table.split("The 30 longest by")[1]
    assert len(longest.split("\n-")[2].splitlines()) - 1 == 30
    output = capsys.readouterr()
    assert "profile of steps 3 to 5 on rank 0\n" in output.out
    assert "aten::mm" in output.out
    assert "rank-0-steps-3-5.trace.json" in output.out
    assert output.err == ""


def test_settings_of_torch_and_a_resumed_run_is_profiled_anew(tmp_path: Path) -> None:
    window = ["save_strategy=steps", "+callbacks.profiler.start_step=0", "+callbacks.profiler.num_steps=1"]
    more = ["+callbacks.profiler.with_stack=true", "+callbacks.profiler.with_flops=true"]
    train(tmp_path, "max_steps=1", *window, "+callbacks.profiler.record_shapes=false")
    train(tmp_path, "max_steps=2", *window, *more, "resume_from_checkpoint=true")
    first, second = (tmp_path / f"profile/rank-0-steps-{n}-{n}.trace.json" for n in (1, 2))
    assert calls(first, "aten::_fused_adamw_") == 2
    assert not any("Input Dims" in event.get("args", {}) for event in operators(first))
    trace = json.loads(second.read_text())["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in trace), "shapes are recorded by default"
    assert any(event.get("cat") == "python_function" and "decoder.py" in event["name"] for event in trace)
    table = (tmp_path / "profile/rank-0-steps-2-2.txt").read_text()
    assert "Input Shapes" in table
    assert "FLOPs" in table


def test_training_that_ends_inside_the_window_writes_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, "max_steps=4", "+callbacks.profiler={}", "callbacks.profiler.output_dir=" + str(tmp_path / "mine"))
    assert files(tmp_path / "mine") == ["rank-0-steps-4-4.trace.json", "rank-0-steps-4-4.txt"]
    assert not (tmp_path / "profile").exists()
    assert "only 1 of 5 steps were profiled: training ended after 4 steps of this process" in caplog.text


@pytest.mark.parametrize("steps", [2, 3])  # in the window's warm-up, and just at its end
def test_training_that_ends_before_the_window_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    train(tmp_path, f"max_steps={steps}", "+callbacks.profiler={}")
    [warning] = [record for record in caplog.records if "callbacks.profiler.start_step" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert f"training ended after {steps} steps of this process, of which start_step=3" in warning.getMessage()
    assert files(tmp_path / "profile") == []


def test_a_run_that_fails_inside_the_window_keeps_the_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = "+callbacks.bad={_target_: users_callbacks.Raises, event: on_pre_optimizer_step, step: 3}"
    with pytest.raises(CallbackError, match="ZeroDivisionError: of the user's"):
        train(tmp_path, *SIX, bad)
    assert files(tmp_path / "profile") == ["rank-0-steps-3-3.trace.json", "rank-0-steps-3-3.txt"]
    assert "profiler" not in caplog.text
    train(tmp_path / "next", *SIX)  # the recording did not outlive the run
    assert files(tmp_path / "next/profile") == ["rank-0-steps-3-5.trace.json", "rank-0-steps-3-5.txt"]


def test_a_directory_that_cannot_be_made_is_found_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = r"^callbacks\.profiler\.output_dir: .*file/below cannot be made: Not a directory; choose another$"
    with pytest.raises(SetupError, match=message):
        train(tmp_path, "+callbacks.profiler={}", f"callbacks.profiler.output_dir={tmp_path}/file/below")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_trace_that_cannot_be_written_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile/rank-0-steps-3-5.trace.json/in the way").mkdir(parents=True)  # of which Kineto tells nobody
    train(tmp_path, *SIX)
    assert [record["step"] for record in tiny.metrics(tmp_path) if "loss" in record][-1] == 6
    assert "rank-0-steps-3-5.trace.json could not be written" in caplog.text

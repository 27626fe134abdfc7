"""JsonLogger: what a record holds, and what becomes of the file on resume."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.callbacks.json_logger import JsonLogger
from forgather_cli.run_dir import RunDir

CONTROL = TrainerControl()


def log(logger: JsonLogger, step: int, **logs: Any) -> None:
    logger.on_log(None, TrainerState(global_step=step, epoch=step / 10), CONTROL, logs=logs)


def begin(path: Path, resumed_step: int = 0) -> JsonLogger:
    logger = JsonLogger(run=RunDir(path))
    logger.on_train_begin(None, TrainerState(resumed_step=resumed_step), CONTROL)
    return logger


def steps(path: Path) -> list[int]:
    return [record["step"] for record in tiny.metrics(path)]


def run_to(path: Path, last: int) -> None:
    logger = begin(path)
    for step in range(1, last + 1):
        log(logger, step, loss=1.0 / step)


def test_a_record_has_time_step_epoch_and_all_digits(tmp_path: Path) -> None:
    logger = begin(tmp_path)
    logs = {"loss": 0.1 + 0.2, "learning_rate": 1e-3 / 3, "step": 99}
    logger.on_log(None, TrainerState(global_step=7, epoch=0.7), CONTROL, logs=logs)
    (record,) = tiny.metrics(tmp_path)
    assert list(record)[:3] == ["time", "step", "epoch"]
    assert (record["step"], record["epoch"], record["loss"]) == (7, 0.7, 0.1 + 0.2)
    assert record["learning_rate"] == 1e-3 / 3
    assert abs(datetime.fromisoformat(record["time"]) - datetime.now(UTC)).total_seconds() < 60


def test_every_line_is_json_whatever_a_callback_adds(tmp_path: Path) -> None:
    logger = begin(tmp_path)
    log(logger, 1, a=math.nan, b=-math.inf, c=torch.tensor(2.5), d=[1, math.inf], e=Path("x"), f=None, g=True)
    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert {k: record[k] for k in "abcdefg"} == {
        "a": None, "b": None, "c": 2.5, "d": [1, None], "e": "x", "f": None, "g": True,
    }  # fmt: skip


def test_only_world_rank_zero_writes(tmp_path: Path) -> None:
    logger, state = JsonLogger(run=RunDir(tmp_path)), TrainerState(is_world_process_zero=False)
    logger.on_train_begin(None, state, CONTROL)
    logger.on_log(None, state, CONTROL, logs={"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_resume_cuts_what_came_after(tmp_path: Path) -> None:
    run_to(tmp_path, 6)
    kept = tiny.metrics(tmp_path)[:4]
    logger = begin(tmp_path, resumed_step=4)
    assert tiny.metrics(tmp_path) == kept
    log(logger, 5, loss=0.5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_start_cuts_all_but_what_this_process_has_evaluated_before(tmp_path: Path) -> None:
    logger = JsonLogger(run=RunDir(tmp_path))
    log(logger, 0, eval_loss=5.0)
    logger.on_train_begin(None, TrainerState(), CONTROL)
    log(logger, 1, loss=4.0)
    assert steps(tmp_path) == [0, 1]
    log(begin(tmp_path), 0, eval_loss=5.0)
    assert steps(tmp_path) == [0]


@pytest.mark.parametrize("torn", [b'{"time": "2026', b"\0\0\0\0", b'{"step": 3}'])
@pytest.mark.parametrize("trains", [True, False])
def test_a_torn_tail_is_cut(tmp_path: Path, torn: bytes, trains: bool) -> None:
    run_to(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    log(begin(tmp_path, resumed_step=5) if trains else JsonLogger(run=RunDir(tmp_path)), 6, loss=1.0)
    assert steps(tmp_path) == [1, 2, 6]


@pytest.mark.parametrize("content", [b"not json\n", b'{"loss": 1}\n', b"[1]\n", b"\xff\xfe\n"])
def test_what_is_not_such_a_log_is_set_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    run_to(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(content)
    (tmp_path / "metrics.jsonl.bak").write_text("an older one")
    log(begin(tmp_path, resumed_step=2), 3, loss=1.0)
    assert steps(tmp_path) == [3]
    assert (tmp_path / "metrics.jsonl.bak").read_text() == "an older one"
    assert (tmp_path / "metrics.jsonl.bak.2").read_bytes().endswith(content)
    assert "line 3" in caplog.text
    assert "metrics.jsonl.bak.2" in caplog.text

"""Where a run's time went: what training measures, and what ``forgather logs slow`` makes of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from logged import make_run, write_records
from program import document, refusal, shown

from forgather_cli import Trainer, TrainerCallback, TrainingArguments
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.slow import explain, times_of

SLOW = 0.04
"""Seconds: of 24 samples together a tenth of the time, even where a save takes as long as on a busy disk."""


class SlowTokens(tiny.RandomTokens):
    def __getitem__(self, index: int) -> Any:
        time.sleep(SLOW)
        return super().__getitem__(index)


class Slow(TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.2)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.3 if state.global_step == 0 else 0.0)


@pytest.mark.usefixtures("one_thread")
def test_training_measures_where_its_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2, "use_cpu": True}
    args = TrainingArguments(str(tmp_path), max_steps=6, per_device_train_batch_size=4, **settings)
    data, held_out = SlowTokens(24), tiny.RandomTokens(8)
    metrics = Trainer(tiny.decoder(), args, None, data, held_out, callbacks=[Slow]).train().metrics
    assert metrics["data_seconds"] >= 24 * SLOW
    assert metrics["evaluation_seconds"] >= 2 * 0.2
    assert metrics["first_step_seconds"] >= 0.3
    kinds = ("step_seconds", "data_seconds", "evaluation_seconds", "first_step_seconds", "save_seconds")
    assert sum(metrics[kind] for kind in kinds) == pytest.approx(metrics["train_runtime"])
    assert metrics["save_seconds"] > 0
    assert "sync_seconds" not in metrics  # alone
    shares = re.search("the time went to +.*", capsys.readouterr().out)
    assert 95 <= sum(map(int, re.findall(r" (\d+)%", shares[0]))) <= 105
    report = explain(RunDir(tmp_path))
    assert report.times == pytest.approx({kind: metrics[kind] for kind in kinds})
    assert {"dataloader_num_workers=2"} <= {finding.remedy for finding in report.findings}
    assert report.attention is None  # of a script, which logs elsewhere


def test_a_run_that_still_trains_is_told_from_its_logs() -> None:
    logs: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0},
        {"step": 11, "loss": 2.0, "step_time": 0.5, "data_time": 0.1},
        {"step": 11, "eval_loss": 2.0, "eval_runtime": 3.0},
    ]
    of_a_start = {"step_seconds": 4.0, "data_seconds": 1.0, "evaluation_seconds": 3.0}
    assert times_of(logs) == pytest.approx(of_a_start)
    ended = {"step": 11, "train_runtime": 9.0, "first_step_seconds": 1.0, **of_a_start}
    again = [{"step": 21, "loss": 2.0, "step_time": 0.5, "data_time": 0.1}]
    assert times_of([*logs, ended, *again]) == pytest.approx(
        {"step_seconds": 8.0, "data_seconds": 2.0, "evaluation_seconds": 3.0, "first_step_seconds": 1.0}
    )


def run_of(root: Path, seconds: dict[str, float], logs: dict[str, Any] | None = None, **settings: Any) -> RunDir:
    """A run of a minute in its directory, the rest of which went to steps."""
    tree = {
        "max_steps": 100, "eval_strategy": "steps", "eval_steps": 10, "save_steps": 10, "async_save": True,
        "per_device_train_batch_size": 8, "dataloader_num_workers": 0, "data": {"seq_len": 1024}, **settings,
    }  # fmt: skip
    make_run(root, [], **tree)
    end = {"step": 100, "train_runtime": 60.0, "step_seconds": 60.0 - sum(seconds.values()), **seconds}
    log = {"step": 100, "loss": 1.0, "step_time": 0.5, "eval_runtime": 20.0, **(logs or {})}
    write_records(root, [log, end])
    return RunDir(root)


@pytest.mark.parametrize(
    ("seconds", "logs", "settings", "remedy"),
    [
        ({"data_seconds": 20}, {}, {"dataloader_num_workers": 4}, "dataloader_num_workers=8"),
        ({"first_step_seconds": 20}, {}, {"torch_compile": True}, "torch_compile=false"),
        ({"evaluation_seconds": 20}, {}, {}, "eval_steps=20"),
        ({"evaluation_seconds": 20}, {"eval_runtime": 2.0}, {}, "callbacks.textgen"),
        ({"save_seconds": 20}, {}, {}, "save_steps=20"),
        ({"save_seconds": 20}, {}, {"async_save": False}, "async_save=true"),
        ({"sync_seconds": 20}, {}, {}, "forgather control stacks"),
        ({}, {"mfu": 0.05}, {"data": {"seq_len": 128}, "torch_compile": True}, "per_device_train_batch_size=16"),
        ({}, {"step_time": 0.01}, {"data": {"seq_len": 128}, "global_batch_size": 8}, "global_batch_size=16"),
        ({}, {"mfu": 0.2}, {"precision": {"type": "fp32"}}, "precision=bf16"),
        ({}, {"mfu": 0.2}, {"precision": {"type": "bf16"}}, "torch_compile=true"),
        ({}, {"mfu": 0.5}, {}, None),
    ],
)  # fmt: skip
def test_what_takes_much_has_a_setting_to_try(
    tmp_path: Path, seconds: dict[str, float], logs: dict[str, Any], settings: dict[str, Any], remedy: str | None
) -> None:
    report = explain(run_of(tmp_path / "run", seconds, logs, **settings))
    assert sum(report.times.values()) == pytest.approx(60.0)
    assert len(report.findings) == (remedy is not None)
    assert remedy is None or remedy in report.findings[0].remedy


def test_a_slow_rank_that_the_log_names_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", {"sync_seconds": 1.0})
    run.logs.mkdir()
    run.rank_log(0).write_text(
        "INFO attention: cudnn; documents of a row are kept apart by varlen_attn\n"
        "WARNING rank 1 is slow, and the others wait for it: its own work takes 80 %\n"
    )
    text = shown(capsys, "logs", "slow", str(run.root))
    assert "rank 1 is slow" in text
    assert "attention: cudnn; documents" in text
    assert "98.3 %" in text
    assert "steps 98%, sync 2%" in shown(capsys, "logs", "summary", str(run.root))
    assert document(capsys, "logs", "slow", str(run.root))["times"] == {"step_seconds": 59.0, "sync_seconds": 1.0}
    run_of(tmp_path / "other", {})
    assert "holds 2 runs" in refusal(capsys, "logs", "slow", str(tmp_path))


def of_paces(root: Path, paces: list[float], **more: Any) -> RunDir:
    """A run that logged every 10 steps of 1000 tokens, whose steps took that many seconds."""
    run = run_of(root, {})
    records = []
    for n, pace in enumerate(paces, start=1):
        log = {"step_time": pace, "tok_per_sec": 1000 / pace, "data_time": 0.0}
        own = {name: values[n - 1] for name, values in more.items() if values[n - 1] is not None}
        records.append({"step": 10 * n, "loss": 1.0, **log, **own})
    write_records(run.root, records)
    return run


STEADY = [1.0, 1.1, 0.97, 1.05, 1.0, 1.12, 0.95, 1.0, 1.08, 1.0] * 2
HALVED = [1.0] * 12 + [2.1] * 6 + [1.0] * 4


@pytest.mark.parametrize(
    ("paces", "more", "told"),
    [
        (STEADY, {}, None),
        (STEADY, {"cpu_wait": [0.05] * 20}, None),
        (HALVED, {"cpu_wait": [0.0] * 12 + [0.52] * 6 + [0.0] * 4}, r"Steps 121 to 180 took 2\.1 times .*cores.*52 %"),
        (HALVED, {"cpu_wait": [0.0] * 22}, r"Steps 121 to 180 took 2\.1 times .* though cores were free"),
        (HALVED, {}, r"Steps 121 to 180 took 2\.1 times .* nothing here tells why"),
        ([1.0 + n / 20 for n in range(20)], {}, r"Steps 111 to 200 took 1\.\d times"),  # it drifts
        ([1.0] * 5 + [2.0] * 9 + [1.0] + [2.5] * 5, {}, "Steps 51 to 140 .*, and 1 more"),  # most of it was slow
        ([1.0] * 40 + [2.0] + [1.0] * 9, {}, None),  # one log of fifty
        ([2.0] * 20, {"cpu_wait": [0.5] * 20}, "^For 50 % of the steps' time there was no core"),  # from the beginning
        ([1.0, 2.0, 2.0], {}, None),  # too few to tell
        (HALVED, {"data_time": [0.0] * 12 + [1.1] * 6 + [0.0] * 4}, "Steps wait for data"),
        (HALVED, {"tok_per_sec": [1000.0] * 22}, None),  # longer sequences
    ],
)  # fmt: skip
def test_steps_that_were_slower_than_others_are_told_with_the_cores_that_they_lacked(
    tmp_path: Path, paces: list[float], more: dict[str, Any], told: str | None
) -> None:
    findings = explain(of_paces(tmp_path / "run", paces, **more)).findings
    assert len(findings) == (told is not None), findings
    assert told is None or re.search(told, findings[0].what), findings


def test_a_start_on_a_slower_machine_is_not_compared_with_the_one_before(tmp_path: Path) -> None:
    run = of_paces(tmp_path / "run", [1.0] * 10 + [2.0] * 10)
    assert len(explain(run).findings) == 1
    logs = tiny.metrics(run.root)
    end = {"step": 100, "train_runtime": 100.0, "step_seconds": 100.0}
    write_records(run.root, [*logs[:10], end, *logs[10:]])
    assert explain(run).findings == []


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this system does not tell who waits")
@pytest.mark.usefixtures("one_thread")
def test_steps_beside_processes_that_take_their_core_are_told(tmp_path: Path) -> None:
    """All on one core, and so many that it is no matter what else this machine does there."""
    cores = os.sched_getaffinity(0)
    code = "kill -STOP $$; while :; do :; done"  # started, it waits for its time
    busy: list[subprocess.Popen[bytes]] = []

    class Busy(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (60, 90):
                for process in busy:
                    process.send_signal(signal.SIGCONT if state.global_step == 60 else signal.SIGKILL)

    arguments = TrainingArguments(str(tmp_path), max_steps=120, logging_steps=10, use_cpu=True, save_strategy="no")
    try:
        os.sched_setaffinity(0, {min(cores)})
        busy += [subprocess.Popen(["sh", "-c", code]) for _ in range(16)]
        for process in busy:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        Trainer(tiny.decoder(), arguments, None, tiny.RandomTokens(), callbacks=[Busy]).train()
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()
    waits = {record["step"]: record["cpu_wait"] for record in tiny.metrics(tmp_path) if "step_time" in record}
    assert max(waits[80], waits[90]) > 0.5
    assert all(0 <= wait <= 1 for wait in waits.values())
    [finding] = (each for each in explain(RunDir(tmp_path)).findings if re.match(r"Steps \d", each.what))
    first, last = map(int, re.findall(r"Steps (\d+) to (\d+)", finding.what)[0])
    assert first <= 90 <= last + 10
    assert "cores" in finding.what

"""``forgather logs summary`` of many runs: what is found, which settings differ, states, order, Markdown."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from logged import make_run
from program import document, refusal, shown

from forgather_cli.run_dir import RunDir
from forgather_cli.runs.find import differing, find_runs, labels
from forgather_cli.runs.records import positions
from forgather_cli.runs.summary import summarize


def summaries(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    return document(capsys, "logs", "summary", *words)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for rate, losses in ((0.001, [3.0, 2.5]), (0.003, [2.9, 2.0]), (0.0003, [])):
        make_run(tmp_path / "sweep" / f"lr-{rate}", losses, learning_rate=rate)
    return tmp_path / "sweep"


def test_a_directory_of_runs_is_a_table_with_the_settings_that_differ(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = summaries(capsys, str(sweep))
    assert [(each["settings"], each["last_loss"], each["state"]) for each in found] == [
        ({"learning_rate": "0.0003"}, None, "cut"),
        ({"learning_rate": "0.001"}, 2.5, "cut"),
        ({"learning_rate": "0.003"}, 2.0, "cut"),
    ]
    assert "has no metrics.jsonl" in found[0]["reason"]
    assert summaries(capsys, str(sweep / "lr-*")) == found  # a pattern that the shell left alone
    head, rule, *rows = shown(capsys, "logs", "summary", str(sweep), "--markdown").splitlines()
    assert head.startswith("| run | learning_rate | step | first loss | loss |")
    assert rule.startswith("| --- | ---: |")
    assert rows[2].split(" | ")[1:5] == ["0.003", "20/100", "2.9000", "2.0000"]


def test_runs_are_sorted_by_what_they_measured_or_by_a_setting(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rates(*words: str) -> list[str]:
        return [each["settings"]["learning_rate"] for each in summaries(capsys, str(sweep), *words)]

    assert rates("--sort", "eval_loss") == ["0.003", "0.001", "0.0003"]  # those without come last
    assert rates("--sort", "bits_per_byte") == ["0.001", "0.003", "0.0003"]
    head = shown(capsys, "logs", "summary", str(sweep), "--markdown").splitlines()[0]
    columns = [column.strip() for column in head.strip("|").split("|")]
    assert len({tuple(rates("--sort", column)) for column in columns}) > 1  # by the name of each of them
    assert rates("--sort", "best eval") == rates("--sort", "eval_loss")
    assert rates("--sort", "bits/byte") == rates("--sort", "bits_per_byte")
    assert rates("--sort", "learning_rate") == ["0.0003", "0.001", "0.003"]
    assert rates("--sort", "learning_rate", "--reverse") == ["0.003", "0.001", "0.0003"]
    told = refusal(capsys, "logs", "summary", str(sweep), "--sort", "eval_los")
    assert "--sort: nothing to sort by is called 'eval_los'; did you mean eval_loss? Known: " in told


def test_states_are_those_of_the_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ("done", "stopped", "aborted", "failed", "diverged", "cut")
    for state in told:
        run = make_run(tmp_path / state, [2.0])
        ended = {"state": state, "code": 1, "reason": state, "step": 10, "time": "now"}
        (run / "exit.json").write_text(json.dumps(ended))
    codes = {"done": 0, "failed": 1, "stopped": 75, "cut": 143}  # which 0.1.0 wrote alone
    for state, code in codes.items():
        run = make_run(tmp_path / f"{state}-old", [2.0])
        (run / "exit.json").write_text(json.dumps({"code": code, "reason": state, "step": 10, "time": "now"}))
    running = make_run(tmp_path / "running", [2.0])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (running / ".lock").write_text(f"pid {process.pid} on {socket.gethostname()}\n")
        states = {Path(each["run"]).name: each["state"] for each in summaries(capsys, str(tmp_path))}
        process.communicate(b"\n")
    assert states == {state: state for state in [*told, "running"]} | {f"{state}-old": state for state in codes}
    assert summarize(RunDir(running)).state == "cut"
    make_run(tmp_path / "broken", [2.0]).joinpath("metrics.jsonl").write_text("nothing\n{}\n")
    [broken] = [each for each in summaries(capsys, str(tmp_path)) if each["run"].endswith("broken")]
    assert "not a record of metrics" in broken["reason"]


def test_logs_that_went_to_a_directory_of_their_own_are_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [2.0], logging_dir=str(tmp_path / "logs"))
    (tmp_path / "logs").mkdir()
    (run / "metrics.jsonl").rename(tmp_path / "logs/metrics.jsonl")
    assert summarize(find_runs([run])[0]).last_loss == 2.0


def test_options_are_named_by_their_group_and_what_only_one_has_is_left_out(tmp_path: Path) -> None:
    def run(name: str, kind: str, **more: Any) -> RunDir:
        return RunDir(make_run(tmp_path / name, [1.0], trainer__type=kind, **more))

    runs = [
        run("a", "single", nproc_per_node="auto"),
        run("b", "ddp", trainer__bucket_cap_mb=25, nproc_per_node=2),
        run("c", "pipeline", trainer__n_microbatches=4, nproc_per_node=2),
    ]
    assert differing(runs) == [{"trainer": "single"}, {"trainer": "ddp"}, {"trainer": "pipeline"}]
    runs.append(run("d", "pipeline", trainer__n_microbatches=8, nproc_per_node=2))
    assert labels(runs) == [
        "trainer=single", "trainer=ddp", "trainer=pipeline, n_microbatches=4", "trainer=pipeline, n_microbatches=8",
    ]  # fmt: skip


def test_labels_have_all_settings_that_differ_those_of_data_too(tmp_path: Path) -> None:
    tokenizers = {"bytes": 257, "bpe": 4096}
    runs = [
        RunDir(make_run(tmp_path / name, [1.0], ("data=text",), learning_rate=rate, data__tokenizer=name,
                        data__files=[f"{name}.txt"], data__bpe_vocab_size=tokenizers[name]))
        for rate, name in ((0.001, "bytes"), (0.01, "bpe"))
    ]  # fmt: skip
    assert [set(label.split(", ")) for label in labels(runs)] == [
        {"learning_rate=0.001", "tokenizer=bytes", "files=bytes.txt", "bpe_vocab_size=257"},
        {"learning_rate=0.01", "tokenizer=bpe", "files=bpe.txt", "bpe_vocab_size=4096"},
    ]
    alike = [RunDir(make_run(tmp_path / f"{name}/run", [1.0])) for name in ("x", "y")]
    assert labels(alike) == ["x/run", "y/run"]
    runs = []  # many settings of an option are named by it
    for name, size in {"nano": 64, "tiny": 256}.items():
        shape = {"model__hidden_size": size, "model__layers": size // 32, "model__heads": size // 16}
        runs.append(RunDir(make_run(tmp_path / name, [1.0], (f"model={name}",), **shape)))
    assert labels(runs) == ["model=nano", "model=tiny"]


def test_running_time_leaves_out_the_time_between_a_stop_and_a_resume() -> None:
    seconds = [0, 10, 20, 3620, 3630]
    records = [{"time": f"2026-01-01T{s // 3600:02}:{s % 3600 // 60:02}:{s % 60:02}+00:00", "step": s} for s in seconds]
    assert positions(records, "time") == [0, 10, 20, 30, 40]
    records = [{"step": 10, "total_tokens": 100}, {"step": 15}, {"step": 20, "total_tokens": 200}, {"step": 20}]
    assert positions(records, "tokens") == [100, 150, 200, 200]

"""``train -m``: what is checked before the first job, what runs at once, and with what the next call goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from program import SMALL, Process, document, forgather, refusal
from terminal import Terminal

from forgather_cli.launch.exit_status import State, write_exit_record
from forgather_cli.run_dir import RunDir
from forgather_cli.sweeps.run import SweepJob, _cells, _print_table

pytestmark = pytest.mark.usefixtures("own_directory")


def test_a_sweep_goes_on_with_what_is_left() -> None:
    Path("quitting.py").write_text(
        "import pathlib\n"
        "from forgather_cli.callbacks.base import TrainerCallback\n"
        "class Quits(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        mark = pathlib.Path('has-quit')\n"
        "        control.should_abort_without_save = not mark.exists()\n"
        "        mark.touch()\n"
    )

    def sweep(sizes: str) -> tuple[int, str]:
        words = ["max_steps=2", f"model.vocab_size={sizes}", "+callbacks.quits._target_=quitting.Quits", "-m"]
        with Process("train", *SMALL, *words) as process:
            return process.finish(), process.output

    code, told = sweep("8,300,301")
    assert code == 1
    assert "model.vocab_size: the tokenizer has 257 tokens, got 8" in told
    assert re.search(r"vocab_size-8-\w+ +refused", told)
    assert re.search(r"vocab_size-300-\w+ +aborted +1 ", told)
    assert re.search(r"vocab_size-301-\w+ +done, best +2 +\d\.\d{4}", told)
    assert re.search(r"^not all jobs are done.*\n.*train.*8,300,301", told, re.MULTILINE)
    [root] = Path("outputs/default").glob("sweep-*")
    [done] = root.glob("*vocab_size-301-*")
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    code, told = sweep("300,301")
    assert code == 0
    assert f"{done.name} is done" in told
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before
    assert re.search(r"vocab_size-300-\w+ +done(, best)? +2 +\d\.\d{4}", told), "an aborted job is started again"


def test_a_sweep_runs_several_jobs_at_once_and_goes_on_after_control_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # which torch does not find here
    Path("slow.py").write_text(
        "import os, pathlib, time\n"
        "from forgather_cli.callbacks.base import TrainerCallback\n"
        "class UntilToldOtherwise(TrainerCallback):\n"
        "    def on_train_begin(self, args, state, control, **kwargs):\n"
        "        pathlib.Path(args.output_dir, 'gpus').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        time.sleep(0 if pathlib.Path('quick').exists() else 0.1)\n"
    )
    words = [word for word in SMALL if not word.startswith("device=")]
    words += ["max_steps=200", "+callbacks.slow._target_=slow.UntilToldOtherwise"]
    words += ["model.vocab_size=300,8,301,302", "-m", "--jobs", "2"]
    job = Terminal("train", *words)
    job.read_until(r"=300 +running +\d+/200 +\d+\.\d{4}[^\n]*\n[^\n]*=8 +refused[^\n]*\n[^\n]*=301 +running +\d+/200")
    job.press(b"\x03")
    assert job.finish() == 75, job.output
    assert "Traceback" not in job.output
    assert "error: model.vocab_size: the tokenizer has 257 tokens, got 8" in job.output
    [root] = Path("outputs/default").glob("sweep-*")
    stopped = {path.parent.name.rpartition("-")[0]: json.loads(path.read_text()) for path in root.glob("*/exit.json")}
    assert {name[-3:]: end["code"] for name, end in stopped.items()} == {"300": 75, "301": 75}
    assert sorted(path.read_text() for path in root.glob("*/gpus")) == ["5", "7"]

    Path("quick").touch()
    with Process("train", *words) as again:
        assert again.finish() == 1, again.output
    lines = [re.sub(r"^\S+ \S+ (\[\d/4\]) \S+?size-(\d+)-\w+", r"\1 \2", line) for line in again.lines]
    assert lines.index("[2/4] 8 begins") < min(n for n, line in enumerate(lines) if line.startswith("[1/4] 300 done"))
    for number, size in ((1, 300), (3, 301), (4, 302)):
        assert f"[{number}/4] {size} begins" in lines
        assert any(line.startswith(f"[{number}/4] {size} done: step 200, loss") for line in lines), again.output
        [run] = (RunDir(path) for path in root.glob(f"*-{size}-*"))
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert [record["step"] for record in records if "loss" in record] == list(range(1, 201))
    assert lines.count("[2/4] 8 refused") == 1


def test_jobs_at_once_need_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    words = ["train", *SMALL, "learning_rate=1e-3,2e-3", "trainer=ddp", "nproc_per_node=2", "-m", "--dry-run"]
    words += ["--jobs=2"]
    assert forgather(*words) == 0  # on a CPU
    told = "--jobs: 2 at once with 2 GPUs each (nproc_per_node) need 4, and this machine has 3; give --jobs 1"
    assert told in refusal(capsys, *words, "device=auto")


def test_a_sweep_tells_a_job_without_metrics_by_how_it_ended(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    cases: list[tuple[int | None, State | None, str]] = [
        (None, None, "not run"), (2, None, "refused"), (137, None, "cut"), (0, "done", "done"),
        (0, "stopped", "stopped"), (75, "stopped", "stopped"), (1, "failed", "failed"), (None, "failed", "failed"),
        (2, "stopped", "refused"),
        (1, "aborted", "aborted"), (1, "diverged", "diverged"), (1, "done", "failed"),
    ]  # fmt: skip
    for code, told, shown in cases:
        run.exit.unlink(missing_ok=True)
        if told is not None:
            write_exit_record(run, told, code or 0, "because", 3)
        assert _cells(SweepJob("x", [], run), code) == [shown, *["-"] * 6]
        assert SweepJob("x", [], run).is_done == (told == "done"), "only what is done is not started again"


@pytest.mark.parametrize(("of_bytes", "best"), [({"eval_bits_per_byte": 1.7}, 1), ({}, 0)])
def test_the_best_job_is_that_of_the_fewest_bits_where_all_know_them(
    of_bytes: dict[str, float], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of bytes is one byte, of a BPE several: their losses do not compare."""
    jobs = [SweepJob(name, [], RunDir(tmp_path / name)) for name in ("bytes", "bpe")]
    logged = {"eval_loss": 1.2, **of_bytes}, {"eval_loss": 3.1, "eval_bits_per_byte": 1.4}
    for job, record in zip(jobs, logged, strict=True):
        job.run.root.mkdir()
        job.run.metrics.write_text(json.dumps({"step": 4, **record}) + "\n")
    shown: list[Any] = []
    monkeypatch.setattr("forgather_cli.sweeps.run.print_table", lambda *table: shown.extend(table))
    _print_table(jobs, {})
    _, rows, styles = shown
    assert [row[5:7] for row in rows] == [("1.2000", "1.7000" if of_bytes else "-"), ("3.1000", "1.4000")]
    assert [bool(style) for style in styles] == [n == best for n in range(2)]
    assert [row[1].endswith(", best") for row in rows] == [n == best for n in range(2)], "in a pipe too"


def test_jobs_are_evaluated_at_the_end_and_named_without_an_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    def dirs(*words: str) -> list[Path]:
        return [Path(job["dir"]) for job in document(capsys, "train", *SMALL, *words, "-m", "--dry-run")]

    words = ["seed=1,2", "max_steps=2"]
    old = dirs(*words)[0].with_name(dirs(*words)[0].name.replace("seed-1", "seed=1"))
    assert "=" not in f"{dirs(*words)}"
    old.mkdir(parents=True)  # it was begun before
    assert [path.name.partition("-")[0] for path in dirs(*words)] == ["seed=1", "seed"]
    assert forgather("train", *SMALL, *words, "-m") == 0
    assert "best" in capsys.readouterr().out
    for path in dirs(*words):  # eval_steps is 100
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records if "eval_loss" in record] == [2]
    command = document(capsys, "train", *SMALL, "num_eval_samples=0", *words, "-m", "--dry-run")[0]["command"]
    assert "eval_steps" not in command, "there is nothing to evaluate on"
    command = document(capsys, "train", *SMALL, "eval_steps=1", *words, "-m", "--dry-run")[0]["command"]
    assert command.count("eval_steps") == 1


def test_a_sweep_checks_all_jobs_before_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "train", "learning_rate=1e-3,fast,slow", "max_steps=1", "-m")
    assert "got 'fast'" in told
    assert "got 'slow'" in told
    assert list(Path().iterdir()) == []
    shown = document(capsys, "train", "learning_rate=1e-3,1e-4", "max_steps=1", "-m", "--dry-run")
    assert len({job["dir"] for job in shown}) == 2
    assert list(Path().iterdir()) == []

"""A short crash campaign, and that a campaign finds what it looks for: each way in which a run can be wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import saving
from crash_campaign import Campaign, Report, busy_cores, campaign, says_how_to_go_on
from crash_check import Before, after_end, after_kill, checkpoint, compare, records
from crash_draw import LAYOUTS, MAX_STEPS, STOPS, Instant, Kill, Plan, draw
from crash_job import MARK, Job, Watch, is_running
from crashes import Forked, forked
from program import nobody_runs

from forgather_cli.data.loaders.workers import Workers, worker_loader
from forgather_cli.errors import SetupError
from forgather_cli.launch.run_lock import RunLock
from forgather_cli.launch.signals import watch_stop_signals

SCRIPTS = Path(__file__).parents[2] / "scripts" / "crash"
IMPORTABLE = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
TWO_RANKS = [layout.name for layout in LAYOUTS if layout.ranks == 2]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    """One trial in one process, of new interpreters, and one of two ranks, of forks, at the same time."""
    seed, breadth = int(time.time()), [(["single"], Job), (TWO_RANKS, Forked)]
    campaigns = [Campaign(work / names[0], layouts=names, reference=forked, job=job) for names, job in breadth]
    with ThreadPoolExecutor() as pool:
        reports = pool.map(lambda runs: campaign([seed], runs), campaigns)
        return Report([trial for each in reports for trial in each.trials])


def test_killed_runs_resume_to_the_last_bit_and_nothing_is_left(report: Report) -> None:
    repeat = f"scripts/crash_campaign 1 --seed SEED --layouts single, or {','.join(TWO_RANKS)}"
    assert not report.failures, f"{report}\nto repeat a failure: {repeat}"
    assert report.kills, report


@pytest.fixture
def whole(report: Report, work: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of an uninterrupted run, and the run itself."""
    reference = next((work / "single" / "references").iterdir()) / "run"
    return shutil.copytree(reference, tmp_path / "run"), reference


def test_a_whole_run_is_all_right(whole: tuple[Path, Path]) -> None:
    run, reference = whole
    assert compare(run, reference) == after_end(run) == []


def change_record(run: Path, key: str, change: Callable[[float], float]) -> None:
    """Change a value of the newest record that has it."""
    rows = records(run)
    row = next(row for row in reversed(rows) if key in row)
    row[key] = change(row[key])
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_manifest(run: Path) -> None:
    """Give the weights another hash, as if they were others."""
    path = checkpoint(run, MAX_STEPS) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["model/model.safetensors"]["ranges"][0][2] = "0" * 64
    path.write_text(json.dumps(manifest))


def other_sample(run: Path) -> None:
    path = run / "samples.txt"
    path.write_text(path.read_text()[:-3] + "?\n\n")


def drop_sample(run: Path) -> None:
    path = run / "samples.txt"
    path.write_text(path.read_text().partition("=== step 24")[0])


def drop_line(run: Path, key: str) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    newest = max(number for number, line in enumerate(lines) if f'"{key}"' in line)
    (run / "metrics.jsonl").write_text("".join(lines[:newest] + lines[newest + 1 :]))


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (lambda run: change_record(run, "grad_norm", lambda x: x * (1 + 1e-15)), "step 30: grad_norm"),
        (lambda run: change_record(run, "eval_loss", lambda x: x * (1 + 1e-15)), "eval_loss"),
        (lambda run: drop_line(run, "grad_norm"), "training records of steps"),
        (lambda run: drop_line(run, "eval_loss"), "evaluations at steps"),
        (edit_manifest, "weights, moments or random states differ"),
        (other_sample, "other samples at step 24"),
        (drop_sample, "samples at steps [12]"),
    ],
)
def test_another_result_is_reported(whole: tuple[Path, Path], tamper: Callable[[Path], None], found: str) -> None:
    run, reference = whole
    tamper(run)
    assert found in " ".join(compare(run, reference))


@pytest.mark.parametrize(("key", "bound"), [("loss", 1e-5), ("grad_norm", 1e-4), ("eval_loss", 1e-5)])
def test_another_layout_has_its_tolerance_and_no_more(whole: tuple[Path, Path], key: str, bound: float) -> None:
    run, reference = whole
    change_record(run, key, lambda x: x * (1 + bound / 2))
    assert compare(run, reference, moved_after=12) == []
    assert compare(run, reference, moved_after=MAX_STEPS), "before the move nothing may differ"
    change_record(run, key, lambda x: x * (1 + bound))
    assert key in " ".join(compare(run, reference, moved_after=12))


def test_a_damaged_checkpoint_leftovers_and_a_wrong_outcome_are_reported(whole: tuple[Path, Path]) -> None:
    run, _ = whole
    saving.damage(checkpoint(run, MAX_STEPS) / "model" / "model.safetensors", saving.flip(-1))
    (run / "checkpoints" / ".tmp-step-00000030-1.0").mkdir()
    (run / "exit.json").write_text('{"code": 1}')
    (run / "samples.txt.bak").write_text("")
    found = " ".join(after_end(run))
    assert "set aside: samples.txt.bak" in found
    assert "checkpoint 30 is damaged: model/model.safetensors" in found
    assert "left behind: .tmp-step-00000030-1.0" in found
    assert "exit.json says 1" in found


def kill(signum: signal.Signals, target: str = "rank") -> Kill:
    return Kill(Instant("record", 1, 0.0), signum, target)


def plan(*, async_save: bool = False) -> Plan:
    return replace(draw(0), save_steps=5, async_save=async_save)


@pytest.mark.parametrize(
    ("signum", "target", "code", "found"),
    [
        (signal.SIGKILL, "rank", 0, "exit code 0"),
        (signal.SIGKILL, "launcher", 1, "exit code 1"),
        (signal.SIGTERM, "launcher", 143, "exit code 143"),
        (signal.SIGTERM, "rank", 75, "exit.json says 0"),
        (signal.SIGTERM, "rank", 75, "75 without a checkpoint of the last step: 6 steps lost"),
        (signal.SIGKILL, "rank", 1, "6 steps lost"),
    ],
)
def test_a_wrong_exit_code_and_too_many_lost_steps_are_reported(
    whole: tuple[Path, Path], signum: signal.Signals, target: str, code: int, found: str
) -> None:
    run, _ = whole
    checkpoint(run, 30).rename(checkpoint(run, 24))  # records go to step 30
    problems = after_kill(run, plan(), kill(signum, target), target, code, True, Before(0, 0))
    assert found in " ".join(problems)


def test_what_was_lost_while_a_save_was_in_flight_and_no_more_is_allowed(whole: tuple[Path, Path]) -> None:
    run, _ = whole
    checkpoint(run, 30).rename(checkpoint(run, 24))
    killed = (kill(signal.SIGKILL), "rank", 1, True, Before(0, 0))
    (run / "checkpoints" / ".tmp-step-00000029-1.0").mkdir()
    assert "steps lost" in " ".join(after_kill(run, plan(), *killed))
    assert after_kill(run, plan(async_save=True), *killed) == []
    (run / "checkpoints" / ".tmp-step-00000029-1.0").rmdir()
    assert "steps lost" in " ".join(after_kill(run, plan(async_save=True), *killed))
    assert after_kill(run, plan(async_save=True), *killed, writing=True) == [], "a rank that lived on has removed it"
    assert "steps lost" not in " ".join(after_kill(run, plan(), *killed[:4], Before(30, 24))), "not of this start"


def test_a_process_that_goes_on_is_found_though_it_has_lost_its_parent(tmp_path: Path) -> None:
    stray = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    environment = {**os.environ, MARK: str(tmp_path)}
    with subprocess.Popen(stray, env=environment, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with Job(tmp_path, ["--version"], {}, tmp_path / "output.txt") as job:
            job.process.wait(60)
            assert [member.pid for member in job.wait(0.1)] == [process.pid]
        assert job.process.returncode == 0
        assert process.wait(60) == -signal.SIGKILL, "what is left is killed"


@pytest.mark.parametrize("load", [0.0, 28.0])
def test_a_busy_machine_gets_the_time_that_it_needs(
    load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be ended within 0.3 s on one that is not is waited for as much longer."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load * len(os.sched_getaffinity(0)), 0.0, 0.0))
    slow = [sys.executable, "-c", f"import time; print(flush=True); time.sleep({2 if load else 600})"]
    with Job(tmp_path, ["--version"], {}, tmp_path / "output.txt") as job:
        job.process.wait(60)
        with subprocess.Popen(slow, env={**os.environ, MARK: str(tmp_path)}, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            left = [member.pid for member in job.wait(0.3)]
            process.kill()
    assert left == ([] if load else [process.pid])


def test_the_command_that_goes_on_names_the_run_from_the_working_directory_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my work" / "trial-7" / "run"
    for named in ("'my work/trial-7/run'", f"'{run}'"):
        assert says_how_to_go_on(f"saved\nforgather resume {named}\n", run) == []
    for wrong in ("forgather resume 'my work/trial-8/run'", "forgather resume", "saved", f"forgather stop '{run}'"):
        assert "exit code 75 with" in " ".join(says_how_to_go_on(f"forgather resume '{run}'\n{wrong}\n", run))


def test_a_campaign_whose_runs_do_not_start_fails_and_names_the_seed(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "scripts/crash/crash_campaign.py"
    words = [sys.executable, str(program), "1", "--seed", "7"]
    done = subprocess.run(
        [*words, f"--work={tmp_path}", "--layouts=single", "max_stepz=3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "1 trials" in done.stdout
    assert "1 failures" in done.stdout
    assert "seed 7: single" in done.stdout
    assert f"kept in {tmp_path}" in done.stdout


def test_the_cores_of_a_busy_campaign_are_taken_until_it_ends_in_whatever_way() -> None:
    with busy_cores() as others:
        assert len(others) == len(os.sched_getaffinity(0))
        assert {os.getpriority(os.PRIO_PROCESS, other.pid) for other in others} == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert all(other.returncode == -signal.SIGKILL for other in others)
    holds = "from crash_campaign import busy_cores\nwith busy_cores() as others:\n"
    holds += " print(*(other.pid for other in others), flush=True)\n input()"
    with subprocess.Popen([sys.executable, "-c", holds], stdin=-1, stdout=-1, env=IMPORTABLE) as campaign_process:
        pids = [int(pid) for pid in campaign_process.stdout.readline().split()]
        assert all(map(is_running, pids))
        campaign_process.kill()
        campaign_process.wait()
    assert nobody_runs(pids, 60)


def test_a_seed_is_a_trial_and_many_seeds_are_all_there_is() -> None:
    plans = [draw(seed) for seed in range(400)]
    assert plans == [draw(seed) for seed in range(400)]
    kills = [kill for plan in plans for kill in plan.kills]
    assert {plan.layout for plan in plans} == set(LAYOUTS)
    assert {kill.signum for kill in kills} == {signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, *STOPS}
    assert {kill.target for kill in kills} == {"rank", "launcher", "group", "worker"}
    assert {"manifest", "rename", "retention", "final"} < {kill.instant.event for kill in kills}
    near_a_save = sum(kill.instant.event not in ("start", "record", "sample", "trial") for kill in kills)
    assert near_a_save > 0.5 * len(kills)
    twice = [kills for plan in plans if plan.save_steps > 12 and (kills := plan.kills)]
    assert 0.1 * len(plans) < len(twice) < 0.3 * len(plans), "before the first checkpoint, and soon after the resume"
    assert {tuple(kill.instant.event for kill in kills) for kills in twice} == {("sample", "trial")}
    assert not {kill.signum for kills in twice for kill in kills}.intersection(STOPS), "which would save one"
    assert all(plan.recipe.exact for plan in plans if plan.moved_to), "others do not compute the same elsewhere"
    assert {draw(seed, ["single"]).layout.name for seed in range(20)} == {"single"}


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    (tmp_path / "checkpoints").mkdir()
    watch = Watch(tmp_path)
    yield watch
    watch.close()


def test_a_save_is_seen_as_it_happens(watch: Watch, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    temporary = checkpoints / ".tmp-step-00000030-1.0"
    temporary.mkdir()
    assert list(watch.events(1.0)) == ["temporary"]
    (temporary / "manifest.json").write_text("{}")
    assert list(watch.events(1.0)) == ["manifest"]
    temporary.rename(checkpoint(tmp_path, 30))
    assert list(watch.events(1.0)) == ["rename", "final"]
    checkpoint(tmp_path, 30).rename(checkpoints / ".trash-step-00000030-1.1")
    assert list(watch.events(1.0)) == ["retention"]
    for name, event in (("metrics.jsonl", "record"), ("samples.txt", "sample")):
        (tmp_path / name).write_text("{}\n")
        assert list(watch.events(1.0)) == [event]
    assert list(watch.events(0.0)) == []


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_data_workers_end_by_a_sigterm_of_training_alone(context: str) -> None:
    started = {"batch_size": 1, "multiprocessing_context": context}
    others = set(multiprocessing.active_children())  # ranks of the pool
    with watch_stop_signals() as stop:
        batches = iter(worker_loader(list(range(64)), Workers(num=2), 0, **started))
        read = [next(batches), next(batches)]  # one of each worker: both are up
        workers = set(multiprocessing.active_children()) - others
        for process in workers:
            subprocess.run(["kill", "-TERM", str(process.pid)], check=True)
        read += list(batches)
        assert len(workers) == 2
        assert [int(batch[0]) for batch in read] == list(range(64))
        assert stop.signum is None

        batches = iter(worker_loader(list(range(64)), Workers(num=1), 0, **started))
        next(batches)
        (worker,) = set(multiprocessing.active_children()) - others
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == 0


def test_a_config_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        held.write(held.run.config, "max_steps: 3\n")
        with saving.full_disk(10), pytest.raises(SetupError, match="cannot be written"):
            held.write(held.run.later_config(1), "max_steps: 3000\n")
        assert held.run.newest_config() == held.run.config
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.yaml"]

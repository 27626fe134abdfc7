"""Where jobs are found: entries of real processes, that run, have ended, or stand in for others."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from control.entries import entry
from program import document, printed, refusal, until

from forgather_cli.control import registry
from forgather_cli.control.registry import entries, jobs_directory, register, resolve, running, unregister
from forgather_cli.errors import ControlError
from forgather_cli.launch.exit_status import write_exit_record
from forgather_cli.run_dir import RunDir


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config"


@pytest.fixture
def ended() -> dict[str, Any]:
    """What an entry has of a process that is gone."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        start = registry.start_of(process.pid)
        process.kill()
    return {"pid": process.pid, "process_start_time": start}


def test_an_entry_is_its_owners_alone_and_whole_at_once(home: Path) -> None:
    old = os.umask(0)
    try:
        register(entry("job_1"), "a" * 64)
    finally:
        os.umask(old)
    place = home / "forgather/jobs/job_1"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (place.parent, place, *place.iterdir())}
    assert modes == {"jobs": 0o700, "job_1": 0o700, "endpoint.json": 0o600, "auth_token": 0o600}
    assert [path.name for path in place.parent.iterdir()] == ["job_1"]
    assert json.loads((place / "endpoint.json").read_text()) == asdict(entry("job_1"))
    assert entry("job_1").token() == "a" * 64
    unregister(entry("job_1"))
    assert list(place.parent.iterdir()) == []


def test_the_config_home_is_that_of_the_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert jobs_directory() == Path("/somewhere/.config/forgather/jobs")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert jobs_directory() == Path("/somewhere/.config/forgather/jobs")
    assert entries() == []


def test_an_id_of_a_running_job_is_not_taken_over_and_that_of_an_ended_one_is(ended: dict[str, Any]) -> None:
    mine = entry("job")
    register(mine, "a" * 64)
    with pytest.raises(ControlError, match="job_id: job is the id of a job that runs"):
        register(entry("job", port=2), "b" * 64)
    assert mine.token() == "a" * 64
    unregister(mine)
    register(entry("job", **ended), "a" * 64)
    register(entry("job", port=2), None)
    assert [(found.port, found.token()) for found in entries()] == [(2, None)]


def test_a_job_is_told_by_more_than_its_id_and_its_pid() -> None:
    register(entry("job", port=2), "a" * 64)
    unregister(entry("job", port=1))
    assert [found.port for found in entries()] == [2], "that of another with its id"
    register(entry("other", process_start_time="1@boot"), "a" * 64)  # its pid was given to another process
    with pytest.raises(ControlError, match="other: does not run any more"):
        resolve("other")
    assert registry.cleanup(everywhere=False) == ["other"]


def test_a_process_that_only_waits_for_its_parent_does_not_run() -> None:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    start = registry.start_of(process.pid)
    process.kill()
    assert start is not None
    until(lambda: registry.start_of(process.pid) is None)
    process.stdin.close()
    process.wait()


def test_jobs_are_found_by_id_prefix_directory_and_as_the_newest() -> None:
    for name, run, started in (("job_a1", "one", 3), ("job_a2", "two", 2), ("job_b", "three", 1)):
        register(entry(name, run, started), None)
    found = {word: resolve(word).job_id for word in ("job_a1", "job_b", "job_a2", "latest", "./two", "one/")}
    assert found == {"job_a1": "job_a1", "job_b": "job_b", "job_a2": "job_a2", "latest": "job_a1", "./two": "job_a2",
                     "one/": "job_a1"}  # fmt: skip
    assert resolve("job_b"[:5]).job_id == "job_b"
    with pytest.raises(ControlError, match="job_a: 2 jobs begin with that; give more") as two:
        resolve("job_a")
    assert str(two.value).splitlines()[1:] == ["  job_a2  two", "  job_a1  one"]
    with pytest.raises(ControlError, match="3 jobs are running; name one of them, or latest") as three:
        resolve(None)
    assert str(three.value).splitlines()[1:] == ["  job_b  three", "  job_a2  two", "  job_a1  one"]
    unregister(entry("job_a1", "one", 3))
    unregister(entry("job_a2", "two", 2))
    assert resolve(None).job_id == "job_b"


def test_a_job_of_another_folder_is_taken_last_and_never_told_anything_unnamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    register(entry("mine", str(here / "run"), 1), None)
    register(entry("other", str(tmp_path / "there"), 2), None)
    assert resolve("latest").job_id == "other"  # the newest of both, which lie below this directory
    monkeypatch.chdir(here)
    assert [resolve("latest").job_id, resolve(None).job_id] == ["mine", "mine"]
    unregister(entry("mine", str(here / "run"), 1))
    assert resolve("latest").job_id == "other"
    for words in (["save", "latest"], ["stop"], ["save_and_stop", "latest"], ["abort", "latest", "--force"]):
        told = printed(capsys, "control", *words)
        assert told.code == 2
        assert all(each in told.err for each in ("forgather control", " other\n", str(tmp_path / "there")))
    told = printed(capsys, "control", "stop", "other")  # named: it is asked, and does not answer
    assert (told.code, "other" in told.err) == (1, True)


@pytest.mark.parametrize("word", ["../../../etc", "..", ".", "/", "job/../job", "", "a\0b", "job\n", "x" * 5000])
def test_what_is_no_job_is_not_looked_for_elsewhere(word: str) -> None:
    register(entry("job", "run"), None)
    with pytest.raises(ControlError, match="no such job"):
        resolve(word)


def test_cleanup_removes_what_ended_or_is_torn_and_leaves_others_alone(
    ended: dict[str, Any], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(entry("alive"), None)
    register(entry("dead", **ended), "a" * 64)
    register(entry("away", "../away/run", **ended), "a" * 64)
    register(entry("foreign", hostname="elsewhere", **ended), None)
    jobs = home / "forgather/jobs"
    for name, text in (("torn", '{"job_id": "torn"'), ("empty", ""), ("renamed", json.dumps(asdict(entry("alive"))))):
        (jobs / name).mkdir()
        (jobs / name / "endpoint.json").write_text(text)
    (jobs / ".new.1.tmp").mkdir()  # is being written
    outside = home / "outside"
    outside.mkdir()
    (jobs / "link").symlink_to(outside)
    assert {e.job_id: e.is_running for e in entries()} == {"alive": True, "away": False, "dead": False, "foreign": None}
    assert [e.job_id for e in running()] == ["alive"]
    assert document(capsys, "control", "cleanup") == ["dead"]
    code, out, _ = printed(capsys, "control", "cleanup")
    assert (code, out.splitlines()[0]) == (0, "nothing to remove")
    assert "4 of runs that do not lie below" in out
    assert "(away, empty, renamed, torn)" in out
    assert {"away", "empty", "renamed", "torn"} <= {path.name for path in jobs.iterdir()}
    with pytest.raises(ControlError, match=r"away: does not run any more .* forgather control cleanup --yes removes"):
        resolve("away")
    assert document(capsys, "control", "cleanup", "--yes") == ["away", "empty", "renamed", "torn"]
    assert sorted(p.name for p in jobs.iterdir()) == [".new.1.tmp", "alive", "foreign", "link"]
    assert outside.is_dir()
    assert printed(capsys, "control", "cleanup") == (0, "nothing to remove\n", "")


def test_the_list_has_what_runs_and_all_that_ended_too(
    ended: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    register(entry("dead", **ended), "a" * 64)
    assert document(capsys, "control", "list") == []
    assert "forgather control list --all" in printed(capsys, "control", "list").out
    register(entry("foreign", hostname="elsewhere"), None)  # nobody here knows whether it runs
    assert [job["job_id"] for job in document(capsys, "control", "list")] == ["foreign"]
    assert "dead" not in printed(capsys, "control", "list").out
    assert [job["job_id"] for job in document(capsys, "control", "list", "--all")] == ["dead", "foreign"]
    assert re.search(r"dead +cut", printed(capsys, "control", "list", "--all").out)


def test_a_setting_of_a_running_job_names_what_changes_it(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "control", "set", "outputs/a", "learning_rate=1e-4")
    assert "forgather control save_and_stop JOB" in said
    assert "forgather resume RUN learning_rate=" in said


def test_what_cannot_be_done_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> tuple[int, str]:
        done = printed(capsys, "control", *words)
        return done.code, done.err.strip()

    assert told("save", "latest") == (
        1, f"error: no job that takes commands is running on {os.uname().nodename}; name another by its run directory"
    )  # fmt: skip
    assert told("stop", "nowhere")[1].startswith("error: nowhere: no such job, none is running on")
    register(entry("foreign", hostname="elsewhere"), None)
    code, refused = told("stop", "foreign")
    assert (code, refused.startswith("error: foreign: runs on elsewhere"), refused.count("\n")) == (1, True, 0)
    assert "callbacks.control.host=0.0.0.0" in refused
    register(entry("mute"), None)
    assert told("status", "mute")[1].startswith("error: mute: cannot be reached at 127.0.0.1:1 (process ")
    assert told("abort", "mute") == (2, "error: abort: asks first, and nobody can answer here; use --force")
    for words in ("status mute --watch --json", "save mute --timeout soon", "sing mute"):
        assert told(*words.split())[0] == 2


def test_a_run_that_takes_no_commands_is_told_by_who_holds_its_directory(
    ended: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """While it starts, or without callbacks.control, nothing but the lock tells of a job."""
    run, here, alive = RunDir(Path("run")), os.uname().nodename, os.getppid()
    run.root.mkdir()
    run.config.touch()

    def told(command: str, holder: str) -> str:
        run.lock.write_text(f"pid {holder}\n")
        done = printed(capsys, "control", command, "run")
        assert done.code == 1
        return done.err.strip()

    waiting = told("stop", f"{alive} on {here}")
    assert waiting == told("status", f"{alive} on {here}")
    assert waiting.startswith(f"error: run: process {alive} runs there but takes no commands: it is still starting or ")
    assert waiting.endswith(f"wait, or stop it with a checkpoint by SIGTERM (kill {alive})")
    killed = told("status", f"{ended['pid']} on {here}")
    assert killed.startswith("error: run: no job runs there; the last one was cut")
    assert killed.endswith("forgather resume run continues it")
    assert "the last one was started on afar and has not told of its end" in told("status", f"{alive} on afar")
    write_exit_record(run, "done", 0, "done", 7)  # as long as the process that has written this ends
    over = "error: run: no job runs there; the last one ended at step 7, done, with exit code 0: done"
    assert told("status", f"{alive} on {here}") == over
    run.lock.unlink()
    assert printed(capsys, "control", "stop", "run") == (1, "", over + "\n")

"""``forgather runs``, ``forgather logs follow``, and ``latest``: what is listed, what is removed, and what never is."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from program import Process, forgather
from terminal import Terminal

from forgather_cli.launch.exit_status import write_exit_record
from forgather_cli.run_dir import RunDir

JOB = """
import sys
from pathlib import Path
from forgather_cli.launch.exit_status import write_exit_record
from forgather_cli.launch.run_lock import RunLock

with RunLock(Path(sys.argv[1])) as held:
    log = held.run.rank_log(0).open("a", buffering=1)
    print("has it", flush=True)
    for line in sys.stdin:
        log.write(line)
    write_exit_record(held.run, "stopped", 0, "told to", 7)
    log.write("the last line\\n")
"""


class Job:
    """A job that holds a run directory, logs what it is told, and ends with its input."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", JOB, str(root)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, bufsize=1)  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "has it\n"

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def end(self) -> None:
        self.process.communicate()


def make_run(root: Path, changed: float, losses: tuple[float, ...] = (), ended: bool = True) -> Path:
    """A run's files as training leaves them; ``changed``: when, in seconds since the epoch."""
    run = RunDir(root)
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    (run.checkpoints / "step-00000010/weights").write_bytes(bytes(1000))
    run.logs.mkdir()
    run.rank_log(0).write_text("what it has printed\n")
    run.config.write_text("max_steps: 100\n")
    run.lock.write_text("pid 999999999 on nowhere\n")
    if losses:
        lines = [json.dumps({"step": 10 * (n + 1), "eval_loss": loss}) for n, loss in enumerate(losses)]
        run.metrics.write_text("\n".join(lines) + "\n")
    if ended:
        write_exit_record(run, "done", 0, "done")
    for path in root.rglob("*"):
        os.utime(path, (changed, changed))
    return root


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(Path("outputs/default/old"), 1e9, (3.0, 2.0, 2.5))
    make_run(Path("outputs/default/new"), 1.2e9, ended=False)
    make_run(Path("outputs/between"), 1.1e9, (1.0,))
    return Path("outputs")


def documents(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert forgather(*words, "--json") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_runs_are_listed_newest_first_with_state_best_loss_and_size(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = documents(capsys, "runs", "list")
    told = [(each["run"], each["state"], each["step"], each["best_eval_loss"]) for each in found]
    assert told == [
        ("outputs/default/new", "cut", 10, None),
        ("outputs/between", "done", 10, 1.0),
        ("outputs/default/old", "done", 30, 2.0),
    ]
    assert found[0]["changed"] == "2008-01-10T21:20:00+00:00"
    assert 1000 < found[0]["size_bytes"] < 3000
    assert [each["run"] for each in documents(capsys, "runs", "list", "outputs/default")] == [
        "outputs/default/new", "outputs/default/old",
    ]  # fmt: skip
    assert forgather("runs", "list") == 0
    assert re.search(r"outputs/default/old +done +30/100 +2.0000 +.* KiB", capsys.readouterr().out)
    assert forgather("runs", "list", "nowhere") == 2
    assert "nowhere: no such directory" in capsys.readouterr().err


def test_no_runs_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert documents(capsys, "runs", "list") == []
    assert forgather("resume", "latest") == 2
    assert "there is no run below outputs" in capsys.readouterr().err


def test_runs_are_removed_with_what_is_theirs_alone(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "between/notes.md").write_text("mine")
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    (outputs / "between/checkpoints").rename(elsewhere / "checkpoints")
    (outputs / "between/checkpoints").symlink_to((elsewhere / "checkpoints").absolute())
    runs = [f"{outputs}/between", f"{outputs}/default/old"]
    assert forgather("runs", "remove", *runs) == 2  # nobody can be asked
    assert "use --yes" in capsys.readouterr().err
    between, old = documents(capsys, "runs", "remove", *runs, f"{outputs}/default/../between", "--yes")
    assert (between["kept"], old["kept"]) == (["notes.md"], [])
    assert between["freed_bytes"] < 1000 < old["freed_bytes"]
    assert [path.name for path in (outputs / "between").iterdir()] == ["notes.md"]
    assert (elsewhere / "checkpoints/step-00000010/weights").exists()  # a link's other end
    assert [path.name for path in (outputs / "default").iterdir()] == ["new"]


def test_what_is_no_run_or_runs_still_is_not_removed(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_run(Path("lightning"), 1e9)  # of a program with the same names
    (other / ".lock").unlink()
    before = sorted(Path().rglob("*"))
    for path in (other, outputs, outputs / "default", Path("nowhere")):
        assert forgather("runs", "remove", f"{outputs}/default/old", str(path), "--yes") == 2
        assert f"{path}: is no run" in capsys.readouterr().err
    job = Job(outputs / "between")
    assert forgather("runs", "remove", f"{outputs}/default/old", f"{outputs}/between", "--yes") == 2
    assert f"forgather control stop {outputs}/between" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before
    job.end()
    assert forgather("runs", "remove", f"{outputs}/between", "--yes") == 0
    assert not (outputs / "between").exists()


def test_runs_are_chosen_by_state_and_age(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def removed(*words: str) -> list[str]:
        return [each["run"] for each in documents(capsys, "runs", "remove", "--yes", *words)]

    now = time.time()
    recent = make_run(outputs / "recent", now - 3600, ended=False)
    elsewhere = make_run(outputs / "elsewhere", now - 3600, ended=False)  # its machine may run it still
    (recent / ".lock").write_text(f"pid 999999999 on {socket.gethostname()}\n")
    os.utime(recent / ".lock", (now - 3600, now - 3600))
    other = make_run(outputs / "lightning", 1e9, ended=False)  # of a program with the same names
    (other / ".lock").unlink()
    job = Job(make_run(outputs / "running", 1e9, ended=False))
    assert removed("--state", "failed") == []
    assert removed("--state", "cut", "--older-than", "30d") == ["outputs/default/new"]
    assert removed("--state=cut", "--older-than=90m") == []
    assert removed("--state=cut", "--older-than=59m") == ["outputs/recent"]
    assert removed("outputs/default", "--state=done", "--state=failed") == ["outputs/default/old"]
    assert removed("--older-than", "10w") == ["outputs/between"]
    assert sorted(outputs.iterdir()) == [outputs / "default", elsewhere, other, outputs / "running"]
    job.end()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "runs remove: names no run"),
        (["--state", "cutt"], "--state: must be one of done, .*, got 'cutt'; did you mean cut"),
        (["--state", "running"], "--state: must be one of"),
        (["--older-than", "1.5d"], "--older-than: must be a number of m, h, d or w, .*, got '1.5d'"),
        (["--older-than", "30"], "--older-than: .*, got '30'"),
        (["--older-than", "99999999d"], "--older-than: .*, got '99999999d'"),
        (["nowhere", "--state", "cut"], "nowhere: no such directory"),
        (["--state", "cut"], "asks first, and nobody can answer here; use --yes"),
    ],
)
def test_what_chooses_no_runs(
    outputs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forgather("runs", "remove", *words) == 2
    assert re.search(message, capsys.readouterr().err)
    assert (outputs / "default/new").is_dir()


def test_removing_asks_first(outputs: Path) -> None:
    for answer, code in (b"n\n", 1), (b"y\n", 0):
        terminal = Terminal("runs", "remove", "latest")
        terminal.read_until(r"Delete this run\?")
        assert "outputs/default/new: " in terminal.output
        assert (outputs / "default/new/checkpoints").is_dir()
        terminal.press(answer)
        terminal.read_until(None)
        assert terminal.close() == code
    assert not (outputs / "default/new").exists()


def test_latest_is_the_run_that_changed_last(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("resume latest", "checkpoint list latest", "eval latest", "logs follow latest", "logs slow latest"):
        forgather(*words.split())
        assert "latest: outputs/default/new" in capsys.readouterr().err
    os.utime(outputs / "default/old/logs/rank-0.log", (2e9, 2e9))
    assert [each["run"] for each in documents(capsys, "logs", "summary", "latest")] == ["outputs/default/old"]


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
    assert forgather("logs", "follow", "outputs/default/new") == 0  # one that was killed
    first, last = capsys.readouterr().out.splitlines()
    assert first == "what it has printed"
    assert "was started on nowhere" in last
    assert forgather("logs", "follow", "nowhere") == 2
    assert "has no log" in capsys.readouterr().err

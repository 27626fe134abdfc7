"""``forgather runs``: what is listed, what is removed, and what never is."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import pytest
from kept_runs import Job, make_outputs, make_run
from program import document, forgather, refusal, shown
from terminal import Terminal


@pytest.fixture
def outputs(own_directory: None) -> Path:
    return make_outputs()


def test_runs_are_listed_newest_first_with_state_best_loss_and_size(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, "runs", "list")
    told = [(each["run"], each["state"], each["step"], each["best_eval_loss"]) for each in found]
    assert told == [
        ("outputs/default/new", "cut", 10, None),
        ("outputs/between", "done", 10, 1.0),
        ("outputs/default/old", "done", 30, 2.0),
    ]
    assert found[0]["changed"] == "2008-01-10T21:20:00+00:00"
    assert 1000 < found[0]["size_bytes"] < 3000
    assert [each["run"] for each in document(capsys, "runs", "list", "outputs/default")] == [
        "outputs/default/new", "outputs/default/old",
    ]  # fmt: skip
    assert re.search(r"outputs/default/old +done +30/100 +2.0000 +.* KiB", shown(capsys, "runs", "list"))
    assert "nowhere: no such directory" in refusal(capsys, "runs", "list", "nowhere")
    outputs.rename("elsewhere")  # that there are no runs is no error
    assert document(capsys, "runs", "list") == []
    assert "there is no run below outputs" in refusal(capsys, "resume", "latest")


def test_runs_are_removed_with_what_is_theirs_alone(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "between/notes.md").write_text("mine")
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    (outputs / "between/checkpoints").rename(elsewhere / "checkpoints")
    (outputs / "between/checkpoints").symlink_to((elsewhere / "checkpoints").absolute())
    runs = [f"{outputs}/between", f"{outputs}/default/old"]
    assert "use --yes" in refusal(capsys, "runs", "remove", *runs)  # nobody can be asked
    between, old = document(capsys, "runs", "remove", *runs, f"{outputs}/default/../between", "--yes")
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
        assert f"{path}: is no run" in refusal(capsys, "runs", "remove", f"{outputs}/default/old", str(path), "--yes")
    job = Job(outputs / "between")
    assert forgather("runs", "remove", f"{outputs}/default/old", f"{outputs}/between", "--yes") == 2
    assert f"forgather control stop {outputs}/between" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before
    job.end()
    assert forgather("runs", "remove", f"{outputs}/between", "--yes") == 0
    assert not (outputs / "between").exists()


def test_runs_are_chosen_by_state_and_age(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def removed(*words: str) -> list[str]:
        return [each["run"] for each in document(capsys, "runs", "remove", "--yes", *words)]

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


def test_what_chooses_no_runs(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        "": "runs remove: names no run",
        "--state cutt": "--state: must be one of done, .*, got 'cutt'; did you mean cut",
        "--state running": "--state: must be one of",
        "--older-than 1.5d": "--older-than: must be a number of m, h, d or w, .*, got '1.5d'",
        "--older-than 99999999d": "--older-than: .*, got '99999999d'",
        "nowhere --state cut": "nowhere: no such directory",
        "--state cut": "asks first, and nobody can answer here; use --yes",
    }.items():
        assert re.search(message, refusal(capsys, "runs", "remove", *words.split()))
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

"""From a config to a run directory and an exit code: files, refusals, locks, signals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from program import SMALL, Process
from terminal import Screen
from two_ranks import recorded_steps

from forgather_cli import __version__
from forgather_cli.checkpoint.manifest import read_manifest
from forgather_cli.checkpoint.rollbacks import Rollback, append_rollback
from forgather_cli.config.decode import load_saved
from forgather_cli.config.load import load_config, reload_config
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.launch.error_report import report_error
from forgather_cli.launch.exit_status import read_exit_record, write_exit_record
from forgather_cli.launch.rank_log import Tee
from forgather_cli.launch.run_lock import RunLock
from forgather_cli.launch.signals import say, watch_stop_signals
from forgather_cli.launch.start import launch
from forgather_cli.run_dir import RunDir
from forgather_cli.worker import work


def start(*overrides: str) -> int:
    return launch(lambda: load_config("default", [*SMALL, *overrides]), work)


def state() -> dict[Path, tuple[int, bytes]]:
    """All files, but for locks."""
    files = [path for path in Path().rglob("*") if path.name != ".lock"]
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in files}


def test_a_run_leaves_config_origin_log_and_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    assert start("max_steps=2", "output_dir=run") == 0
    run = RunDir(Path("run"))
    assert load_saved(run.config).max_steps == 2
    assert load_saved(run.config).output_dir == "run"
    origin = yaml.safe_load(run.origin.read_text())
    assert origin["recipe"] == "default"
    assert "max_steps=2" in origin["overrides"]
    assert origin["recipe_text"].startswith("#")
    assert {"python", "forgather", "torch"} <= set(origin["versions"])
    assert origin["versions"]["forgather"] == __version__
    told = json.loads(run.exit.read_text())
    assert (told["code"], told["reason"], told["step"]) == (0, "done", 2)
    assert told["time"].endswith("+00:00")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    logged = run.rank_log(0).read_text()
    assert printed
    assert all(line in logged for line in printed)


def test_the_made_up_name_is_never_that_of_another_run() -> None:
    loaded = load_config("default", [*SMALL, "max_steps=1", "save_strategy=no"])
    assert launch(lambda: loaded, work) == 0
    assert launch(lambda: loaded, work) == 0
    first, second = sorted(Path("outputs/default").iterdir())
    assert second.name == f"{first.name}_2"


def test_a_used_directory_is_overwritten_but_for_foreign_files(used: RunDir) -> None:
    Path("run/notes.txt").write_text("mine")
    Path("run/config.4.yaml").write_text("old: 1")
    assert start("max_steps=1", "output_dir=run", "overwrite_output_dir=true") == 0
    assert used.checkpoint_steps() == [1]
    assert recorded_steps() == [1]
    assert used.newest_config() == used.config
    assert Path("run/notes.txt").read_text() == "mine"
    assert reload_config(Path("run"), []).config.overwrite_output_dir is False, "a resume never deletes"


def test_resume_adds_a_config_and_goes_on(used: RunDir) -> None:
    assert launch(lambda: reload_config(Path("run"), ["max_steps=4"]), work) == 0
    assert load_saved(used.config).max_steps == 3
    assert load_saved(used.later_config(1)).max_steps == 4
    assert recorded_steps() == [1, 2, 3, 4]
    again = reload_config(Path("run"), ["optimizer=sgd", "learning_rate=0.5"]).config
    assert (again.max_steps, again.learning_rate, again.resume_from_checkpoint) == (4, 0.5, True)
    assert again.optimizer.type == "sgd"


def test_a_resume_of_a_finished_run_changes_nothing_and_one_that_ends_earlier_is_refused(
    used: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    start("max_steps=-1", "num_train_epochs=1", "num_samples=8", "output_dir=epochs")
    before = state()
    for name, words, last in (("run", ["logging_steps=7"], 3), ("epochs", [], 2)):
        capsys.readouterr()
        assert launch(partial(reload_config, Path(name), words), work) == 0
        assert f"nothing left to train: step {last} is the last" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"max_steps: .*step 3, got 1; give 3 or more"):
        launch(lambda: reload_config(Path("run"), ["max_steps=1"]), work)
    assert state() == before


def test_a_run_is_at_the_end_only_with_a_checkpoint_that_a_resume_may_take(used: RunDir) -> None:
    (used.checkpoint(3) / "manifest.json").write_text("")
    assert launch(lambda: reload_config(used.root, ["verify_checkpoint=none"]), work) == 0
    assert read_manifest(used.checkpoint(3)).final
    gone_back = Rollback(1, "2026-01-01T00:00:00+00:00", "x", 3, 1, 2, None, [{"epoch": 0, "sample": 4}])
    append_rollback(used, gone_back)  # and was killed before it deleted what it had gone back from
    assert launch(lambda: reload_config(used.root, ["max_steps=2"]), work) == 0
    assert used.checkpoint_steps() == [1, 2]


def test_what_a_resume_cannot_take_is_said(used: RunDir) -> None:
    Path("empty").mkdir()
    for place, overrides, message in (
        ("run", ["max_stepz=3"], "max_stepz: unknown setting; did you mean max_steps"),
        ("run", ["n_microbatches=3"], "only trainer=pipeline"),
        ("run", ["output_dir=other"], "output_dir: resume continues in run"),
        ("nowhere", [], "nowhere: no such directory"),
        ("empty", [], "not a run's directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            reload_config(Path(place), overrides)
    used.config.write_text("{ no yaml")
    with pytest.raises(ConfigError, match=r"run/config.yaml: cannot be read"):
        reload_config(Path("run"), [])


def test_a_run_that_began_from_another_begins_there_again_until_it_has_its_own_checkpoint(used: RunDir) -> None:
    origin = "resume_from_checkpoint=run/checkpoints/step-00000001"
    start("max_steps=2", "output_dir=second", "save_strategy=no", origin, "resume_components=[model]")
    again = reload_config(Path("second"), []).config
    assert again.resume_from_checkpoint == "run/checkpoints/step-00000001"
    assert again.resume_components == ["model"]
    launch(lambda: reload_config(Path("second"), ["save_strategy=steps", "max_steps=3"]), work)
    settled = reload_config(Path("second"), []).config
    assert (settled.resume_from_checkpoint, settled.resume_components) == (True, "all")


def test_an_output_dir_that_cannot_be_made_is_said() -> None:
    Path("file").write_text("")
    with pytest.raises(SetupError, match="output_dir: file/run cannot be created: Not a directory"):
        start("max_steps=1", "output_dir=file/run")


def test_the_lock_ends_with_the_process_even_if_its_workers_live_on() -> None:
    python = (
        "import os, sys, time; from pathlib import Path; from forgather_cli.launch.run_lock import RunLock\n"
        "RunLock(Path('run'))\n"
        "if os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
        "print('forked', flush=True); os.kill(os.getpid(), 9)"
    )
    dead = subprocess.Popen([sys.executable, "-c", python], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert dead.stdout.readline() == "forked\n"
    dead.wait()
    with RunLock(Path("run")):
        pass
    dead.communicate()


def test_the_lines_at_the_end_name_the_run_from_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where output_dir is absolute, and where the run goes on from another folder than it began in."""

    def stopped(*words: str) -> list[str]:
        with Process(*words) as job:
            job.read_until(r"step \d+/")
            job.process.send_signal(signal.SIGTERM)
            assert job.finish() == 75, job.output
        return job.lines

    run = tmp_path / "outputs/my run"
    for folder, words in (
        (tmp_path, ["train", *SMALL, "eval_strategy=no", "max_steps=100000", f'output_dir="{run}"']),
        (tmp_path / "outputs", ["resume", "my run"]),
    ):
        monkeypatch.chdir(folder)
        name, output = run.relative_to(folder), stopped(*words)
        assert output[-1] == f"forgather resume '{name}'"
        assert f"run      {name}" in output
        assert any(re.match(rf"newest   {name}/checkpoints/step-\d+  step loss \d", line) for line in output)
        assert not [line for line in output if str(tmp_path) in line]


def test_signals_to_a_forked_worker_do_not_reach_its_parent_whose_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with watch_stop_signals() as stop:
        assert signal.getsignal(signal.SIGINT) is not before
        assert stop.poll() is None
        child = os.fork()
        if child == 0:
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), signum)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert stop.poll() is None
    assert signal.getsignal(signal.SIGINT) is before


def test_the_log_has_lines_without_colour_and_without_what_was_overwritten() -> None:
    terminal, log = Screen(), io.StringIO()
    tee = Tee(terminal, log)
    assert tee.isatty()
    tee.write("plain\n\x1b[1;31mred\x1b[0m line\n")
    tee.write("\r\x1b[2K 10%")
    tee.write("\r\x1b[2K 90%\r\x1b[2Kdone\r\n")
    tee.write("unfinished")
    tee.finish()
    assert log.getvalue() == "plain\nred line\ndone\nunfinished\n"
    assert " 90%" in terminal.getvalue()


def test_outcome_survives_a_torn_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 3}\n{"step": 4, "lo')
    write_exit_record(run, "failed", 1, "because")
    assert read_exit_record(run).step == 3
    run.exit.write_text('{"code": 0')
    assert read_exit_record(run) is None


def test_a_message_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under PYTHONUNBUFFERED other threads print between two."""
    writes: list[str] = []
    stream = SimpleNamespace(write=writes.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr(sys, "stderr", stream)
    say("a signal")
    report_error(ConfigError(["one", "two"]))
    assert [text for text in writes if text] == ["a signal\n", "error: 2 config mistakes\n  - one\n  - two\n"]

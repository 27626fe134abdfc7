"""What others have written, in files, in names and by models, drives no terminal."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import saving
from control.entries import entry
from kept_runs import make_run
from program import forgather
from terminal import Screen

from forgather_cli.control.registry import register
from forgather_cli.errors import SetupError
from forgather_cli.launch.error_report import report_error
from forgather_cli.launch.exit_status import write_exit_record
from forgather_cli.launch.rank_log import rank_log
from forgather_cli.run_dir import RunDir
from forgather_cli.terminal.bars import Bar
from forgather_cli.terminal.folding import escaped, rich_console, tell

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r[/bold]{x}\x7f"
RAW = ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\r", "\x7f")


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@contextmanager
def both_on(screen: io.StringIO) -> Iterator[None]:
    with redirect_stdout(screen), redirect_stderr(screen):
        yield


@pytest.mark.parametrize("kind", [Screen, io.StringIO])
def test_every_way_to_print_escapes_what_a_terminal_obeys(kind: type[io.StringIO], tmp_path: Path) -> None:
    screen = kind()
    assert escaped(f"a\tb\n{EVIL}") == "a\tb\n\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\r[/bold]{x}\\x7f"
    with both_on(screen), rank_log(tmp_path / "log"):
        tell(EVIL)
        report_error(SetupError(EVIL))
        rich_console(file=screen, markup=False, highlight=False).print(EVIL)
        logging.getLogger("test").error("%s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            logging.getLogger("test").exception("x")
    for text in (screen.getvalue(), (tmp_path / "log").read_text()):
        assert "\\x1b]0;owned" in text
        assert not [raw for raw in RAW if raw in text]


def test_a_bar_shows_its_text_as_it_is() -> None:
    with both_on(screen := Screen()), Bar("[/bold]{x} " + EVIL, after=0) as bar:
        bar.update(1, 2)
    assert "[/bold]{x}" in screen.getvalue()
    assert not [raw for raw in ("\x1b]", "\x1b[2J", "\x9b", "\x7f") if raw in screen.getvalue()]


@pytest.mark.parametrize("kind", [Screen, io.StringIO])
def test_what_a_run_of_a_stranger_holds_is_shown_escaped(kind: type[io.StringIO], tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / f"run{EVIL.replace('/', '')}", 1.0, (3.0, 2.0)))
    saving.saved_run(run.root, 1)
    manifest = run.checkpoint(1) / "manifest.json"
    saving.sign(manifest.parent, json.loads(manifest.read_text()) | {"metrics": {EVIL: 1.0}})
    write_exit_record(run, "failed", 1, EVIL, 1)
    register(entry("job", str(run.root)), EVIL)
    for words in (
        ["logs", "summary", str(run.root)], ["logs", "summary", str(run.root), "--markdown"],
        ["logs", "how", str(run.root)], ["checkpoint", "list", str(run.root)],
        ["checkpoint", "inspect", str(run.checkpoint(1))], ["checkpoint", "verify", str(run.checkpoint(1))],
        ["control", "list"], ["control", "save", "job"], ["runs", "list", "."], ["resume", EVIL],
        ["checkpoint", "inspect", str(run.checkpoint(1)), "--json"], ["control", "list", "--json"],
    ):  # fmt: skip
        with both_on(screen := kind()):
            forgather(*words)
        text = screen.getvalue()
        assert text, words
        assert not [raw for raw in RAW if raw in text], words


def test_a_log_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    from forgather_cli.launch.run_lock import RunLock

    other = tmp_path / "precious"
    other.write_text("mine")
    (tmp_path / "run/logs").mkdir(parents=True)
    log = RunDir(tmp_path / "run").rank_log(0)
    log.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"), rank_log(log):
        pass
    with RunLock(tmp_path / "run") as held:
        held.prepare("{}\n", {}, overwrite=False, resume=False)
        with rank_log(log):
            print("a line")
    assert (other.read_text(), log.is_symlink()) == ("mine", False)
    assert "a line" in log.read_text()

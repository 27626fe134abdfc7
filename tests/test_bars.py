"""Bars of what takes long: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import finalized
import pytest
from program import forgather

from forgather_cli.bars import Bar
from forgather_cli.config.schema import TextSettings
from forgather_cli.data.build import load_data
from forgather_cli.run_dir import RunDir


class Terminal(io.StringIO):
    """Standard error as a terminal that keeps all that was drawn on it."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """No fixture: pytest sets standard error anew for the test itself."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", made := Terminal())
    return made


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars show from their first update on."""
    monkeypatch.setitem(Bar.__init__.__kwdefaults__, "after", 0.0)


def test_a_bar_comes_when_something_takes_long_and_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with Bar("quick", total=2) as bar:
        bar.add(2)
    assert terminal.getvalue() == ""
    with Bar("outer", "bytes", total=10_000, after=0.0) as outer:
        outer.add(5_000)
        with Bar("inner", after=0.0) as inner:
            inner.update(1, None)
        outer.add(5_000)
    shown = terminal.getvalue()
    assert "outer" in shown
    assert "10.0/10.0 kB" in shown
    assert "inner" not in shown
    assert shown.endswith("\x1b[2K")  # taken away


@pytest.mark.usefixtures("own_directory", "at_once")
def test_what_takes_long_has_bars_on_a_terminal_and_none_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunDir(Path("run"))
    finalized.train(run.root)
    Path("corpus.txt").write_text("to be or not to be, that is the question\n" * 50)
    bpe = TextSettings(files=["corpus.txt"], seq_len=8, tokenizer="bpe", bpe_vocab_size=270, cache_dir="cache")
    commands = {
        ("checkpoint", "verify", "run"): ["verifying step-00000002", "verifying step-00000006"],
        ("checkpoint", "average", "--last", "2", "run", "-o", "mean"): ["verifying step-00000006", "writing weights"],
        ("finalize", "run", "final"): ["verifying step-00000006", "sequences", "writing weights", "hashing the files"],
    }
    terminal = on_a_terminal(monkeypatch)
    for command, bars in commands.items():
        terminal.truncate(0)
        assert forgather(*command) == 0, terminal.getvalue()
        assert [bar for bar in bars if bar not in terminal.getvalue()] == []
    load_data(bpe, seed=1, progress=lambda done, total: None)
    assert "tokenizer: reading" in terminal.getvalue()
    assert "tokenizer: finding 270 tokens" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    assert forgather("checkpoint", "verify", "run") == 0
    assert pipe.getvalue() == ""

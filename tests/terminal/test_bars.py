"""Bars of what takes long: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import finalized
import pytest
from program import forgather, until
from terminal import Screen

from forgather_cli.config.schema import TextSettings
from forgather_cli.data.build import load_data
from forgather_cli.run_dir import RunDir
from forgather_cli.terminal import bars
from forgather_cli.terminal.bars import Bar, doing


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """No fixture: pytest sets standard error anew for the test itself."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", made := Screen())
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
    assert ("outer" in shown, "10.0/10.0 kB" in shown, "inner" in shown) == (True, True, False)
    assert shown.endswith("\x1b[2K")  # taken away


@pytest.mark.usefixtures("own_directory", "at_once")
def test_what_takes_long_has_bars_on_a_terminal_and_none_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for command, expected in commands.items():
        terminal.truncate(0)
        assert forgather(*command) == 0, terminal.getvalue()
        assert [bar for bar in expected if bar not in terminal.getvalue()] == []
    load_data(bpe, seed=1, progress=lambda done, total: None)
    assert "tokenizer: reading" in terminal.getvalue()
    assert "tokenizer: finding 270 tokens" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    assert forgather("checkpoint", "verify", "run") == 0
    assert pipe.getvalue() == ""


# -------------------------------------------------------------------------------------------------- what is done


class Heard(Screen):
    """Standard error whose lines can be waited for."""

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.getvalue())


def hear(monkeypatch: pytest.MonkeyPatch, *, on_terminal: bool = False) -> Heard:
    monkeypatch.setattr(bars, "SILENCE", 0.02)
    monkeypatch.setattr(bars, "_said", set())
    monkeypatch.setattr(Heard, "isatty", lambda self: on_terminal)
    monkeypatch.setattr(sys, "stderr", heard := Heard())
    return heard


def test_what_takes_long_is_said_once_and_what_does_not_never(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = hear(monkeypatch)
    monkeypatch.setattr(bars, "SILENCE", 60.0)
    with doing("quick"):
        pass
    monkeypatch.setattr(bars, "SILENCE", 0.02)
    for _ in range(2):
        with doing("reading"):
            heard.wait_for("reading ...\n")
            with doing(lambda: ""), doing("waiting"):
                heard.wait_for("waiting ...\n")
    with doing("reading"):
        threading.Event().wait(0.1)  # it would be said again
    with doing("reading"), doing("ended"):
        heard.wait_for("ended ...\n")
    assert heard.getvalue() == "reading ...\nwaiting ...\nended ...\n"


def test_of_a_bar_what_it_counts_is_said_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = hear(monkeypatch)
    with doing("reading"), Bar("tokenizing") as bar, Bar("of another rank", shown=False) as other:
        other.add(1)
        heard.wait_for("reading ...\n")  # nothing is tokenized yet
        bar.add(1)
        heard.wait_for("tokenizing ...\n")
    assert heard.getvalue() == "reading ...\ntokenizing ...\n"


def test_on_a_terminal_it_is_dim_and_a_bar_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    heard = hear(monkeypatch, on_terminal=True)
    with doing("reading"), Bar("tokenizing", after=0.0) as bar:
        heard.wait_for("\x1b[2mreading ...\x1b[0m\n")
        bar.add(1)
        heard.wait_for("tokenizing")
        threading.Event().wait(0.1)  # it would have been said
        assert "\x1b[2mtokenizing" not in heard.getvalue()
    heard.truncate(0)
    monkeypatch.setenv("NO_COLOR", "1")
    with doing("writing"):
        heard.wait_for("writing ...\n")
    assert "\x1b[2mwriting" not in heard.getvalue()


def test_the_first_rank_of_each_node_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = hear(monkeypatch)
    for rank, local_rank in (("1", "1"), ("2", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with doing(f"waiting as {rank}"):
            if local_rank == "0":
                heard.wait_for("rank 2: waiting as 2 ...\n")
            else:
                threading.Event().wait(0.1)  # it would have spoken
    assert "as 1" not in heard.getvalue()

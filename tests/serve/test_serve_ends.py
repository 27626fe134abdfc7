"""``forgather serve`` ends at once, whatever ends it, and leaves nothing that runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import nobody_runs
from serving import Served, f32_file, streaming
from terminal import Terminal


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose answers can be very long."""
    return f32_file(tmp_path_factory.mktemp("long") / "random", 100_000)


@pytest.fixture
def server(file: Path) -> Iterator[Served]:
    with Served(str(file)) as process:
        yield process


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_amid_an_answer(server: Served, signum: int, code: int) -> None:
    llama = server.llama
    with streaming(server) as answer:
        began = time.monotonic()
        server.process.send_signal(signum)
        assert server.finish() == code
        assert time.monotonic() - began < 20.0  # the answer would take minutes
        with pytest.raises(Exception, match=r"incomplete|closed|peer|Connection"):
            list(answer)
    assert nobody_runs([llama])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_kill_leaves_nothing(server: Served, is_stopped: bool) -> None:
    """Nor where llama.cpp's process reads nothing, as while it loads a model."""
    llama = server.llama
    with streaming(server):
        if is_stopped:
            os.kill(llama, signal.SIGSTOP)
        server.process.kill()
        assert nobody_runs([llama])


def test_ctrl_c_on_a_terminal(file: Path) -> None:
    terminal = Terminal("serve", str(file), "--port", "0")
    terminal.read_until("key: ")
    os.write(terminal.master, b"\x03")
    terminal.read_until(None)
    assert terminal.process.wait(60) == 130
    assert "Traceback" not in terminal.output
    assert "error" not in terminal.output


def test_llama_cpp_that_dies_is_told(server: Served) -> None:
    os.kill(server.llama, signal.SIGKILL)
    assert server.finish() == 1
    assert "error: llama.cpp has ended (exit code -9)" in server.output

"""Killed, or on a full disk, ``finalize --gguf`` leaves no half file, and llama.cpp does not go on alone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from finalized import model_directory, refused
from gguf_files import STOP, byte_level, made
from program import Process, forgather, nobody_runs
from saving import full_disk

from forgather_cli.gguf.options import GGUF_TYPES
from forgather_cli.gguf.write import write_gguf
from forgather_cli.launch.processes import children

pytestmark = pytest.mark.usefixtures("own_directory")

KILLED = """
import os, signal
from program import forgather
from forgather_cli.gguf.write import Contents

pieces = Contents.pieces

def killed(self, entry, spec, kind):
    if entry.name == "output_norm.weight":
        os.kill(os.getpid(), signal.SIGKILL)
    return pieces(self, entry, spec, kind)

Contents.pieces = killed
forgather("finalize", "source", "model", "--gguf", "f32")
"""
MEASURES = """
from forgather_cli.gguf.reader import llama_cpp
llama_cpp("losses", model="file.gguf", threads=1, sequences=[[3] * 200] * 9999, targets=[[3] * 200] * 9999, plain=3,
          vocab=403)
"""


def test_killed_while_it_writes() -> None:
    model_directory(Path("source"))
    with Process(code=KILLED) as job:
        assert job.finish() == -signal.SIGKILL, job.output
    assert not Path("model").exists()
    assert [path.name for path in Path().rglob("*.gguf")] == ["first-layers-F32.gguf"]
    assert forgather("finalize", "source", "model", "--gguf", "f32") == 0
    assert sorted(path.name for path in Path().iterdir()) == ["model", "source"]
    assert Path("model/model-F32.gguf").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_llama_cpp_ends_with_who_started_it(signum: int) -> None:
    write_gguf(Path("file.gguf"), made(byte_level(Path("model")), STOP).contents, "f32")
    with Process(code=MEASURES) as job:
        job.until(lambda: any("file.gguf" in maps(child) for child in children(job.process.pid)))
        started = children(job.process.pid)
        os.kill(job.process.pid, signum)
        job.finish()
    assert nobody_runs(started)


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the weights fit, and the file does not."""
    source = model_directory(Path("source"))
    with full_disk((source / "model.safetensors").stat().st_size + 1000):
        message = refused(capsys, "source", "new", "--gguf", "f32")
    assert "new: cannot be written (File too large)" in message
    assert message.endswith("nothing was left behind\n")
    assert message.count("error:") == 1


def test_the_room_that_a_file_takes_is_known_before(tmp_path: Path) -> None:
    contents = made(byte_level(tmp_path / "model"), STOP).contents
    for kind in GGUF_TYPES:
        write_gguf(tmp_path / kind, contents, kind)
        assert (tmp_path / kind).stat().st_size <= contents.num_bytes(kind) <= 1.5 * (tmp_path / kind).stat().st_size


def test_a_llama_cpp_that_does_not_load(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model_directory(Path("source"))
    Path("built/xllamacpp").mkdir(parents=True)
    Path("built/xllamacpp/__init__.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(Path("built").absolute()))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    message = refused(capsys, "source", "new", "--gguf", "f32")
    assert "--gguf: xllamacpp, which is llama.cpp, cannot be loaded here (ImportError: libgomp.so.1: cannot" in message
    assert "comparing" not in message  # before any work


OUTLIVES = """
import os, urllib.request
from forgather_cli.gguf import plain_llama_cpp

assert plain_llama_cpp.context_length("file.gguf")["tokens"] > 0
(server,) = plain_llama_cpp.ALIVE
assert urllib.request.urlopen(f"{server.listening_address}/health").status == 200
os._exit(0)
"""


def test_a_server_is_not_ended_before_the_process() -> None:
    """One that joins its threads may wait for them forever (xllamacpp 2026.10)."""
    write_gguf(Path("file.gguf"), made(byte_level(Path("model")), STOP).contents, "f32")
    with Process(code=OUTLIVES) as job:
        assert job.finish() == 0, job.output

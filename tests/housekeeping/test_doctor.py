"""``forgather doctor``: what it says of a machine, what it finds to mend, and its exit code."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from program import Process, document, forgather, shown

from forgather_cli import __version__
from forgather_cli.control import registry, server
from forgather_cli.launch.processes import temporary_folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, cache, registry and folder for temporary files."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path


def test_a_machine_that_can_train(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "doctor")
    assert found["can_train"]
    assert [each for each in found["findings"] if each["weight"] != "warning"] == []
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # +cu130 is the build's
    assert found["versions"]["forgather"] == __version__
    assert "kernels" in found["extras"]
    cpu = found["devices"][-1] if not torch.backends.mps.is_available() else found["devices"][-2]
    assert (cpu["name"], cpu["runs"]["fp8"], cpu["runs"]["loss=liger"]) == ("cpu", "emulated", "needs CUDA")
    assert cpu["runs"]["bf16"] in ("fast", "slow")
    assert len(found["devices"]) >= 1 + torch.cuda.device_count()
    assert found["room"]["outputs"]["path"] == str(machine / "outputs")
    cache = found["room"]["cache"]
    assert (cache["path"], cache["bytes"]) == (f"{machine}/XDG_CACHE_HOME/forgather", 0)
    assert list(machine.rglob("*")) == [machine / "tmp"]  # it only looks
    page = shown(capsys, "doctor")
    assert torch.__version__.split("+")[0] in page
    assert "this machine can train" in page


def test_leftovers_of_killed_processes_are_found(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = os.fork()
    if child == 0:
        with temporary_folder("job"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    entry = registry.Entry("killed", "127.0.0.1", socket.gethostname(), 8900, child, "then", "now", "/run", "/run")
    registry.register(entry, None)
    run = machine / "outputs/default/run"
    (run / "checkpoints/.tmp-step-00000010-1.0").mkdir(parents=True)
    (run / "checkpoints/.tmp-step-00000010-1.0/weights").write_bytes(bytes(3000))
    (run / "config.yaml").write_text("{}")
    (machine / "XDG_CACHE_HOME/forgather/tokens/.tmp-abc").mkdir(parents=True)
    found = [each["what"] for each in document(capsys, "doctor")["findings"] if each["weight"] == "to clean"]
    assert len(found) == 4
    words = ("forgather-job-", "entries of killed jobs", "2.9 KiB", "unfinished builds")
    assert all(word in told for told, word in zip(found, words, strict=True))
    assert forgather("control", "cleanup", "--yes") == 0
    with temporary_folder("job"):  # as the next job
        pass
    assert forgather("runs", "remove", str(run), "--yes") == 2  # not without the lock of a job
    (run / ".lock").write_text("pid 1 on nowhere\n")
    assert forgather("runs", "remove", str(run), "--yes") == 0
    assert forgather("cache", "prune", "--all", "--yes") == 0
    assert [each for each in document(capsys, "doctor")["findings"] if each["weight"] == "to clean"] == []


def test_all_ports_taken_is_a_warning(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as held:  # not the hundred of jobs that other tests run meanwhile
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        monkeypatch.setattr(server, "PORTS", [each.getsockname()[1] for each in taken])
        assert document(capsys, "doctor")["ports"]["free"] == 0
        assert "callbacks.control.port" in shown(capsys, "doctor")


def test_what_keeps_from_training_is_an_error(machine: Path) -> None:
    (machine / "outputs").write_text("a file")
    unwritable, broken = f"{machine / 'outputs'} cannot be written", "OSError('libcudart.so.13: not found')"
    for package, error, told in (
        ("torch", broken, ["torch cannot be imported (libcudart.so.13: not found)", unwritable]),
        ("h11", "ModuleNotFoundError('no h11', name='h11')", ["h11 cannot be imported (no h11)"]),
    ):
        (machine / f"{package}.py").write_text(f"raise {error}")
        with Process("doctor", cold=True) as done:
            assert done.finish() == 1, done.output
        assert [each for each in told if f"error: {each}" not in done.output] == []
        assert "this machine can train" not in done.output
        (machine / f"{package}.py").unlink()

"""What runs leave in TMPDIR: nothing, however they end, and nothing of others is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import pytest
from program import Process, until
from two_ranks import SMALL

from forgather_cli.launch.processes import children, is_running, torchrun_folder

WORKERS = [*SMALL, "dataloader_num_workers=2", "max_steps=100000", "save_strategy=no"]
OTHERS = ["forgather-another", "pymp-another", "torchelastic_another"]
STRATEGIES = pytest.mark.parametrize("trainer", ["single", "ddp"])


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR of processes that a test starts, with something of another program in it."""
    folder = tmp_path_factory.mktemp("t")  # short: a socket's path has 107 characters
    monkeypatch.chdir(tmp_path_factory.mktemp("w"))
    for name in OTHERS:
        (folder / name).mkdir()
    return folder


def left(temporary: Path) -> list[str]:
    return sorted(path.name for path in temporary.iterdir())


def start(temporary: Path, *words: str, cold: bool = False) -> Process:
    return Process("train", *WORKERS, *words, env={"TMPDIR": str(temporary)}, cold=cold)


@STRATEGIES
def test_a_run_with_data_workers_leaves_nothing_nor_one_that_is_stopped(temporary: Path, trainer: str) -> None:
    with start(temporary, f"trainer={trainer}", *(["max_steps=2"] if trainer == "ddp" else [])) as job:
        if trainer == "single":
            job.read_until("step 3/")
            job.process.terminate()
        assert job.finish() == (75 if trainer == "single" else 0), job.output
    assert left(temporary) == OTHERS


@STRATEGIES
def test_what_a_killed_run_leaves_goes_with_the_next_command(temporary: Path, trainer: str) -> None:
    with start(temporary, f"trainer={trainer}", cold=trainer == "single") as job:
        job.read_until("step 3/")
        family = {job.process.pid}
        while more := {child for pid in family for child in children(pid)} - family:
            family |= more
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.finish()
    until(lambda: not any(map(is_running, family)))
    assert left(temporary) != OTHERS  # or nothing is tested here
    with start(temporary, "trainer=single", "max_steps=2", "dataloader_num_workers=0", "output_dir=next") as job:
        assert job.finish() == 0, job.output
    assert left(temporary) == OTHERS


@pytest.mark.full
def test_the_folder_that_torchrun_makes_for_our_ranks_goes_with_them_or_with_the_next_command(temporary: Path) -> None:
    """torchrun itself leaves it, however it ends."""

    def torchrun(*words: str) -> Process:
        options = ["--nproc-per-node=2", "-m", "forgather_cli", "train", *WORKERS, "trainer=ddp", "output_dir=run"]
        words = (*options, "dataloader_num_workers=0", *words)
        return Process(*words, module="torch.distributed.run", env={"TMPDIR": str(temporary)})

    with torchrun() as job:
        job.read_until("step 3/")
        for pid in (job.process.pid, *children(job.process.pid)):
            os.kill(pid, signal.SIGKILL)
        job.finish()
    assert [name.partition("_")[0] for name in left(temporary) if name not in OTHERS] == ["torchelastic"]
    with torchrun("max_steps=2", "overwrite_output_dir=true") as job:
        assert job.finish() == 0, job.output
    assert left(temporary) == OTHERS


def test_what_somebody_has_torchrun_write_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "torchelastic_x"
    error = folder / "job_y/attempt_0/0/error.json"
    error.parent.mkdir(parents=True)
    assert torchrun_folder(str(error)) == folder
    (error.parent / "stdout.log").touch()  # --redirects
    assert torchrun_folder(str(error)) is None
    elsewhere = ("log-dir/job_y/attempt_0/0/error.json", "sub/torchelastic_x/job_y/attempt_0/0/error.json", "error")
    assert [torchrun_folder(str(tmp_path / path)) for path in elsewhere] == [None] * 3
    assert (torchrun_folder(""), torchrun_folder(None)) == (None, None)

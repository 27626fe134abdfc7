"""Saving: bytes on disk, manifest, publication, failures, and writers killed at any instant."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import saving
import torch
from program import Process
from saving import Box

from forgather_cli import __version__
from forgather_cli.checkpoint.components import Component, LocalShard, Sharing
from forgather_cli.checkpoint.load import Reader
from forgather_cli.checkpoint.manifest import read_manifest
from forgather_cli.checkpoint.tensors import write_model_directory
from forgather_cli.errors import SetupError
from forgather_cli.run_dir import RunDir


def test_the_manifest_names_every_file_with_its_sha256_and_infinite_metrics(tmp_path: Path) -> None:
    metrics = {"loss": 2.0, "eval_perplexity": float("inf")}
    path = saving.saved_run(tmp_path, 5, metrics=metrics).checkpoint(5)
    manifest = read_manifest(path)
    on_disk = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    assert set(manifest.files) == on_disk - {"manifest.json"}
    assert {"state.json", "state-rank-00000.json", "state-rank-00000.safetensors", "model/config.json"} <= on_disk
    for name, entry in manifest.files.items():
        content = (path / name).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        assert entry.size == len(content)
        assert entry.ranges == (((0, len(content), sha256),) if content else ())
    document = json.loads((path / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert (document["format"], document["format_version"], document["step"]) == ("forgather-checkpoint", 1, 5)
    assert (manifest.strategy, manifest.world_size, manifest.config_fingerprint) == ("single", 1, "f1")
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.versions["forgather"] == __version__
    assert manifest.metrics == metrics
    assert manifest.info == {"epoch": 0.5}


def test_views_and_transposed_weights_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {"t": base.t(), "row": base[1], "column": base[:, 2], "leaf": torch.nn.Parameter(base)}
    for async_save in (False, True):
        saver = saving.checkpointer(tmp_path / str(async_save), async_save=async_save)
        saving.save(saver, 1, model=saving.rows(views))
        saver.close()
        reader = Reader(saver.run.checkpoint(1))
        for name, tensor in views.items():
            saving.assert_equal(reader.read(name), tensor.detach().contiguous())


def test_write_model_directory_is_what_save_writes_which_needs_no_optimizer(tmp_path: Path) -> None:
    path = saving.saved_run(tmp_path / "run", 3, optimizer={}).checkpoint(3)
    assert Reader(path).optimizer_names() == []
    assert not (path / "optimizer").exists()
    (tmp_path / "plain").mkdir()
    write_model_directory(tmp_path / "plain", saving.tensors(3))
    written = (tmp_path / "plain" / "model.safetensors").read_bytes()
    assert written == (path / "model" / "model.safetensors").read_bytes()


def test_an_asynchronous_save_stores_the_state_of_its_step(tmp_path: Path) -> None:
    saver = saving.checkpointer(tmp_path, async_save=True)
    weights, release = saving.tensors(1), threading.Event()

    def held_up(directory: Path) -> None:
        assert release.wait(120)
        saving.write_model_files(directory)

    assert saving.save(saver, 1, model=saving.rows(weights), write_model_files=held_up)
    for tensor in weights.values():
        tensor.zero_()
    assert saver.newly_published() == []
    assert saver.run.checkpoint_steps() == []
    release.set()
    saver.wait()
    assert saver.newly_published() == [saver.run.checkpoint(1)]
    assert saver.newly_published() == []
    saving.assert_content(Reader(saver.run.checkpoint(1)), 1)


def test_a_save_in_flight_survives_the_end_of_the_interpreter(tmp_path: Path) -> None:
    code = (
        "import sys, time, saving\n"
        "def slow(directory):\n    time.sleep(0.3); saving.write_model_files(directory)\n"
        "saver = saving.checkpointer(__import__('pathlib').Path(sys.argv[1]), async_save=True)\n"
        "saving.save(saver, 7, write_model_files=slow)\n"
        "raise SystemExit(3)\n"
    )
    with Process(str(tmp_path), code=code, cold=True) as job:
        assert (job.finish(), job.output) == (3, "")
    saving.assert_content(Reader(RunDir(tmp_path).checkpoint(7)), 7)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_is_an_error_in_the_log_and_the_checkpoint_before_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, async_save: bool
) -> None:
    saver = saving.checkpointer(tmp_path, async_save=async_save)
    saving.save(saver, 1)
    saver.wait()
    with saving.full_disk(20_000):
        saving.save(saver, 2, size=256)
        saver.wait()
    assert saver.newly_published() == [saver.run.checkpoint(1)]
    (message,) = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert message.startswith("the checkpoint of step 2 was not saved: File too large; the newest one")
    assert saver.failures == [(2, "File too large")]
    assert saver.run.checkpoint_steps() == [1]
    assert saving.debris(saver.run) == []
    saving.assert_content(saving.newest(saver.run), 1)
    assert saving.save(saver, 2, size=256)
    saver.close()
    saving.assert_content(Reader(saver.run.checkpoint(2)), 2, size=256)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"write_model_files": saving.failing(OSError(28, "No space left on device"))}, "No space left on device"),
        ({"metrics": {"loss": 1.0, "grad_norm": float("inf")}}, "grad_norm is inf"),
        ({"model": {"w": LocalShard(torch.zeros(2, dtype=torch.complex128))}}, "w: cannot store torch.complex128"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_cannot_be_saved_fails_the_save_only(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    saver = saving.checkpointer(tmp_path)
    assert not saving.save(saver, 1, **changes)
    assert told in saver.failures[0][1]
    assert saver.run.checkpoint_steps() == []
    assert saving.debris(saver.run) == []


def test_a_writer_that_hangs_is_left_to_itself_and_never_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forgather_cli.checkpoint.publish.GRACE", 0.05)
    saver = saving.checkpointer(tmp_path, async_save=True, save_timeout=0.1)
    release, threads = threading.Event(), set(threading.enumerate())
    saving.save(saver, 1, write_model_files=lambda directory: release.wait(120) and None)
    saver.wait()
    assert saver.failures == [(1, "it took longer than save_timeout=0.1 seconds")]
    (writer,) = set(threading.enumerate()) - threads
    release.set()
    writer.join(120)
    assert saver.run.checkpoint_steps() == []
    assert saving.debris(saver.run) == []


def identity(path: Path) -> tuple[int, int]:
    """Changes when the file is written again."""
    status = (path / "model" / "model.safetensors").stat()
    return status.st_ino, status.st_mtime_ns


def test_the_same_step_again_keeps_a_valid_checkpoint_and_adds_its_marks(tmp_path: Path) -> None:
    saver = saving.checkpointer(tmp_path)
    saving.save(saver, 4)
    path = saver.run.checkpoint(4)
    before = identity(path)
    info = {"strategy": "single", "config_fingerprint": "f1", "final": True}
    assert saving.save(saver, 4, metrics={"loss": 2.0, "eval_loss": 1.0}, info=info)
    assert saver.newly_published() == [path, path]
    assert identity(path) == before
    manifest = Reader(path).manifest
    assert manifest.final
    assert manifest.metrics == {"loss": 2.0, "eval_loss": 1.0}
    Reader(path).verify()
    assert saving.debris(saver.run) == []


@pytest.mark.parametrize("changes", [{"info": {"config_fingerprint": "f0"}}, {"healthy": False}, {}], ids=str)
def test_the_same_step_of_another_config_in_better_health_or_damaged_is_written_again(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    saver = saving.checkpointer(tmp_path)
    saving.save(saver, 4, **changes)
    path = saver.run.checkpoint(4)
    if not changes:
        saving.damage(path / "model" / "model.safetensors", saving.flip(-1))
    before = identity(path)
    assert saving.save(saver, 4)
    assert identity(path) != before
    assert Reader(path).manifest.healthy
    Reader(path).verify()
    saving.assert_content(Reader(path), 4)
    assert saving.debris(saver.run) == []


def test_trial_refuses_a_state_that_cannot_be_stored_and_leaves_the_run_directory_unused(tmp_path: Path) -> None:
    class Broken(Box):
        def state_dict(self) -> Any:
            raise KeyError("history")

    saver = saving.checkpointer(tmp_path / "new")
    mine = Component("callbacks.my_callback", Box({"history": [0, 1, 2, set()]}), Sharing.GLOBAL)
    with pytest.raises(SetupError, match=r"callbacks\.my_callback\.state\['history'\]\[3\]: cannot store .* type set"):
        saver.trial([*saving.components(0), mine])
    with pytest.raises(SetupError, match=r"broken: its state_dict\(\) failed: KeyError: 'history'"):
        saver.trial([Component("broken", Broken(), Sharing.GLOBAL)])
    saver.trial(saving.components(0), rows=saving.rows(saving.tensors(0)), num_bytes=1000)
    assert saving.debris(saver.run) == []
    assert not saver.run.is_used()


def test_without_planned_saves_a_trial_warns_of_a_lack_of_room_and_leaves_no_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saving.checkpointer(tmp_path / "new", save_strategy="no")
    saver.trial(saving.components(0), rows={"w": LocalShard(torch.empty(1 << 20, 1 << 30, device="meta"))})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.fullmatch(
        r"output_dir: one checkpoint needs 4.5e\+06 GB, .*/checkpoints has .* free; free some space, or set "
        "output_dir to another disk; with save_strategy=no training starts, but a signal would end it without a "
        "checkpoint",
        record.getMessage(),
    )
    assert list(tmp_path.iterdir()) == []


KILLED = """
import logging, os, random, signal, sys, time
from pathlib import Path
import saving
from forgather_cli.checkpoint.load import newest_valid
from forgather_cli.run_dir import RunDir

run, seconds = RunDir(Path(sys.argv[1])), random.Random(int(sys.argv[2]))

def train():
    saver = saving.checkpointer(run.root, async_save=True, save_total_limit=2)
    saver.clean()
    reader = newest_valid(run)
    step = reader.step if reader else 0
    while True:
        step += 1
        if step % 5 == 0:  # the same step again
            saving.save(saver, step - 1, size=128)
        saving.save(saver, step, size=128, info={"strategy": "single", "config_fingerprint": str(os.getpid())})

reached = 0
for round in range(16):
    child = os.fork()
    if child == 0:
        train()
    while round % 2 and (run.checkpoint_steps() or [0])[-1] == reached:
        time.sleep(0.002)
    time.sleep(seconds.uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reached = saving.after_a_kill(run, reached, size=128)
print("reached", reached)
"""


def test_writers_killed_at_random_moments_leave_whole_checkpoints(tmp_path: Path) -> None:
    with Process(str(tmp_path), str(os.getpid()), code=KILLED) as job:
        assert job.finish() == 0, job.output
    assert {line.split()[0] for line in job.lines} == {"killed", "reached"}
    assert job.lines.count("killed in a save") >= 1
    assert int(job.lines[-1].split()[-1]) >= 8


def test_a_run_directory_that_is_moved_while_a_save_begins_is_not_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saving.saved_run(root, 1)

    def saved(directory: Path) -> None:
        root.rename(tmp_path / "elsewhere")
        directory.mkdir(parents=True, exist_ok=True)  # as transformers' tokenizers do
        saving.write_model_files(directory)

    assert not saving.save(saving.checkpointer(root), 2, write_model_files=saved)
    assert not root.exists()

"""Loading: whole checkpoints only, the newest healthy one, rows of tensors, and clear words for everything else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import saving
import torch
from saving import Box, flip

from forgather_cli.checkpoint.components import Component, Sharing
from forgather_cli.checkpoint.load import Reader, restore_components
from forgather_cli.errors import CheckpointError


def test_any_changed_byte_in_any_file_is_found(tmp_path: Path) -> None:
    path = saving.saved_run(tmp_path, 5).checkpoint(5)
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
    assert len(files) >= 7
    for file in files:
        content = file.read_bytes()
        for position in {0, len(content) // 3, len(content) - 1}:
            saving.damage(file, flip(position))
            with pytest.raises(CheckpointError, match=re.escape(file.relative_to(path).as_posix())):
                Reader(path).verify()
            file.write_bytes(content)
    Reader(path).verify()


@pytest.mark.parametrize("level", ["full", "size"])
def test_missing_and_truncated_files_are_found_by_size(tmp_path: Path, level: Any) -> None:
    reader = Reader(saving.saved_run(tmp_path, 5).checkpoint(5))
    saving.damage(reader.path / "model" / "model.safetensors", lambda content: content[:-3])
    (reader.path / "state.json").unlink()
    (reader.path / "model" / "empty.txt").unlink()
    with pytest.raises(CheckpointError) as caught:
        reader.verify(level)
    message = str(caught.value)
    assert message.startswith(f"{reader.path}: is damaged: ")
    assert "state.json is missing" in message
    assert "model/empty.txt is missing" in message
    assert "model/model.safetensors has " in message
    reader.verify("none")


def test_foreign_directories_are_said_to_be(tmp_path: Path) -> None:
    run = saving.saved_run(tmp_path / "run", 1)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(CheckpointError, match=r"foreign: not a Forgather checkpoint \(no manifest\.json\)$"):
        Reader(foreign)
    (foreign / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"use model=pretrained model\.path=DIR"):
        Reader(foreign)
    (foreign / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(CheckpointError, match=r"not a Forgather checkpoint \(manifest\.json is of another program\)"):
        Reader(foreign)
    with pytest.raises(CheckpointError, match="it is a run directory, its checkpoints are in checkpoints/"):
        Reader(run.root)
    with pytest.raises(CheckpointError, match=f"it is the model of one, use {run.checkpoint(1)}"):
        Reader(run.checkpoint(1) / "model")
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        Reader(tmp_path / "missing")


@pytest.mark.parametrize(
    "files",
    [
        {"../../secret": {"size": 0, "ranges": []}}, {"/etc/passwd": {"size": 0, "ranges": []}},
        {"state.json": {"size": 9, "ranges": [[0, 5, "x"]]}}, {"state.json": {"size": 9, "ranges": [[3, 9, "x"]]}},
        {"state.json": 3}, [],
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_makes_no_sense_is_damage_and_fields_of_a_later_one_are_no_problem(
    tmp_path: Path, files: Any
) -> None:
    path = saving.saved_run(tmp_path, 1).checkpoint(1)
    document = json.loads((path / "manifest.json").read_text())
    saving.sign(path, {**document, "something_new": [1]})
    assert Reader(path).step == 1
    saving.sign(path, {**document, "files": files})
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        Reader(path)


def test_rows_are_read_without_the_rest_and_what_is_gone_is_named(tmp_path: Path) -> None:
    reader, full = Reader(saving.saved_run(tmp_path, 6).checkpoint(6)), saving.tensors(6)
    for name, tensor in full.items():
        ends = ((0, None), (1, 3), (2, 2), (5, 100), (len(tensor), None)) if tensor.dim() else ()
        for start, stop in ends:
            saving.assert_equal(reader.read(name, start=start, stop=stop), tensor[start:stop])
    saving.assert_equal(reader.read("model.scale.exp_avg", "optimizer"), full["model.scale"] / 2)
    assert reader.shape("model.embed.weight") == (64, 16)
    first, second = reader.read("model.embed.weight"), reader.read("model.embed.weight")
    first.zero_()
    saving.assert_equal(second, full["model.embed.weight"])
    (reader.path / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(No such file"):
        reader.read("model.embed.weight")
    with pytest.raises(CheckpointError, match="has no model tensor nothing"):
        reader.read("nothing")


def test_states_come_back_by_key_and_what_is_missing_or_does_not_fit_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(Box):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("warmup")

    reader = Reader(saving.saved_run(tmp_path, 6).checkpoint(6))
    assert reader.components() == ["trainer", "scheduler", "rng"]
    assert reader.state("scheduler") == {"last_lr": [0.1]}
    with pytest.raises(CheckpointError, match="has no component ema; it has trainer, scheduler, rng"):
        reader.state("ema")
    with pytest.raises(CheckpointError, match="has rng of 1 ranks only, rank 1 was asked for"):
        reader.state("rng", rank=1)
    assert reader.state("trainer", rank=1)["step"] == 6
    assert reader.has(Component("trainer", Box(), Sharing.GLOBAL, required=True))
    with pytest.raises(CheckpointError, match="has no ema, without which a run cannot be resumed"):
        reader.has(Component("ema", Box(), Sharing.GLOBAL, required=True))
    trainer, scheduler, ema = Box(), Box("as built"), Box("as built")
    wanted = [
        Component("trainer", trainer, Sharing.GLOBAL, required=True),
        Component("scheduler", scheduler, Sharing.GLOBAL),
        Component("ema", ema, Sharing.GLOBAL),
    ]
    assert restore_components(reader, wanted, only={"trainer", "ema"}) == ["ema"]
    assert trainer.state["step"] == 6
    assert (scheduler.state, ema.state) == ("as built", "as built")
    assert "has no state of ema, which starts fresh" in caplog.text
    with pytest.raises(CheckpointError, match=r"the state of scheduler does not fit this run \(KeyError: 'warmup'\)"):
        restore_components(reader, [Component("scheduler", Other(), Sharing.GLOBAL)])


def test_garbage_is_an_error_at_verify_none_too(tmp_path: Path) -> None:
    run = saving.saved_run(tmp_path, 1)
    path = run.checkpoint(1)
    saving.damage(path / "state.json", lambda content: bytearray(b'{"components": [7]}'))
    saving.damage(path / "state-rank-00000.safetensors", lambda content: content[:10])
    saving.damage(path / "model" / "model.safetensors", lambda content: content[:-1])
    reader = saving.newest(run, "none")
    with pytest.raises(CheckpointError, match=r"state\.json: is damaged"):
        reader.state("trainer")
    with pytest.raises(CheckpointError, match=r"state-rank-00000\.safetensors: is not a safetensors file"):
        reader.state("rng")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a safetensors file"):
        reader.model_names()


def test_a_row_is_read_from_its_own_bytes(tmp_path: Path) -> None:
    """A row does not depend on the bytes of the others, damaged here."""
    big = {"w": torch.arange(1 << 16, dtype=torch.float32).reshape(1 << 8, 1 << 8)}
    path = saving.saved_run(tmp_path, 1, model=saving.rows(big)).checkpoint(1)
    last = slice(-(1 << 10), None)
    saving.damage(path / "model" / "model.safetensors", lambda content: content.__setitem__(last, bytes(1 << 10)))
    saving.assert_equal(Reader(path).read("w", start=3, stop=4), big["w"][3:4])

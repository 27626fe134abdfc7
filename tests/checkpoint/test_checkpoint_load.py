"""Loading: whole checkpoints only, the newest healthy one, rows of tensors, and clear words for everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saving
import torch
from refusals import case, cases, table
from saving import Box, flip

from forgather_cli.checkpoint.components import Component, Sharing
from forgather_cli.checkpoint.format import Piece, TensorSpec, plan
from forgather_cli.checkpoint.load import Reader, restore_components
from forgather_cli.errors import CheckpointError, SetupError
from forgather_cli.run_dir import RunDir


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
    for told in ("state.json is missing", "model/empty.txt is missing", "model/model.safetensors has "):
        assert told in message
    reader.verify("none")


def foreign(*files: tuple[str, str]) -> None:
    Path("foreign").mkdir()
    for name, content in files:
        Path("foreign", name).write_text(content)
    Reader(Path("foreign"))


def of_a_run(what: str) -> None:
    Reader(saving.saved_run(Path("run"), 1).checkpoint(1).parents[1] / what)


def garbled(read: Callable[[Reader], object]) -> None:
    """At ``verify_checkpoint=none`` too."""
    path = saving.saved_run(Path("run"), 1).checkpoint(1)
    saving.damage(path / "state.json", lambda content: bytearray(b'{"components": [7]}'))
    saving.damage(path / "state-rank-00000.safetensors", lambda content: content[:10])
    saving.damage(path / "model" / "model.safetensors", lambda content: content[:-1])
    read(saving.newest(RunDir(Path("run")), "none"))


def in_a_file() -> None:
    Path("checkpoints").write_text("a file")
    saving.checkpointer(Path()).trial([])


CONFIG, OTHER = ("config.json", "{}"), ("manifest.json", '{"name": "web app"}')
SPEC = TensorSpec("w", "F32", (6, 2))
test_what_is_refused = table(
    case(CheckpointError, r"foreign: not a Forgather checkpoint \(no manifest\.json\)$", foreign),
    case(CheckpointError, r"use model=pretrained model\.path=DIR", foreign, CONFIG),
    case(CheckpointError, r"not a Forgather checkpoint \(manifest\.json is of another program\)",
         foreign, CONFIG, OTHER),
    case(CheckpointError, "it is a run directory, its checkpoints are in checkpoints/", of_a_run, ""),
    case(CheckpointError, "it is the model of one, use run/checkpoints/step-00000001",
         of_a_run, "checkpoints/step-00000001/model"),
    case(CheckpointError, "no such checkpoint directory", of_a_run, "missing"),
    *cases(CheckpointError, garbled,
        (lambda reader: reader.state("trainer"), r"state\.json: is damaged"),
        (lambda reader: reader.state("rng"), r"state-rank-00000\.safetensors: is not a safetensors file"),
        (Reader.model_names, r"model\.safetensors: is not a safetensors file"),
    ),
    case(CheckpointError, r"w: 4 rows are held, its shape is \[6, 2\]", plan, [[Piece(SPEC, 0, 4)], []], "m"),
    case(CheckpointError, "ranks disagree",
         plan, [[Piece(SPEC, 0, 6)], [Piece(TensorSpec("w", "BF16", (6, 2)), 0, 6)]], "m"),
    case(SetupError, r"output_dir: cannot write checkpoints to .*checkpoints \(.*exists\); set output_dir", in_a_file),
)  # fmt: skip


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


def test_a_row_is_read_from_its_own_bytes(tmp_path: Path) -> None:
    """A row does not depend on the bytes of the others, damaged here."""
    big = {"w": torch.arange(1 << 16, dtype=torch.float32).reshape(1 << 8, 1 << 8)}
    path = saving.saved_run(tmp_path, 1, model=saving.rows(big)).checkpoint(1)
    last = slice(-(1 << 10), None)
    saving.damage(path / "model" / "model.safetensors", lambda content: content.__setitem__(last, bytes(1 << 10)))
    saving.assert_equal(Reader(path).read("w", start=3, stop=4), big["w"][3:4])

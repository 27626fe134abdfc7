"""The mean of checkpoints, as a model directory; and saved settings changed by hand."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import finalized
import pytest
import torch
from finalized import logits, theirs, weights
from program import Process, document, forgather, printed, refusal, shown
from saving import damage, flip
from tiny import decoder, metrics

from forgather_cli.checkpoint.average import average_models
from forgather_cli.checkpoint.load import Reader
from forgather_cli.checkpoint.retention import pending
from forgather_cli.checkpoint.tensors import write_model_directory
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import CheckpointError
from forgather_cli.models.pretrained import write_model_files
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finalized.train(tmp_path_factory.mktemp("average") / "run", "save_total_limit=5")


def checkpoints(run: Path) -> list[Path]:
    return [RunDir(run).checkpoint(step) for step in (2, 4, 6)]


def bf16_directory(name: str, seed: int, max_bytes: int = 1 << 40) -> dict[str, torch.Tensor]:
    model = decoder(seed, vocab_size=257).bfloat16()
    Path(name).mkdir()
    write_model_directory(Path(name), dict(model.state_dict()), max_bytes=max_bytes)
    write_model_files(model, ByteTokenizer(), Path(name))
    return {key: value.clone() for key, value in model.state_dict().items()}


def test_the_mean_of_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(path) for path in checkpoints(run)]
    assert document(capsys, "checkpoint", "average", *names, "-o", "out") == {"path": "out", "sources": names}
    members = [weights(path / "model") for path in checkpoints(run)]
    found = weights(Path("out"))
    assert found.keys() == members[0].keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, torch.stack([m[name] for m in members]).mean(0), rtol=1e-6, atol=1e-7)
    assert logits(theirs(Path("out"))).isfinite().all()
    provenance = json.loads(Path("out/provenance.json").read_text())
    assert [source["step"] for source in provenance["sources"]] == [2, 4, 6]
    assert provenance["sources"][0]["run"] == str(run)


def test_the_last_ones_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = shown(capsys, "checkpoint", "average", "--last", "2", str(run), "-o", "two")
    assert two.splitlines() == ["mean of step-00000004, step-00000006", "two"]
    told = printed(capsys, "checkpoint", "average", "--last", "9", str(run), "-o", "all")
    assert "keeps 3 healthy checkpoints (save_total_limit), 9 were asked for" in " ".join(told.err.split())


def test_bf16_in_several_files_is_summed_in_fp32() -> None:
    seeds = range(3)
    members = [bf16_directory(f"m{seed}", seed, max_bytes=30_000 * (seed + 1)) for seed in seeds]
    assert len(list(Path("m0").glob("*.safetensors"))) != len(list(Path("m2").glob("*.safetensors")))
    average_models([Path(f"m{seed}") for seed in seeds], Path("out"))
    for name, tensor in weights(Path("out")).items():
        mean = torch.stack([member[name].float() for member in members]).mean(0)
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), mean, rtol=2**-8, atol=1e-8)  # half a step of bf16
        assert (tensor == mean.bfloat16()).float().mean() > 0.999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", r"model.norm.weight has shape \[31\] here, \[32\] there"),
        ("name", "it has no tensor model.norm.weight"),
        ("dtype", "model.norm.weight is F32 here, BF16 there"),
        ("tokenizer", r"its tokenizer is another one \(tokenizer.json differs\)"),
        ("config", "config.json has rms_norm_eps=0.5 here, 1e-05 there"),
    ],
)
def test_models_that_are_not_alike(change: str, message: str) -> None:
    tensors = bf16_directory("a", 0)
    shutil.copytree("a", "b")
    norm = tensors.pop("model.norm.weight")
    if change in ("shape", "dtype"):
        tensors["model.norm.weight"] = norm[:31] if change == "shape" else norm.float()
    if change in ("shape", "dtype", "name"):
        Path("b/model.safetensors").unlink()
        write_model_directory(Path("b"), tensors)
    if change == "tokenizer":
        Path("b/tokenizer.json").write_text(Path("b/tokenizer.json").read_text() + " ")
    if change == "config":
        config = json.loads(Path("b/config.json").read_text())
        Path("b/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(CheckpointError, match=f"^b: cannot be averaged with a: {message}"):
        average_models([Path("a"), Path("b")], Path("out"))
    assert sorted(path.name for path in Path().iterdir()) == ["a", "b"]


def test_what_cannot_be_averaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = partial(refusal, capsys, "checkpoint", "average")
    first, second, _ = map(str, checkpoints(run))
    shutil.copytree(second, "step-00000004")
    damage(Path("step-00000004/model/model.safetensors"), flip(-1))
    message = refused(first, "step-00000004", "-o", "out")
    assert "is damaged: model/model.safetensors" in message
    assert "(SHA-256 differs); leave it out, or use --last K RUN for whole ones" in message
    assert f"{first}: is named twice; an average counts each" in refused(first, second, first, "-o", "out")
    assert f"{first}/model: is named twice, as {first};" in refused(first, f"{first}/model", "-o", "out")
    assert "nowhere: no such directory; give checkpoints" in refused("nowhere", first, "-o", "out")
    assert "needs two models or more, got 1" in refused(first, "-o", "out")
    assert f"use --last K {run}" in refused(str(run), first, "-o", "out")
    assert "--last: takes the checkpoints of one run, got 2 sources" in refused("--last", "2", first, second, "-o", "o")
    assert "exists already" in refused(first, second, "-o", str(run))
    assert sorted(path.name for path in Path().iterdir()) == ["step-00000004"]


def no_space(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


SMALL = [
    "model=nano", "data=synthetic", "data.seq_len=16", "global_batch_size=2", "eval_strategy=no", "save_steps=1",
    "callbacks=minimal", "device=cpu",
]  # fmt: skip


SIGNALLED = """
import os, signal
from forgather_cli.checkpoint.average import _Mean
from forgather_cli.cli.app import main

def rows(mean, *args):
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        mean._check()

_Mean._rows = rows
main()
"""


def test_a_run_ends_with_the_mean_of_its_last_checkpoints(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(Path("run"))
    with monkeypatch.context() as patch:
        patch.setattr("forgather_cli.checkpoint.average.write_weights", no_space)
        assert forgather("train", *SMALL, "max_steps=4", "average_last=3", "output_dir=run") == 1
    assert "average_last: " in capfd.readouterr().err
    names = ["step-00000002", "step-00000003", "step-00000004"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == names
    with Process("resume", "run", code=SIGNALLED) as job:
        assert job.finish() == 75, job.output
    assert sorted(path.name for path in run.checkpoints.iterdir()) == names
    assert forgather("resume", "run") == 0
    average = run.average(4, 3)
    assert str(average) in capfd.readouterr().out
    members = [weights(run.checkpoints / name / "model") for name in names]
    for name, tensor in weights(average).items():
        torch.testing.assert_close(tensor, torch.stack([m[name] for m in members]).mean(0), rtol=1e-6, atol=1e-7)

    before = contents(average)
    assert forgather("resume", "run") == 0
    assert contents(average) == before
    shutil.rmtree(average)
    assert forgather("resume", "run") == 0  # of a run that is done
    assert contents(average).keys() == before.keys()
    told = printed(capfd, "resume", "run", "average_last=5", "save_total_limit=null")
    assert "keeps 3 healthy checkpoints" in " ".join(told.err.split())
    assert len(json.loads((run.average(4, 5) / "provenance.json").read_text())["sources"]) == 3
    assert document(capfd, "eval", str(average))["eval_loss"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["average_last=2"], ["average_last", "3, got 2"]),
        (["average_last=5"], ["average_last", "save_total_limit=3", "save_total_limit=5"]),
        (["average_last=3", "save_strategy=no"], ["average_last", "save_strategy=no"]),
    ],
)
def test_averages_that_cannot_be(words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "train", *SMALL, *words)
    assert all(each in message for each in told)


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps whose last checkpoint has been edited."""
    path = finalized.train(tmp_path_factory.mktemp("edit") / "run", "max_steps=4", "logging_steps=1")
    words = ["learning_rate=3e-4", "betas=[0.5,0.6]", "weight_decay=0.25", "lr_scheduler=constant"]
    assert forgather("checkpoint", "edit", str(path), *words) == 0
    return path


def test_an_edited_checkpoint_is_whole_and_has_the_values_until_its_backup_is_moved_back(
    edited: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forgather("checkpoint", "verify", str(edited)) == 0
    reader = Reader(RunDir(edited).checkpoint(4))
    groups = reader.state("optimizer")["groups"]
    assert {group["settings"]["initial_lr"] for group in groups.values()} == {3e-4}
    assert [group["settings"]["betas"] for group in groups.values()] == [[0.5, 0.6]] * len(groups)
    assert groups["default"]["settings"]["weight_decay"] == 0.25
    assert groups["no_decay"]["settings"]["weight_decay"] == 0.0
    config = reader.state("identity")["config"]
    assert (config["learning_rate"], config["lr_scheduler"]["type"]) == (3e-4, "constant")
    backup = Path(f"{reader.path}.backup-1")
    assert Reader(backup).manifest.problems(backup) == []
    assert Reader(backup).state("identity")["config"]["learning_rate"] == 1e-2
    assert [info["step"] for info in document(capsys, "checkpoint", "list", str(edited))] == [2, 4]
    shutil.copytree(edited, "undone")
    checkpoint = RunDir(Path("undone")).checkpoint(4)
    shutil.rmtree(checkpoint)
    Path(f"{checkpoint}.backup-1").rename(checkpoint)
    assert forgather("checkpoint", "verify", "undone") == 0
    assert pending(RunDir(Path("undone"))) is None


def rates(run: Path, after: int) -> list[float]:
    return [record["learning_rate"] for record in metrics(run) if "grad_norm" in record and record["step"] > after]


def test_a_resume_takes_the_edited_values(edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, again = (Path(shutil.copytree(edited, name)).resolve() for name in ("run", "again"))
    told = printed(capsys, "resume", str(run), "max_steps=6").err
    assert "learning_rate, weight_decay, optimizer, lr_scheduler: as edited in" in " ".join(told.split())
    assert rates(run, 4) == pytest.approx([3e-4, 3e-4])
    later = Reader(RunDir(run).checkpoint(6))
    assert later.state("optimizer")["groups"]["default"]["settings"]["betas"] == [0.5, 0.6]
    assert "edited" not in later.manifest.info
    assert forgather("resume", str(again), "max_steps=5", "learning_rate=7e-4") == 0  # the command line wins
    assert rates(again, 4) == pytest.approx([7e-4])


def test_an_edit_of_an_older_checkpoint_says_how_to_go_on_from_it(
    edited: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(edited, "run")).resolve()
    older = str(RunDir(run).checkpoint(2))
    told = shown(capsys, "checkpoint", "edit", older, "lr_scheduler=constant", "learning_rate=5e-3")
    line, path = told.splitlines()[-2:]
    assert path == "run/checkpoints/step-00000002"
    said, _, command = line.partition(": ")
    assert said == "a plain forgather resume starts from step-00000004; to resume from the edited one"
    words = shlex.split(command)
    assert words[0] == "forgather"
    assert forgather(*words[1:], "max_steps=3") == 0
    assert f"resumed from {path}" in capsys.readouterr().err
    assert rates(run, 2) == pytest.approx([5e-3])


def test_an_average_or_an_edit_on_a_full_disk_leaves_nothing_and_all_as_it_was(
    edited: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, path = contents(edited), RunDir(edited).checkpoint(4)
    monkeypatch.setattr(os, "pwrite", no_space)
    message = f"{Path.cwd()}/deep/out: cannot be written (No space left on device); nothing was left behind"
    words = ("checkpoint", "average", "--last", "2", str(edited), "-o", "deep/out")
    assert refusal(capsys, *words) == f"error: {message}\n"
    assert list(Path().iterdir()) == []
    message = f"error: {path}: cannot be edited (No space left on device); it is as it was\n"
    assert printed(capsys, "checkpoint", "edit", str(edited), "learning_rate=1e-3") == (2, "", message)
    assert contents(edited) == before
    assert not list(path.parent.glob(".*"))


def test_what_cannot_be_edited(edited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = partial(refusal, capsys, "checkpoint", "edit", str(edited))
    before = sorted(path.name for path in RunDir(edited).checkpoints.iterdir())
    assert "nothing to change" in refused()
    assert "max_steps: is not in a saved state; give it to forgather resume" in refused("max_steps=9")
    assert "holds the moments of another one" in refused("optimizer=sgd")
    assert "has these settings already" in refused("learning_rate=3e-4")
    assert "learning_rte: unknown setting; did you mean learning_rate?" in refused("learning_rte=1")
    assert sorted(path.name for path in RunDir(edited).checkpoints.iterdir()) == before

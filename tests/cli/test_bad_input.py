"""Bad input through the real command line: one clear message, the exit code, nothing lost and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import Process, Result, forgather, printed
from saving import damage, flip
from tiny import metrics

from forgather_cli.config.schema import EVALUATED

SMALL = ["model=nano", "seq_len=16", "callbacks=minimal", "global_batch_size=4", "logging_steps=1", "device=cpu",
         "max_steps=2", "output_dir=run"]  # fmt: skip
SYNTHETIC = [*SMALL, "data=synthetic", "num_samples=64", "num_eval_samples=4"]
TEXT = [*SMALL, "data=text", "data.files=[ok.txt]", "cache_dir=cache"]
STEP_1, STEP_2 = "trained/checkpoints/step-00000001", "trained/checkpoints/step-00000002"
WEIGHTS = "model/model.safetensors"

MINE = """
from contextlib import suppress
from pathlib import Path

import torch
from users_parts import Rows


def data(length=16):
    return {"train": Rows(""), "eval": [Rows("")[0]] * 4, "seq_len": length, "tokenizer": "bytes"}


def data_without_labels():
    return {"train": [{"input_ids": torch.arange(8)} for _ in range(64)], "seq_len": 8, "vocab_size": 257}


def loss(logits, labels, factor=1.0):
    return factor * torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Counts:
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        Path("counted.txt").write_text(str(self.steps))

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class FillsTheDisk:
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            with open("junk", "wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(512)):
                    pass
"""


class Program:
    """Runs commands in this process, in a directory of their own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> Result:
        return printed(self._capsys, *words)

    def refuses(self, *words: str) -> str:
        """The one message of a command that exits with 2 and leaves the directory as it was."""
        before = contents()
        done = self(*words)
        assert done.code == 2, done
        assert not re.search(r" step \d+/", done.out)
        assert "Traceback" not in done.err
        said, *messages = done.err.split("error: ")
        # of the warmup, which these runs never end, and where training had begun
        assert all("WARNING" in line or "INFO attention: " in line for line in said.splitlines())
        assert len(messages) == 1
        assert contents() == before
        return messages[0].rstrip("\n")


def contents() -> dict[str, bytes | None]:
    """Every path below the working directory with its bytes, lock files and caches aside."""
    paths = (p for p in Path().rglob("*") if p.name != ".lock" and p.parts[0] != "cache" and p.suffix != ".pyc")
    return {str(p): p.read_bytes() if p.is_file() else None for p in paths if p.name != "__pycache__"}


@pytest.fixture(scope="module")
def run_of_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "trained"
    assert forgather("train", *SYNTHETIC, "save_steps=1", f"output_dir={run}") == 0
    return run


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Program]:
    """In an empty directory with a user's module and a text of 7 kB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    Path("mine.py").write_text(MINE)
    Path("ok.txt").write_text("".join(f"some text of mine {n}\n" for n in range(320)))
    yield Program(capsys)
    sys.modules.pop("mine", None)


@pytest.fixture
def trained(program: Program, run_of_two_steps: Path) -> Path:
    """A run with checkpoints at its steps 1 and 2, as ``trained`` in the working directory."""
    shutil.copytree(run_of_two_steps, "trained")
    origin = Path("trained/origin.yaml")  # as if it had been started here
    origin.write_text(re.sub(r"(?m)^directory: .*$", f"directory: {Path.cwd()}", origin.read_text()))
    return Path("trained")


def test_a_model_that_cannot_fit_is_refused(program: Program) -> None:
    message = program.refuses("train", *TEXT, "num_hidden_layers=100000000")
    assert "model.num_hidden_layers=100000000" in message.partition(": ")[0]
    assert "GiB" in message
    words = [*(word for word in TEXT if word != "model=nano"), "model=transformers"]
    for size in (10**10, 10**17):
        config = f"{{model_type: gpt2, n_layer: 1, n_embd: 8192, n_head: 2, vocab_size: {size}}}"
        message = program.refuses("train", *words, f"model.config={config}")
        assert message.startswith("model: out of memory when its weights were made")


def test_a_best_metric_that_no_evaluation_has(program: Program) -> None:
    """Found before the start where nothing of the user's could add it, and there at the first evaluation."""
    words = [*TEXT, "data.eval_files=[ok.txt]", "eval_steps=1", "metric_for_best_model=f1"]
    for more in ([], ["--dry-run"], ["load_best_model_at_end=true", "save_steps=1"]):
        message = program.refuses("train", *words, *more)
        assert message.startswith("metric_for_best_model: no evaluation has f1; set it to one that it has (eval_loss, ")
    found = program("train", *words, "+callbacks.mine._target_=mine.Counts")
    assert found.code == 2, found
    assert (
        "metric_for_best_model: the evaluation at step 1 has no f1; set it to one that it has (eval_loss" in found.err
    )
    fine = [*words[:-1], "metric_for_best_model=samples_per_second", "overwrite_output_dir=true"]
    assert program("train", *fine).code == 0
    names = {name for each in metrics("run") for name in each}
    assert {f"eval_{name}" for name in EVALUATED} == {name for name in names if name.startswith("eval_")}


def test_a_set_up_mistake_leaves_an_empty_directory_of_the_user_empty(program: Program) -> None:
    Path("run").mkdir()
    program.refuses("train", *SYNTHETIC, "model.vocab_size=100")
    assert list(Path("run").iterdir()) in ([], [Path("run/.lock")])
    assert program("train", *SYNTHETIC, "max_steps=1", "save_strategy=no").code == 0


def test_a_used_directory_names_both_remedies_and_resume_takes_but_one(program: Program, trained: Path) -> None:
    said = program.refuses("train", *SYNTHETIC, "output_dir=trained")
    assert said.startswith("output_dir: trained already holds a run; resume it with forgather resume trained ")
    assert said.endswith("or delete it by overwrite_output_dir=true")
    said = program.refuses("resume", "trained", "overwrite_output_dir=true")
    assert said == "overwrite_output_dir: resume continues the run and deletes nothing; leave it out"


def test_a_mistake_in_an_overwriting_run_costs_nothing(program: Program, trained: Path) -> None:
    overwrite = ["train", *SYNTHETIC, "output_dir=trained", "overwrite_output_dir=true"]
    assert "model.vocab_size: the tokenizer has 257" in program.refuses(*overwrite, "vocab_size=100")
    inside = program.refuses(*overwrite, f"resume_from_checkpoint={STEP_2}")
    assert inside.startswith(f"resume_from_checkpoint: {STEP_2}: no such checkpoint directory")
    of_mine = [word for word in overwrite if not word.startswith(("data=", "seq_len=", "num_"))]
    assert "has no 'labels'" in program.refuses(*of_mine, "data._target_=mine.data_without_labels")
    crashed = contents()
    assert program(*overwrite, "model._target_=fractions.gcd", "model.a=1").code != 0
    assert contents() == crashed
    assert program(*overwrite, "max_steps=1").code == 0
    assert sorted(os.listdir("trained/checkpoints")) == ["step-00000001"]
    assert not list(Path("trained").glob(".over*"))


@pytest.mark.parametrize("how", ["train", "resume"])
@pytest.mark.parametrize("name", [".overwriting", ".overwritten"])
def test_a_run_whose_overwriting_was_killed_in_set_up_comes_back(
    program: Program, trained: Path, name: str, how: str
) -> None:
    before = contents()
    (trained / name).mkdir()
    for entry in ("checkpoints", "config.yaml", "logs") if name == ".overwriting" else os.listdir(trained):
        if not entry.startswith("."):
            (trained / entry).rename(trained / name / entry)
    if name == ".overwritten":
        settings = (trained / name / "config.yaml").read_text().replace("hidden_size: 64", "hidden_size: 32")
        (trained / "config.yaml").write_text(settings)
        (trained / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 5.5}\n')  # eval_on_start
    for words in (["logs", "summary"], ["checkpoint", "list"], ["checkpoint", "verify"], ["eval"]):
        assert "overwrite_output_dir=true" in program(*words, "trained").err
    if how == "resume":
        done = program("resume", "trained", "max_steps=5")
        assert done.code == 0, done.err
        assert "this is the run from before" in done.err
        assert "hidden_size: 64" in Path("trained/config.1.yaml").read_text()
        return
    assert "already holds a run" in program("train", *SYNTHETIC, "output_dir=trained").err
    assert contents() == before


def test_a_checkpoint_that_is_damaged_mistyped_or_not_named_at_all(program: Program, trained: Path) -> None:
    def refused(typed: str) -> str:
        return program.refuses("train", *SYNTHETIC, f"resume_from_checkpoint={typed}")

    for typed in ("trained/checkpoints/step-2", "trained/step-00000002", "trained/checkpoint/step-2"):
        said = f"resume_from_checkpoint: {typed}: no such checkpoint directory; trained has {STEP_1}, {STEP_2}"
        assert refused(typed) == said
    for typed in ("", "''", "' '"):
        assert refused(typed).startswith("resume_from_checkpoint: is empty; name a checkpoint")
    assert refused("trained").endswith(f"in checkpoints/; trained has {STEP_1}, {STEP_2}")
    damage(Path(STEP_2, WEIGHTS), flip(-1))
    said = f"resume_from_checkpoint: {STEP_2}: is damaged: model/model.safetensors has other content than was written"
    assert refused(STEP_2).startswith(said)
    assert f"use {STEP_1}, the newest other" in refused(STEP_2)


@pytest.mark.parametrize("typed", ["step-2", "checkpoints/step-00000009", "{old}/checkpoints/step-00000002", "x/y/z"])
def test_a_mistyped_one_is_told_what_there_is_wherever_it_is_called_and_the_run_lies(
    program: Program, trained: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    typed = typed.format(old=trained.absolute())
    Path("elsewhere").mkdir()
    moved = trained.rename("elsewhere/moved").absolute()
    there = ", ".join(str(moved / "checkpoints" / f"step-0000000{step}") for step in (1, 2))
    for directory, run in ((".", moved), ("elsewhere", Path("moved")), (moved, Path("."))):
        monkeypatch.chdir(directory)
        said = program.refuses("resume", str(run), f"resume_from_checkpoint={typed}")
        assert said == f"resume_from_checkpoint: {typed}: no such checkpoint directory; {moved} has {there}"
        monkeypatch.chdir(moved.parents[1])


def test_a_damaged_newest_one_is_passed_over_and_without_another_refused(program: Program, trained: Path) -> None:
    damage(Path(STEP_2, WEIGHTS), flip(-1))
    done = program("resume", "trained")
    assert done.code == 0
    assert f"{STEP_2}: is damaged: model/model.safetensors has other content" in done.err
    assert f"{STEP_1} is used" in done.err
    damage(Path(STEP_1, WEIGHTS), flip(-1))
    damage(Path(STEP_2, WEIGHTS), flip(-1))
    head, *lines = program.refuses("resume", "trained", "max_steps=3").splitlines()
    assert head.endswith("left in trained; start afresh with forgather train ... overwrite_output_dir=true")
    assert [line.split(":")[0].strip() for line in lines] == [STEP_2, STEP_1]


_LINE = "to read the data from their beginning, add 'resume_components=[model,optimizer,"
CHANGED = {
    "hidden_size=32 num_hidden_layers=1": [
        "model.hidden_size: the checkpoint has 64, this run 32; change it back, or leave model and optimizer out of "
        "resume_components",
        "model.num_hidden_layers: the checkpoint has 2, this run 1;",
    ],
    "data.seq_len=32": [
        "data.seq_len: the checkpoint has 16, this run 32; change it back, or leave data out of",
        _LINE,
    ],
    "seed=7": ["data: the samples are not those of the checkpoint (fingerprint ", _LINE],
    "data=text data.files=[ok.txt] cache_dir=cache data.seq_len=16": [
        "data.tokenizer: the checkpoint has 'bytes', this run 'bpe'; change it back, or leave data out",
        "data: the checkpoint has 'synthetic', this run 'text'; change it back, or leave data out",
    ],  # and no such line: the model knows other tokens
}


def test_resume_with_another_shape_or_other_data(program: Program, trained: Path) -> None:
    for overrides, lines in CHANGED.items():
        starts = [["resume", "trained"]]
        if overrides.startswith("hidden_size"):
            starts += [["train", *SYNTHETIC, "save_steps=1", f"resume_from_checkpoint={STEP_2}"]]
        for words in starts:
            head, *said = program.refuses(*words, "max_steps=3", *overrides.split()).splitlines()
            assert head == f"cannot resume from {STEP_2}:"
            assert len(said) == len(lines), said
            assert all(line.startswith(start) for line, start in zip(said, lines, strict=True)), said


def test_resume_with_another_tokenizer_or_packing(program: Program) -> None:
    assert program("train", *TEXT).code == 0
    for overrides, start in {
        "tokenizer=bpe bpe_vocab_size=300": "data.bpe_vocab_size: the checkpoint has 4096, this run 300;",
        "packing=best_fit": "data.packing: the checkpoint has 'concat', this run 'best_fit';",
    }.items():
        assert program.refuses("resume", "run", "max_steps=3", *overrides.split()).splitlines()[1].startswith(start)


def test_files_of_the_data_that_are_others_are_named(program: Program) -> None:
    """By their content; and in a run that has not kept that, by their times."""
    corpus = Path("corpus")
    corpus.mkdir()
    for name in "abcd":
        (corpus / f"{name}.txt").write_text(f"text {name}\n" * 100)
        os.utime(corpus / f"{name}.txt", (1e9, 1e9))
    assert program("train", *TEXT, "data.files=[corpus/*.txt]").code == 0
    assert program("resume", "run", "max_steps=3").code == 0  # the same ones
    (corpus / "a.txt").rename(corpus / "moved.txt")
    (corpus / "b.txt").write_text("another text\n" * 100)
    (corpus / "c.txt").unlink()
    (corpus / "e.txt").write_text("more text\n" * 100)
    said = program.refuses("resume", "run", "max_steps=4")
    at = corpus.resolve()
    assert f"{at}/b.txt (changed), {at}/e.txt (new), {at}/c.txt (gone); bring them back" in said
    assert "moved" not in said
    assert "a.txt" not in said
    (Path("run") / "data_files.json").unlink()
    os.utime(corpus / "b.txt", (9e9, 9e9))
    os.utime(corpus / "e.txt", (1e9, 1e9))
    said = program.refuses("resume", "run", "max_steps=4")
    assert f"here): {at}/b.txt (changed since the checkpoint was saved); bring" in said
    assert program("resume", "run", "max_steps=4", "resume_components=[model]").code == 0
    assert len(json.loads((Path("run") / "data_files.json").read_text())) == 1


def test_moments_of_another_shape_are_not_listed_by_the_hundred(program: Program, trained: Path) -> None:
    components = "resume_components=[optimizer,trainer,data]"
    head, *lines = program.refuses("resume", "trained", "max_steps=3", "hidden_size=32", components).splitlines()
    assert head == "the optimizer's state does not fit this run; leave optimizer out of resume_components:"
    assert len(lines) == 6
    assert re.match(r"  and \d+ more", lines[-1])
    assert program("resume", "trained", "max_steps=3", "hidden_size=32", "resume_components=[trainer,data]").code == 0


def test_parts_of_the_user_by_target(program: Program) -> None:
    words = [word for word in SMALL if not word.startswith(("model=", "seq_len="))]
    words += ["model._target_=users_parts.Words", "model.width=8", "data._target_=mine.data", "loss._target_=mine.loss",
              "loss.factor=2.0", "optimizer._target_=torch.optim.Adam", "optimizer.betas=[0.5,0.6]",
              "lr_scheduler._target_=torch.optim.lr_scheduler.StepLR", "lr_scheduler.step_size=1",
              "lr_scheduler.gamma=0.5", "+callbacks.mine._target_=mine.Counts"]  # fmt: skip
    done = program("train", *words)
    assert done.code == 0, done.err
    records = metrics("run")
    rates = [record["learning_rate"] for record in records if "learning_rate" in record]
    assert rates[1] == pytest.approx(rates[0] / 2)
    assert records[0]["loss"] > 8  # twice the entropy of 257 bytes
    assert Path("counted.txt").read_text() == "2"
    assert program("resume", "run", "max_steps=3").code == 0
    assert Path("counted.txt").read_text() == "3"


def test_a_run_goes_on_and_is_evaluated_from_any_directory(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program("train", *TEXT, "+callbacks.mine._target_=mine.Counts").code == 0
    run = Path("run").resolve()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert program("eval", str(run)).code == 0
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert program("resume", str(run), "max_steps=4").code == 0
    assert "files:\n  - ok.txt" in (run / "config.1.yaml").read_text(), "as it was written"
    assert list(elsewhere.iterdir()) == []


def test_a_model_of_the_user_that_is_none_leaves_no_directory(program: Program) -> None:
    own = [word for word in SYNTHETIC if not word.startswith("model=")]
    said = program.refuses("train", *own, "model._target_=fractions.Fraction", "output_dir=a/b/run")
    assert said.startswith("model._target_: fractions.Fraction must return an nn.Module, got Fract")


SMALL_DISK = """
import namespaces, os, shutil, subprocess, sys
from pathlib import Path
from program import forgather

namespaces.enter(namespaces.MOUNT)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size={size}", "tmpfs", "disk"], check=True)
for number, name in enumerate(("out", "err"), 1):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
shutil.copy("mine.py", "disk")
os.chdir("disk")
sys.path[0] = os.getcwd()
codes = [forgather(*words) for words in {runs}]
for path in sorted(Path("run").rglob("*")):
    print(path)
    if path.name == "metrics.jsonl" or path.parent.name == "logs":
        print(path.read_text())
sys.exit(max(codes))
"""


def on_small_disk(size: str, *runs: list[str]) -> Result:
    """The program, run with such words one after another in a directory on a file system of that size.

    Its standard output ends with what it has left there: the names of files, records and logs.
    """
    Path("disk").mkdir()
    with Process(code=SMALL_DISK.format(size=size, runs=runs)) as job:
        code = job.finish()
    return Result(code, Path("out").read_text(), job.output + Path("err").read_text())


def can_mount() -> bool:
    command = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="mounts a small disk, which is not allowed here")


@needs_mount
@pytest.mark.parametrize(
    ("size", "said"),
    [
        (
            "1200k",
            r"one checkpoint needs 1\.68 MB, run/checkpoints has 1\.2\d MB free; free some space, or set",
        ),
        ("16k", ""),
    ],
)
def test_a_disk_too_small_is_found_before_the_first_step_and_nothing_is_left(
    program: Program, size: str, said: str
) -> None:
    done = on_small_disk(size, ["train", *SYNTHETIC, "precision=fp32"])
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert re.search(rf"(?m)^error: output_dir: {said}", done.err)
    assert done.out == ""


@needs_mount
def test_a_save_makes_room_by_what_retention_would_delete_and_so_does_a_resume(program: Program) -> None:
    """Room for three checkpoints of 1.7 MB."""
    words = ["max_steps=5", "save_steps=1", "save_total_limit=3", "preserve_n_best=0", "eval_strategy=no"]
    done = on_small_disk("6200k", ["train", *SYNTHETIC, *words], ["resume", "run", "max_steps=7"])
    assert done.code == 0, done.err
    assert "was not saved" not in done.err
    assert re.findall(r"(?m)^run/checkpoints/step-(\d+)$", done.out) == ["00000005", "00000006", "00000007"]


@needs_mount
def test_a_disk_that_is_full_later_ends_no_run_early_and_a_lost_final_checkpoint_is_a_failure(program: Program) -> None:
    words = ["max_steps=30", "save_steps=2", "+callbacks.fill._target_=mine.FillsTheDisk", "async_save=false"]
    done = on_small_disk("6m", ["train", *SYNTHETIC, *words])
    assert done.code == 1, done.err
    assert "error: done at step 30, but that step could not be saved (see above); " in done.err
    assert done.err.splitlines()[-1] == "forgather resume run"
    assert "Traceback" not in done.err
    assert re.search(r"records were lost: \d+ of callback json in on_log", done.err)
    lost = r"ERROR the checkpoint of step {} was not saved: No space left on device; the newest one is "
    for step in (4, 30):
        assert re.search(lost.format(step) + "run/checkpoints/step-00000002", done.err), done.err
    assert done.err.count("callback json in on_log: No space left on device; training continues") == 1
    assert "step 30/30" in done.out
    assert "run/checkpoints/step-00000002/manifest.json\n" in done.out
    assert "step-00000004/" not in done.out
    records = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert [record["step"] for record in records if "loss" in record][:3] == [1, 2, 3]

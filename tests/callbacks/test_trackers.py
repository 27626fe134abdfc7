"""Trackers: accelerate's classes with TensorBoard, a tracker of the user's, and a package that stands for wandb."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from program import forgather, refusal
from ranks import run_ranks

from forgather_cli.callbacks.trackers import Trackers
from forgather_cli.config.decode import dump_tree
from forgather_cli.config.load import load_config, load_resumed
from forgather_cli.config.schema import TRACKERS, TrackersSettings
from forgather_cli.errors import CallbackError, ConfigError, SetupError
from forgather_cli.run_dir import RunDir

# What accelerate 1.15 calls of wandb, kept in WANDB_SAYS. Fails in WANDB_FAILS, logs up to step WANDB_FAILS_UNTIL.
WANDB = """
import json, os

def _say(what, value):
    last = float(os.environ.get("WANDB_FAILS_UNTIL", "inf"))
    if what == os.environ.get("WANDB_FAILS") and (what != "log" or value[0] <= last):
        raise ConnectionError("no route to host")
    with open(os.environ["WANDB_SAYS"], "a") as file:
        file.write(json.dumps([what, value]) + "\\n")

class config:
    @staticmethod
    def update(values, allow_val_change):
        _say("config", values)

class Run:
    id = "run-1"
    def log(self, values, step=None):
        _say("log", [step, values])
    def finish(self, exit_code=0):
        _say("finish", exit_code)

def login():
    _say("login", None)

def init(project, **kwargs):
    _say("init", {"project": project, **kwargs})
    return Run()
"""


@pytest.fixture(autouse=True)
def _no_state_of_others() -> None:
    """Tests of other files leave accelerate's idea of devices and ranks."""
    PartialState._reset_state()


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package called wandb, and where it leaves what it was told."""
    package = tmp_path / "site"
    (package / "wandb").mkdir(parents=True)
    (package / "wandb/__init__.py").write_text(WANDB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
    monkeypatch.setenv("WANDB_SAYS", str(tmp_path / "said.jsonl"))
    monkeypatch.syspath_prepend(package)
    yield tmp_path / "said.jsonl"
    sys.modules.pop("wandb", None)


def train(path: Path, *overrides: str) -> None:
    words = ["logging_steps=1", "eval_steps=2", "save_strategy=no", *overrides]
    tiny.train(tiny.config(path, *words), RunDir(path))


def told(file: Path, what: str) -> list[Any]:
    return [value for kind, value in map(json.loads, file.read_text().splitlines()) if kind == what]


def test_wandb_is_told_the_config_and_every_log(said: Path, tmp_path: Path) -> None:
    words = ["project=mine", "run_name=first", "init_kwargs.wandb={entity: us, tags: [a], own_token: abc}"]
    train(tmp_path / "run", "+callbacks.trackers={}", *(f"++callbacks.trackers.{word}" for word in words))
    own = {"entity": "us", "tags": ["a"], "own_token": "abc"}
    files = str(tmp_path / "run" / "trackers")
    assert told(said, "init") == [{"project": "mine", "name": "first", "dir": files, **own}]
    assert Path(files).is_dir()
    [config] = told(said, "config")
    assert config["callbacks.trackers.init_kwargs.wandb.own_token"] == "<OWN_TOKEN>"
    assert (config["model.hidden_size"], config["trainer.type"], config["callbacks.trackers.names"]) == (
        64, "single", '["wandb"]',
    )  # fmt: skip
    assert {type(value) for value in config.values()} <= {bool, int, float, str}
    records = tiny.metrics(tmp_path / "run")
    assert len(told(said, "log")) == len(records) == 4 + 2 + 1
    for (step, values), record in zip(told(said, "log"), records, strict=True):
        prefix = "eval/" if "eval_loss" in record else "train/"
        name = "eval_loss" if "eval_loss" in record else "train_loss" if "train_loss" in record else "loss"
        assert (step, values[prefix + name.removeprefix("eval_")]) == (record["step"], record[name])
    assert told(said, "finish") == [0]
    assert not PartialState._shared_state  # accelerate's idea of devices and ranks was left alone


def test_a_run_is_named_after_its_directory_and_files_go_where_the_user_says(
    said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    train(tmp_path / "my run", "report_to=all", "max_steps=1")  # of Accelerate's, those that are installed
    assert told(said, "init") == [{"project": "forgather", "name": "my run"}]
    assert list((tmp_path / "my run/tensorboard").iterdir())


def test_report_to_chooses_the_callbacks_and_a_resume_has_those(said: Path, tmp_path: Path) -> None:
    def callbacks(*words: str) -> Any:
        loaded = load_config(None, words)
        assert loaded.tree["report_to"] is None
        return loaded.config.callbacks

    assert callbacks("report_to=none").tensorboard is callbacks("report_to=none").trackers is None
    both = callbacks("report_to=[wandb,tensorboard]", "+callbacks.trackers.project=mine", "callbacks=minimal")
    assert (both.trackers.names, both.trackers.project) == (["wandb"], "mine")
    assert callbacks("callbacks=trackers").trackers == TrackersSettings()
    assert callbacks("callbacks=trackers", "report_to=mlflow").tensorboard is None
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_tree(load_config(None, ["report_to=wandb"]).tree))
    assert load_resumed(saved, ["~callbacks.trackers"]).config.callbacks.trackers is None
    with pytest.raises(ConfigError, match=r"report_to: callbacks\.trackers\.names"):
        load_config(None, ["report_to=wandb", "+callbacks.trackers.names=[mlflow]"])


def test_a_key_for_wandb_is_asked_for_before_the_start(
    said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "model=nano", "data=synthetic", "seq_len=16", "max_steps=1", "warmup_steps=0", "report_to=wandb"]
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_FAILS", "login")
    told = refusal(capsys, *words, "output_dir=run")
    assert "WANDB_API_KEY" in told
    assert "wandb login" in told
    assert not (tmp_path / "run").exists()
    assert forgather(*words, "+callbacks.trackers.init_kwargs.wandb.mode=offline", "output_dir=offline") == 0
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    assert forgather(*words, "output_dir=known") == 0
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.delenv("WANDB_FAILS")
    assert forgather(*words, "output_dir=asked") == 0
    assert told_of(said) == ["init", "init", "login", "init"]


def told_of(file: Path) -> list[str]:
    kinds = [kind for kind, _ in map(json.loads, file.read_text().splitlines())]
    return [kind for kind in kinds if kind in ("login", "init")]


def test_one_rank_of_two_speaks(said: Path, tmp_path: Path) -> None:
    assert run_ranks(2, on_a_rank, tmp_path, os.environ["WANDB_SAYS"]) == [True, False]
    assert len(told(said, "init")) == 1
    assert [step for step, _ in told(said, "log")] == [1, 2, 2, 2]


def on_a_rank(path: Path, says: str) -> bool:
    """On a rank of the pool, which has its own environment and path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path / "site")
        patch.setenv("WANDB_SAYS", says)
        train(path / "run", "trainer=ddp", "max_steps=2", "+callbacks.trackers={}")
    return sys.modules.pop("wandb", None) is not None


def test_a_resumed_run_goes_on_with_its_own_and_a_new_one_begins_another(said: Path, tmp_path: Path) -> None:
    words = ["+callbacks.trackers={}", "save_strategy=steps", "async_save=false"]
    train(tmp_path / "run", *words, "max_steps=2")
    train(tmp_path / "run", *words, "max_steps=4", "resume_from_checkpoint=true")
    checkpoint = RunDir(tmp_path / "run").checkpoint(2)
    train(tmp_path / "fork", *words, "max_steps=3", f"resume_from_checkpoint={checkpoint}")
    first, second, fork = told(said, "init")
    assert [config["max_steps"] for config in told(said, "config")] == [2, 4, 3]
    assert first == {"project": "forgather", "name": "run", "dir": str(tmp_path / "run/trackers")}
    assert second == {**first, "id": "run-1", "resume": "allow"}
    assert (fork["name"], "id" in fork) == ("fork", False)


@pytest.mark.parametrize(("last", "flow", "lost"), [("inf", [], 13), ("2", [*range(3, 13), 12], 2)])
def test_one_that_fails_later_is_one_error_and_is_tried_again(
    said: Path, tmp_path: Path, last: str, flow: list[int], lost: int,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Tried at 1, spared 1; at 3, spared 3; at 7, spared 7; and the end is told whatever came before."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("WANDB_FAILS", "log")
    monkeypatch.setenv("WANDB_FAILS_UNTIL", last)
    train(tmp_path / "run", "max_steps=12", "eval_steps=100", "+callbacks.trackers={}")
    [error] = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert error.startswith("callbacks.trackers: wandb failed in log: ConnectionError: no route to host; training")
    assert [step for step, _ in told(said, "log")] == flow
    assert told(said, "finish") == [0]
    assert f"wandb works again; records that were lost: {lost}" in caplog.text
    assert [record["step"] for record in tiny.metrics(tmp_path / "run") if "loss" in record][-1] == 12


def test_one_that_cannot_start_ends_the_run_before_its_first_step(
    said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_FAILS", "init")
    with pytest.raises(SetupError, match=r"^callbacks\.trackers: wandb cannot be started: ConnectionError: no route"):
        train(tmp_path / "run", "+callbacks.trackers={}")
    assert not RunDir(tmp_path / "run").is_used()


def test_a_run_that_fails_is_told_to_have_failed(said: Path, tmp_path: Path) -> None:
    bad = ["+callbacks.bad._target_=users_callbacks.Raises", "+callbacks.bad.event=on_step_end"]
    with pytest.raises(CallbackError):
        train(tmp_path / "run", "+callbacks.trackers={}", *bad)
    assert told(said, "finish") == [1]


def test_accelerate_s_tensorboard_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    train(tmp_path, "+callbacks.trackers.names=[tensorboard]", "+callbacks.trackers.project=p")
    folder = tmp_path / "trackers" / "p"
    events = tiny.tensorboard(folder)
    losses = {r["step"]: r["loss"] for r in tiny.metrics(tmp_path) if "loss" in r}
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    assert written == pytest.approx(losses, rel=1e-6)
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 4]
    [parameters] = folder.rglob("hparams.yml")
    assert "model.hidden_size: 64" in parameters.read_text()


class FileTracker(GeneralTracker):
    name = "file"
    requires_logging_directory = True

    def __init__(self, project: str, logging_dir: str, suffix: str = "txt") -> None:
        super().__init__()
        self._path = Path(logging_dir) / f"{project}.{suffix}"

    @property
    def tracker(self) -> Path:
        return self._path

    def start(self) -> None:
        self._path.parent.mkdir(parents=True)
        self._path.write_text("begin\n")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self._path.open("a") as file:
            file.write(f"{step} {min(values.keys() - {'train/cpu_wait'})}\n")


def test_a_tracker_of_the_user_s_is_named_by_its_class(tmp_path: Path) -> None:
    words = ["names=[test_trackers.FileTracker]", "init_kwargs={test_trackers.FileTracker: {suffix: log}}"]
    train(tmp_path, *(f"+callbacks.trackers.{word}" for word in words), "eval_steps=100", "max_steps=2")
    lines = (tmp_path / "trackers/forgather.log").read_text().splitlines()
    assert lines == ["begin", "1 train/bits_per_byte", "2 train/bits_per_byte", "2 train/data_seconds"]


def test_accelerate_s_logger_still_needs_a_partial_state() -> None:
    """The day it does not, ``_tracking`` of trackers.py can leave it alone."""
    assert not PartialState._shared_state
    with pytest.raises(RuntimeError, match="initialize the accelerate state"):
        get_logger("any").debug("hello")
    assert set(TRACKERS) <= set(LOGGER_TYPE_TO_CLASS), "the names are those of accelerate"


def test_a_package_that_is_missing_is_named_with_its_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, package, install in (
        ("wandb", "wandb", "pip install 'forgather[trackers]' or pip install wandb"),
        ("comet", "comet_ml", "pip install comet_ml"),
    ):
        (tmp_path / package).mkdir()  # as wandb leaves one in the working directory: a folder is no package
        with pytest.raises(SetupError) as caught:
            train(tmp_path / "run", f"+callbacks.trackers.names=[{name}]")
        message = f"callbacks.trackers.names: the package {package} is missing; {install}, or leave it out"
        assert str(caught.value) == message
        assert not RunDir(tmp_path / "run").is_used()


@pytest.mark.parametrize(("name", "key"), [("swanlab", "logdir"), ("dvclive", "dir")])
def test_files_of_others_lie_in_the_run_too(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("forgather_cli.callbacks.trackers._construct", lambda *args: given.append(args[3]))
    Trackers(TrackersSettings(names=[name]), RunDir(tmp_path))._started(name)
    assert given[0][key] == str(tmp_path / "trackers" / name)

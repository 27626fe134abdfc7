"""What commands do, in every state of a job and under every strategy: real ranks that are told over HTTP."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
from control.entries import entry
from control_orders import Orders
from program import SMALL, until
from ranks import RankError, run_ranks

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.control import command_record, registry
from forgather_cli.control.command_record import ControlCommand
from forgather_cli.errors import CallbackError, ControlError
from forgather_cli.run_dir import RunDir

WORDS = [
    *SMALL, "num_eval_samples=16", "per_device_eval_batch_size=2", "max_steps=40", "trainer=single",
    "callbacks.progress=null", "callbacks.json=null", "+callbacks.control={}",
    "+callbacks.orders._target_=control_orders.Orders",
]  # fmt: skip
STRATEGIES = {name: [f"trainer={name}"] for name in ("single", "ddp", "fsdp2")}
STRATEGIES["pipeline"] = ["trainer=pipeline", "n_microbatches=2"]


@pytest.fixture(autouse=True)
def _no_jobs_of_others() -> None:
    """A job that another test has killed is still registered."""
    shutil.rmtree(registry.jobs_directory(), ignore_errors=True)


@dataclass(frozen=True)
class Ended:
    """A run that is over, as a rank saw it. ``answers`` in the order of the orders, which rank 0 gives."""

    run: RunDir
    step: int
    evaluations: int
    states: list[str]
    answers: list[ControlCommand]

    def checkpoint(self, step: int) -> str:
        return str(self.run.checkpoint(step).absolute())


def trained(config: Config, path: Path) -> Ended:
    run = RunDir(path)
    trainer = tiny.train(config, run)
    orders = trainer.callbacks.by_name["orders"]
    evaluations = sum("eval_loss" in record for record in trainer.state.log_history)
    answers = [command_record.read(run, told) for told in orders.given]
    return Ended(run, trainer.state.global_step, evaluations, orders.states, answers)


def run(strategy: str, path: Path, orders: list[str], *words: str) -> Ended:
    """A run under orders; two ranks but for single."""
    given = f"+callbacks.orders.orders=[{','.join(orders)}]"
    config = load_config(None, [*WORDS, f"output_dir={path}", *STRATEGIES[strategy], given, *words], cwd=path).config
    seen = [trained(config, path)] if strategy == "single" else run_ranks(2, trained, config, path)
    assert len({(one.step, one.evaluations) for one in seen}) == 1
    assert registry.entries() == []
    return seen[0]


def within_two_steps(command: ControlCommand) -> bool:
    return command.applied_at_step is not None and 0 <= command.applied_at_step - command.asked_at_step <= 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_save_goes_on_and_stop_saves_by_the_strategy(strategy: str, tmp_path: Path) -> None:
    end = run(strategy, tmp_path, ["step_begin 2 save", "step_begin 12 stop"])
    save, stop = end.answers
    assert (save.command, save.state, stop.command, stop.state) == ("save", "done", "stop", "done")
    assert within_two_steps(save)
    assert within_two_steps(stop)
    first, last = end.run.checkpoint_steps()
    assert 2 < first <= 2 + 2
    assert 12 < last <= 12 + 2 == 14
    assert (save.checkpoint, stop.checkpoint) == (end.checkpoint(first), end.checkpoint(last))
    assert end.step == last
    assert end.states[0] == "training"


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("ddp", ["save_strategy=no"]), ("fsdp2", ["save_strategy=no"]), ("single", ["eval_on_save=true"]),
        ("single", ["load_best_model_at_end=true"]),
    ],
)  # fmt: skip
def test_an_evaluation_is_given_up_for_save_and_stop_and_not_begun_again_for_the_save(
    strategy: str, words: list[str], tmp_path: Path
) -> None:
    end = run(strategy, tmp_path, ["prediction_step 4 save_and_stop"], "eval_steps=4", *words)
    assert (end.states, end.evaluations, end.step) == (["evaluating"], 0, 4)
    assert [(c.state, c.checkpoint) for c in end.answers] == [("done", end.checkpoint(4))]


@pytest.mark.parametrize(
    ("strategy", "command"), [("single", "save"), ("single", "stop"), ("pipeline", "save"), ("pipeline", "abort")]
)
def test_commands_in_an_evaluation(strategy: str, command: str, tmp_path: Path) -> None:
    end = run(strategy, tmp_path, [f"prediction_step 4 {command}"], "eval_steps=4", "max_steps=6")
    assert end.answers[0].state == "done"
    assert end.evaluations == (1 if command == "save" else 0)
    assert end.step == (6 if command == "save" else 4)
    assert end.run.checkpoint_steps() == {"save": [4, 6], "stop": [4], "abort": []}[command]
    assert end.answers[0].checkpoint == (None if command == "abort" else end.checkpoint(4))


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_saves_in_a_row_are_one_checkpoint(strategy: str, tmp_path: Path) -> None:
    orders = ["step_begin 1 hold", "step_begin 2 save", *(f"step_begin {n} save" for n in range(4, 9)),
              "step_begin 8 release", *(f"save {n} save" for n in (3, 3, 4, 4))]  # fmt: skip
    end = run(strategy, tmp_path, orders)
    assert end.states[1] == "saving"
    assert [c.state for c in end.answers] == ["done"] * 8
    paths = [c.checkpoint for c in end.answers]
    assert len(set(paths[:6])) == 1, "while one is under way"
    assert paths[5] != paths[6] == paths[7], "and not when it is there"


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_an_abort_during_a_save_lets_that_be_finished(strategy: str, tmp_path: Path) -> None:
    end = run(strategy, tmp_path, ["step_begin 1 hold", "step_begin 2 save", "step_begin 6 abort", "step_begin 6 save",
                                   "step_begin 6 release"])  # fmt: skip
    first, abort, second = end.answers
    assert (first.state, first.checkpoint) == ("done", end.checkpoint(end.run.checkpoint_steps()[0]))
    assert (abort.state, abort.checkpoint, abort.reason) == ("done", None, None)
    assert within_two_steps(abort)
    assert end.step in (7, 8)
    assert second == first
    assert len(end.run.checkpoint_steps()) == 1


@pytest.mark.parametrize("command", ["save", "stop", "save_and_stop"])
def test_a_save_that_fails_is_a_failed_command_and_training_goes_on_if_it_may(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = ["step_begin 1 spoil", f"step_begin 2 {command}", "step_begin 38 save"]  # when the first has failed
    happens = Orders.happens

    def patient(self: Orders, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        if event == "on_step_begin" and state.global_step == 36:
            until(lambda: kwargs["trainer"].checkpoints.is_done)
        happens(self, event, state, kwargs)

    monkeypatch.setattr(Orders, "happens", patient)
    end = run("single", tmp_path, orders)
    failed, *saved = end.answers
    assert failed.state == "failed"
    assert "the disk is gone" in failed.reason
    assert [each.state for each in saved] == ["done"] * (command == "save")
    assert command != "save" or ("was not saved: " in failed.reason, end.step) == (True, 40)


def test_a_stop_that_saves_nothing_is_done_without_a_checkpoint(tmp_path: Path) -> None:
    end = run("single", tmp_path, ["step_begin 2 stop", "step_begin 2 stop"], "save_strategy=no")
    assert [(c.state, c.checkpoint) for c in end.answers] == [("done", None), ("done", None)]
    assert end.step <= 4


def test_commands_to_a_job_that_ends_by_itself_are_answered(tmp_path: Path) -> None:
    words = ["save", "stop", "save-and-stop", "graceful_stop"]
    end = run("single", tmp_path, [f"step_end 5 {word}" for word in words], "max_steps=5")
    assert [(c.state, c.checkpoint) for c in end.answers] == [("done", end.checkpoint(5))] * 4
    assert [c.command for c in end.answers] == ["save", "stop", "save_and_stop", "stop"]


def test_a_save_is_not_done_by_the_checkpoint_before_it(tmp_path: Path) -> None:
    """Which retention may delete as soon as its own is there."""
    end = run("single", tmp_path, ["step_end 4 save"], "save_steps=4", "save_total_limit=1", "max_steps=8",
              "preserve_n_best=0")  # fmt: skip
    assert end.answers[0].applied_at_step == 4
    assert end.answers[0].checkpoint == end.checkpoint(5)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_job_that_fails_answers_what_was_open(strategy: str, tmp_path: Path) -> None:
    orders = ["step_begin 1 hold", "step_begin 3 save", "step_begin 6 stop", "step_begin 6 release", "step_end 7 raise"]
    with pytest.raises((CallbackError, RankError), match="as ordered"):
        run(strategy, tmp_path, [*orders])
    found = [command_record.read(RunDir(tmp_path), path.stem) for path in (tmp_path / "control").glob("*.json")]
    answers = {command.command: command for command in found if command is not None}
    assert answers["save"].state == "done"
    assert answers["stop"].state == "failed"
    assert answers["stop"].reason == (
        "the job failed: callback orders failed in on_step_end: ZeroDivisionError: as ordered"
    )
    assert registry.entries() == []


def test_a_job_that_cannot_register_or_listen_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the directory should be")
    end = run("single", tmp_path, [], "max_steps=3", "callbacks.control.host=192.0.2.1")
    assert end.step == 3
    monkeypatch.setenv("XDG_CONFIG_HOME", str(blocked))
    config = load_config(None, [*WORDS, "+callbacks.orders.orders=[]", "max_steps=3"]).config
    assert trained(config, tmp_path / "other").step == 3
    told = [record.message for record in caplog.records if "takes no commands" in record.message]
    assert len(told) == 2
    assert "Not a directory" in told[1]
    with pytest.raises(ControlError, match="jobs: cannot be read: Not a directory"):
        registry.resolve("latest")


def test_an_id_and_a_port_of_others_are_left_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a job that runs: this process."""
    other = entry("twin")
    registry.register(other, "a" * 64)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        order = "+callbacks.orders.orders=[step_begin 1 stop]"
        config = load_config(None, [*WORDS, order, "job_id=twin", f"output_dir={tmp_path}"]).config
        (answer,) = trained(config, tmp_path).answers
        assert (answer.job_id, answer.state) == (f"twin_{os.getpid()}", "done")
        assert registry.entries() == [other]
        registry.unregister(other)
        assert run("single", tmp_path / "other", [], "max_steps=2", f"+callbacks.control.port={port}").step == 2
    assert f"control: this job takes no commands: port {port} is in use on 127.0.0.1" in caplog.text


def test_commands_that_no_job_has_answered_are_answered_by_the_next(tmp_path: Path) -> None:
    left = ControlCommand("left", "job_before", "save", state="applied", applied_at_step=3)
    command_record.write(RunDir(tmp_path), left)
    run("single", tmp_path, [], "max_steps=1")
    now = command_record.read(RunDir(tmp_path), "left")
    assert (now.state, now.reason) == ("failed", "its job ended before it answered")

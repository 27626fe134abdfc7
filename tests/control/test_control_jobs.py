"""``forgather control`` against ``forgather train``: real processes, from the command line to the checkpoint's path."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from program import SMALL, Process, forgather, printed
from two_ranks import RUN, ended, recorded_steps

from forgather_cli.control import client, registry

WORDS = [
    *SMALL, "output_dir=run", "max_steps=100000", "save_steps=50000", "eval_strategy=no",
    "callbacks=default", "~callbacks.textgen", "~callbacks.tensorboard",
    "~callbacks.progress",  # its lines would fill the pipe, which nobody reads while commands are given
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Any:
    """``forgather control WORDS``: (exit code, output, errors)."""

    def run(*words: str) -> tuple[int, str, str]:
        done = printed(capsys, "control", *words)
        return done.code, done.out.strip(), done.err.strip()

    return run


def training(*words: str) -> Process:
    """A job that has done its first steps."""
    job = Process("train", *WORDS, *words)
    job.read_until("control: this is")
    entry = registry.running()[-1]
    job.until(lambda: client.status(entry, patience=60)["step"] >= 3)
    return job


def is_checkpoint(path: str) -> bool:
    return path.startswith("run/checkpoints/") and forgather("checkpoint", "verify", path) == 0


def test_save_and_stop_prints_the_checkpoint_that_resume_goes_on_from(say: Any) -> None:
    """What commands do under other strategies, test_control_ranks asks in ranks that are there already."""
    with training("trainer=pipeline", "nproc_per_node=2", "n_microbatches=2") as job:
        code, saved, _ = say("save", "latest")
        assert (code, is_checkpoint(saved)) == (0, True)
        now = json.loads(say("status", "--json")[1])
        assert now["steps_since_checkpoint"] == now["step"] - RUN.checkpoint_steps()[-1]
        code, last, _ = say("save_and_stop", "latest")
        assert code == 0
        assert job.finish() == 0, job.output
    assert is_checkpoint(last)
    first, final = RUN.checkpoint_steps()
    assert (saved, last) == tuple(str(RUN.checkpoint(step)) for step in (first, final))
    assert say("list")[1] == "no jobs"
    assert forgather("resume", "run", "trainer=single", f"max_steps={final + 2}") == 0
    assert recorded_steps() == list(range(1, final + 3))


def test_a_job_is_looked_at_and_named_in_every_way(say: Any) -> None:
    words = ["eval_strategy=steps", "eval_steps=2", "callbacks.control.auth_token=abcdefghijklmnopqrst"]
    with training("job_id=my-job", *words) as job:
        assert [say("status", word)[0] for word in ("my-job", "my", "run", "./run/", "latest")] == [0] * 5
        now = json.loads(say("status", "--json")[1])
        assert (now["job_id"], now["max_steps"], now["world_size"]) == ("my-job", 100000, 1)
        assert now["step"] >= 3
        assert now["steps_since_checkpoint"] == now["step"]
        facts = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in say("status")[1].splitlines())
        assert re.fullmatch(r"\d+ steps", facts["not saved"])
        assert re.fullmatch(r"\d+:\d\d:\d\d", facts["eta"])  # as training's bar shows it
        assert re.fullmatch(
            r"loss \d\.\d{4}  bits/byte \d\.\d{4}  perplexity [\d.]+  .*took \d+\.\d\ds  samples/s [\d.]+",
            facts["eval"],
        )
        assert not re.search(r"eval_|(^| )tokens ", facts.get("others", ""))  # tokens are the run's, above
        assert re.search(r"total_flos [\d.]+[kMG],", facts["others"]), "rounded, and no powers of ten"
        assert say("list")[1].splitlines()[0].split()[4] == "eta"
        assert now["eta_seconds"] > 0
        assert {"loss", "grad_norm", "learning_rate"} <= now["metrics"].keys()
        assert (now["global_step"], now["logs"]["loss"]) == (now["step"], now["metrics"]["loss"])
        assert 0 < now["logs"]["step"] <= now["step"]
        entry = registry.resolve("my-job")
        job.until(lambda: client.status(entry, patience=60)["step"] >= now["step"] + 5)  # training goes on meanwhile
        assert say("status", "yours")[2].splitlines()[1:] == ["  my-job  run"]
        assert re.search(r"my-job .* \d+/100000 ", say("list")[1])
        listed = json.loads(say("list", "--json")[1])
        assert [(one["job_id"], one["running"], one["status"]["job_id"]) for one in listed] == [
            ("my-job", True, "my-job")
        ]
        assert say("cleanup")[1] == "nothing to remove"
        with Process("train", *WORDS, "overwrite_output_dir=true") as second:
            assert second.finish() == 2
            assert f"run is being written by another job (pid {job.process.pid} on" in second.output
        told = json.loads(say("save", "run", "--no-wait", "--json")[1])
        assert (told["state"], told["command"]) in [("queued", "save"), ("applied", "save")]
        code, _, waiting = say("save", "run", "--timeout", "0")
        assert code == 1
        assert re.match(r"error: my-job: save is (queued|applied) after 0 s, and stays so; its answer", waiting)
        answer = Path(waiting.partition(" will be in ")[2])
        with Process("control", "status", "--watch") as watcher:
            watcher.read_until(r"step \d+/100000  loss \d\S+  eta \d+:\d\d:\d\d  \w+")
            code, out, _ = say("stop", "--json")
            assert (code, json.loads(out)["state"]) == (0, "done")
            assert watcher.finish() == 0
            assert "my-job: ended at step" in watcher.output
        assert job.finish() == 0
    assert job.lines[-1] == "forgather resume run"
    assert (ended().state, ended().code) == ("stopped", 0)
    assert json.loads(RUN.command(told["id"]).read_text())["state"] == "done"
    assert json.loads(answer.read_text())["state"] == "done"
    code, _, wrong = say("save", "run")
    assert code == 1
    assert re.fullmatch(
        r"error: run: no job runs there; the last one ended at step \d+, stopped, with exit code 0: .+", wrong
    )
    assert say("abort", "my-job", "--force")[:2] == (1, "")


def test_a_job_that_is_killed_leaves_its_commands_unanswered_and_is_cleaned_up(say: Any) -> None:
    held = ["+callbacks.orders._target_=control_orders.Orders", "+callbacks.orders.orders=[step_begin 1 hold]"]
    with training("save_timeout=60", *held) as job:
        entry = registry.resolve(None)
        told = client.submit(entry, "save")  # it takes in the command, and does not live to finish it
        job.process.kill()
        with pytest.raises(client.ControlError, match=f"{entry.job_id}: ended before it answered"):
            client.wait(entry, told)
        assert job.finish() == -signal.SIGKILL
    assert say("status", entry.job_id)[2].startswith(f"error: {entry.job_id}: does not run any more (process ")
    assert say("cleanup")[1] == f"removed {entry.job_id}"


def test_a_signal_to_a_job_answers_the_commands_it_has(say: Any) -> None:
    with training() as job:
        entry = registry.resolve("latest")
        told = client.submit(entry, "save_and_stop")
        os.kill(job.process.pid, signal.SIGTERM)
        answer = client.wait(entry, told, timeout=60)
        assert job.finish() in (0, 75)
    assert (answer.state, answer.checkpoint) == ("done", str(RUN.checkpoint(ended().step).absolute()))


def test_abort_from_the_command_line(say: Any) -> None:
    with training("callbacks.control.disable_auth=true") as job:
        job_id = registry.resolve(None).job_id
        job.read_until("callbacks.control.disable_auth=true: any process of this machine can stop this job")
        assert say("abort", job_id, "--force")[:2] == (0, f"{job_id} is aborted, nothing was saved")
        assert job.finish() == 1
    assert (ended().state, ended().code) == ("aborted", 1)
    assert RUN.checkpoint_steps() == []

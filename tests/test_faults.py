"""One rank of a run fails: it ends within seconds, with one message that names the cause, and can be gone on with."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import pytest
from program import forgather
from two_ranks import RUN, SMALL, WATCHED, ended, fault, nobody_left, recorded_steps, start, train

STRATEGIES = ["ddp"]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(Path(__file__).parent)


def goes_on() -> bool:
    """True if the run can be finished, here by one process."""
    words = ["trainer=single", "max_steps=12", "~callbacks.fault"]
    code = forgather("resume", "run", *words) if RUN.is_used() else forgather("train", *SMALL, "max_steps=12")
    return code == 0 and ended().step == 12


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("moment", ["setup", "step", "evaluation"])
def test_a_rank_that_raises_ends_the_run_with_its_traceback(strategy: str, moment: str) -> None:
    code, output = train("max_steps=1000", "eval_steps=4", "save_steps=2", *fault(moment, "raise"), strategy=strategy)
    assert code == 1, output
    assert output.count("Traceback (most recent call last)") == 1, output
    assert output.count("ZeroDivisionError: of rank 1") == 2  # the traceback's last line, and ours
    assert output.splitlines()[-1].startswith("error: rank 1: callback fault failed in "), output
    assert "ZeroDivisionError" in RUN.rank_log(1).read_text()
    assert (ended().code, "ZeroDivisionError" in ended().reason) == (1, True)
    assert nobody_left()
    assert goes_on()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("moment", ["setup", "step", "evaluation", "save"])
def test_a_rank_that_is_killed_ends_the_run_and_is_named(strategy: str, moment: str) -> None:
    code, output = train("max_steps=1000", "eval_steps=4", "save_steps=3", *fault(moment, "kill"), strategy=strategy)
    assert code == 1, output
    message = "rank 1 was killed by SIGKILL (out of memory?); its log is run/logs/rank-1.log"
    assert output.splitlines()[-1] == f"error: {message}", output
    assert "Traceback" not in output
    assert ended().reason == message
    assert nobody_left()
    assert goes_on()


def test_a_save_that_fails_on_one_rank_is_said_and_training_goes_on() -> None:
    code, output = train("max_steps=12", "save_steps=3", *fault("save", "raise"))
    assert code == 0, output
    assert len(re.findall(r"ERROR the checkpoint of step 3 was not saved: .*rank 1.*ZeroDivisionError", output)) == 1
    assert 3 not in RUN.checkpoint_steps()
    assert 12 in RUN.checkpoint_steps()


def test_a_mistake_that_one_rank_finds_is_said_once_and_neither_restarted_nor_left_behind(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "import os, time\n"
        "from forgather_cli.errors import ModelError\n"
        "def model(vocab_size):\n"
        "    if os.environ['RANK'] == '1': raise ModelError('model: not on rank 1; bring another')\n"
        "    time.sleep(600)\n"
    )
    code, output = train("~model", "+model._target_=picky.model", "+model.vocab_size=257", "max_restarts=3")
    assert (code, output) == (2, "error: model: not on rank 1; bring another")
    assert not RUN.root.exists()


def test_a_rank_that_leaves_without_a_word_is_named() -> None:
    code, output = train("max_steps=1000", *fault("step", "exit"))
    assert code == 1, output
    assert "SystemExit: 0" in output
    assert output.splitlines()[-1] == "the log of rank 1 is run/logs/rank-1.log"
    assert nobody_left()


def test_a_rank_that_hangs_is_named_and_not_the_one_that_waits_for_it() -> None:
    code, output = train("max_steps=1000", "hang_timeout=3", *fault("step", "sleep"))
    assert code == 1, output
    assert re.search(r"error: hang_timeout passed in a collective: rank 1 stands at .*faults.py:\d+ in _now$", output)
    assert nobody_left()


def test_a_signal_that_a_rank_does_not_get_to_names_that_rank() -> None:
    with start("max_steps=1000", *fault("step", "sleep", grace=1.0)) as job:
        job.read_until("step 2/")
        while not Path("acted").exists():
            time.sleep(0.05)
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 1, job.output
    assert re.search(
        r"error: SIGTERM was not acted on within 1 s: rank 1 stands at .*faults.py:\d+ in _now$", job.output
    )
    assert nobody_left()
    assert goes_on()


def test_ranks_end_with_their_launcher() -> None:
    with start("max_steps=9999", *WATCHED) as job:
        job.read_until("step 3/")
        job.process.kill()
        assert job.finish() == -signal.SIGKILL
    assert nobody_left()
    assert goes_on()


def test_a_failed_rank_is_restarted_from_the_newest_checkpoint() -> None:
    words = ["max_steps=12", "save_steps=4", "async_save=false", "max_restarts=1", *fault("step", "raise", after=6)]
    code, output = train(*words)
    assert code == 0, output
    [line] = [line for line in output.splitlines() if line.startswith("restart ")]
    assert re.match(r"restart 1 of 1, from the newest checkpoint: rank 1: .*ZeroDivisionError: of rank 1 in step", line)
    assert "resumed from run/checkpoints/step-00000004 at step 4" in output
    assert "Traceback" not in output
    assert (ended().code, ended().step) == (0, 12)
    assert recorded_steps() == list(range(1, 13))


def test_a_port_in_use_is_said_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = train("max_steps=1", f"rdzv_endpoint=localhost:{port}")
    assert (code, output.count("\n")) == (2, 0)
    assert output.startswith(
        f"error: rdzv_endpoint: port {port} of this machine cannot be taken: Address already in use;"
    )
    assert not RUN.root.exists()

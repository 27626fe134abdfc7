"""One rank of a run fails: it ends within seconds, with one message that names the cause, and can be gone on with.

A job that restarts its ranks meets one fault after another, so that many share the start of a launcher.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from program import Process, forgather
from two_ranks import RUN, SMALL, acted, ended, fault, nobody_left, recorded_steps, start, train

CAUSES = {
    "raise": r"rank 1: callback fault failed in on_\w+: ZeroDivisionError: of rank 1 in {}",
    "kill": r"rank 1 was killed by SIGKILL \(out of memory\?\); its log is run/logs/rank-1.log",
    "exit": r"rank 1: SystemExit: 0",
    "sleep": r"hang_timeout.*: rank 1 stands at .*faults.py:\d+ in _sleep",
    "oom": r"rank 1: out of memory in step \d+, micro-batches of [24] x 16 tokens: weights .*; most likely to help: .*",
}
"""What the terminal says of an act at a moment."""
CHAINS = {
    "ddp": ("setup-raise", "forward-oom", "save-kill", "step-sleep"),
    "pipeline": ("evaluation-raise", "forward-sleep", "step-kill", "step-raise"),
    "fsdp2": ("setup-kill", "evaluation-kill", "step-exit"),
}
"""By strategy, faults that one job meets."""
EVERY = ["step-kill", "step-sleep", "setup-kill", "evaluation-kill", "save-kill", "setup-raise", "step-raise",
         "evaluation-raise", "step-exit", "forward-oom", "forward-sleep"]  # fmt: skip


def goes_on() -> bool:
    """True if the run can be finished, here by one process, and no step is missing or told twice."""
    words = ["trainer=single", "max_steps=12", "~callbacks.fault"]
    code = forgather("resume", "run", *words) if RUN.is_used() else forgather("train", *SMALL, "max_steps=12")
    return code == 0 and ended().step == 12 and recorded_steps() == list(range(1, 13))


def meeting(strategy: str, *faults: str, restarts: int, after: int = 2) -> Process:
    """A job that is to meet these faults one after another."""
    words = ["max_steps=1000", "eval_steps=4", "save_steps=2", "async_save=false", f"max_restarts={restarts}"]
    hangs = ["hang_timeout=8", "hang_report_after=8"] if any("sleep" in each for each in faults[:restarts]) else []
    return start(*words, *hangs, *fault(*faults, after=after), strategy=strategy)


def said_of(each: str) -> str:
    moment, act = each.split("-")
    return CAUSES[act].format(moment)


def assert_restarted(output: str, faults: tuple[str, ...]) -> None:
    assert [Path(f"acted-{n}").exists() for n in range(len(faults))] == [True] * len(faults)
    restarts = [line for line in output.splitlines() if line.startswith("restart ")]
    assert len(restarts) == len(faults), output
    for number, (line, each) in enumerate(zip(restarts, faults, strict=True), start=1):
        said = f"restart {number} of {len(faults)}, from the newest checkpoint: .*{said_of(each)}"
        assert re.match(said, line), (each, line)


def assert_ended(output: str, last: str) -> None:
    if RUN.checkpoint_steps():
        output, _, told = output.rpartition("\n\nto resume from step ")
        assert told.strip() == f"{RUN.checkpoint_steps()[-1]}:\nforgather resume run"
    raised = last.endswith(("raise", "exit"))
    assert output.count("Traceback (most recent call last)") == raised, output
    if last.endswith("exit"):
        line = output.splitlines()[-1]
        assert ("SystemExit: 0" in output, line) == (True, "the log of rank 1 is run/logs/rank-1.log")
    else:
        message = re.search(f"^error: {said_of(last)}$", output, flags=re.MULTILINE)
        assert message, output
        assert "Traceback" not in output[: message.start()], output
    assert re.search(said_of(last).removeprefix("rank 1: "), ended().reason)
    assert ended().code == 1
    assert not raised or "Traceback" in RUN.rank_log(1).read_text()
    assert nobody_left()
    assert goes_on()


def test_faults_are_told_and_a_second_signal_ends_what_hangs_and_damaged_checkpoints_are_passed_over() -> None:
    *before, _ = faults = CHAINS["ddp"]
    with meeting("ddp", *faults, restarts=len(before), after=6) as job:
        acted(job, len(before))
        job.process.send_signal(signal.SIGINT)
        job.read_until("SIGINT: saving after this step; a second signal ends at once")
        job.process.send_signal(signal.SIGINT)
        assert job.finish() == 130, job.output
    assert_restarted(job.output, (*before,))
    assert "Traceback" not in job.output
    assert "ended at once by SIGINT; the newest checkpoint is step 6" in job.lines
    assert job.lines[-1] == "forgather resume run"
    assert ended().state == "cut"
    assert ended().code == 130
    assert nobody_left()
    oldest, before, newest = RUN.checkpoint_steps()
    (RUN.checkpoint(newest) / "optimizer/optimizer.safetensors").unlink()
    damaged = RUN.checkpoint(before) / "model/model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with Process("resume", "run", "trainer=single") as job:
        job.read_until(rf"WARNING .*step-{newest:08d}: is damaged: optimizer/optimizer.safetensors is missing")
        job.read_until(rf"WARNING .*step-{before:08d}: is damaged: model/model.safetensors has other content")
        job.read_until(rf"resumed from run/checkpoints/step-{oldest:08d}")
        job.read_until(rf"step {newest + 1}/")
        job.process.kill()
        assert job.finish() == -signal.SIGKILL
    assert nobody_left()
    assert goes_on()


def test_faults_of_pipeline_stages_are_told_and_the_last_ends_the_run() -> None:
    *before, last = faults = CHAINS["pipeline"]
    with meeting("pipeline", *faults, restarts=len(before)) as job:
        assert job.finish() == 1, job.output
    assert_restarted(job.output, (*before,))
    assert_ended(job.output, last)


def test_faults_of_sharded_ranks_are_told_and_a_signal_to_one_stops_all() -> None:
    faults = CHAINS["fsdp2"]
    with meeting("fsdp2", *faults, restarts=len(faults)) as job:
        for _ in faults:
            job.read_until("^restart ")
        job.read_until("step 5/")
        os.kill(int(Path("pid-1").read_text()), signal.SIGUSR1)
        assert job.finish() == 75, job.output
    assert_restarted(job.output, faults)
    assert "resumed from run/checkpoints/step-0000000" in job.output
    assert "Traceback" not in job.output
    assert job.lines[-1] == "forgather resume run"
    assert ended().reason == "stopped by SIGUSR1"
    assert RUN.checkpoint_steps()[-1] == ended().step
    assert nobody_left()
    assert forgather("resume", "run", "trainer=single", f"max_steps={ended().step + 1}", "~callbacks.fault") == 0
    assert recorded_steps() == list(range(1, ended().step + 1))


def test_the_faults_of_the_chains_are_of_all_kinds() -> None:
    assert set(itertools.chain(*CHAINS.values())) | {"forward-sleep"} == set(EVERY)


@pytest.mark.full
@pytest.mark.parametrize("strategy", CHAINS)
@pytest.mark.parametrize("each", EVERY)
def test_any_fault_under_any_strategy_ends_the_run(strategy: str, each: str) -> None:
    hangs = ["hang_timeout=8", "hang_report_after=8"] if "sleep" in each else []
    words = ["max_steps=1000", "eval_steps=4", "save_steps=3", *hangs]
    code, output = train(*words, *fault(each), strategy=strategy)
    assert code == 1, output
    assert_ended(output, each)


def test_a_mistake_that_one_rank_finds_is_said_once_and_neither_restarted_nor_left_behind(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "import os, pathlib, time\n"
        "from forgather_cli.errors import ModelError\n"
        "def model(vocab_size):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        while not os.path.exists('rank-0'): time.sleep(0.02)\n"  # else gloo may tell of a connection, too
        "        raise ModelError('model: not on rank 1; bring another')\n"
        "    pathlib.Path('rank-0').touch()\n"
        "    time.sleep(600)\n"
    )
    code, output = train("~model", "+model._target_=picky.model", "+model.vocab_size=257", "max_restarts=3")
    assert (code, output) == (2, "error: model: not on rank 1; bring another")
    assert not RUN.root.exists()


def test_a_rank_that_does_not_get_to_a_signal_is_named_and_not_the_one_that_got_it_and_waits() -> None:
    """And a job that was to stop is not started again."""
    words = ["max_steps=1000", "max_restarts=1", *fault("forward-sleep", grace=1.0)]
    with start(*words, strategy="pipeline") as job:
        acted(job)
        os.kill(int(Path("pid-0").read_text()), signal.SIGTERM)
        assert job.finish() == 1, job.output
    said = r"error: SIGTERM was not acted on within 1 s: rank 1 stands at .*faults.py:\d+ in _sleep$"
    assert re.match(said, job.lines[-1]), job.output
    assert nobody_left()


def test_a_port_in_use_is_said_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = train("max_steps=1", "nnodes=2", f"rdzv_endpoint=localhost:{port}")
    assert (code, output.count("\n")) == (2, 0)
    assert output.startswith(
        f"error: rdzv_endpoint: port {port} of this machine cannot be taken: Address already in use;"
    )
    assert not RUN.root.exists()

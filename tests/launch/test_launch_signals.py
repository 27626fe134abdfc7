"""A signal saves and ends a run wherever it stands, under every strategy; and a run outlives its terminal."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from program import Process, forgather
from terminal import Terminal
from two_ranks import RUN, SMALL, acted, ended, fault, recorded_steps, train_in_pool

from forgather_cli.checkpoint.load import find_problems
from forgather_cli.checkpoint.manifest import read_manifest

PHASES = {
    "step": fault("step-stop"),
    "forward": fault("forward-stop"),
    "data wait": fault("data-stop"),
    "evaluation": [*fault("evaluation-stop"), "eval_steps=3", "per_device_eval_batch_size=1", "num_eval_samples=400"],
    "generation": [*fault("generation-stop"), "eval_steps=3", "+callbacks.textgen.prompts=[ab]"],
    "save": [*fault("save-stop"), "save_steps=3"],
    "compilation": [*fault("forward-stop", after=0), "torch_compile=true", "torch_compile_backend=eager"],
    "last step": [*fault("step-stop", after=7), "max_steps=8"],
}
"""Words of a run that gets SIGTERM at each."""
STRATEGIES = ["ddp", "pipeline", "fsdp2"]
COVERING = [(STRATEGIES[n % 3], phase, n % 2) for n, phase in enumerate(PHASES)]
EVERY = [(strategy, phase, rank) for strategy in STRATEGIES for phase in PHASES for rank in (0, 1)]


def words_of(given: list[str], rank: int) -> list[str]:
    """A long run with a fault on one rank, which saves by a signal alone unless it is given more."""
    keys = {word.partition("=")[0] for word in given}
    usual = ["max_steps=1000", "eval_steps=1000", "save_steps=1000", "num_eval_samples=8"]
    words = [word for word in [*SMALL, *usual] if word.partition("=")[0] not in keys]
    return [*words, *given, f"+callbacks.fault.rank={rank}"]


def in_pool(folder: Path, strategy: str, words: list[str]) -> list[tuple[int, str]]:
    layout = ["n_microbatches=2"] if strategy == "pipeline" else []
    return train_in_pool(folder, [*words, f"trainer={strategy}", *layout])


def assert_saved(phase: str, printed: str) -> None:
    """The run has stopped with a complete checkpoint and said how to go on; what it was at is discarded."""
    assert Path("acted-0").exists()
    step = ended().step
    checkpoint = RUN.checkpoint(step)
    assert find_problems(checkpoint, read_manifest(checkpoint), "full") == []
    assert recorded_steps() == list(range(1, step + 1))
    if phase == "last step" and ended().code == 0:  # no other step came in which the ranks could have agreed
        return
    assert (ended().code, ended().reason) == (75, "stopped by SIGTERM")
    assert printed.splitlines()[-1] == "forgather resume run"
    assert "eval_loss" not in RUN.metrics.read_text() or phase == "generation"


@pytest.mark.parametrize(
    ("strategy", "phase", "rank"), [*COVERING, *(pytest.param(*each, marks=pytest.mark.full) for each in EVERY)]
)
def test_a_signal_to_any_rank_at_any_phase_saves(strategy: str, phase: str, rank: int, tmp_path: Path) -> None:
    answers = in_pool(tmp_path, strategy, words_of(PHASES[phase], rank))
    assert [code for code, _ in answers] == [ended().code] * 2, answers[0][1]
    assert answers[1][1] == ""
    assert_saved(phase, answers[0][1])


def test_a_save_that_fails_on_one_rank_is_said_and_training_goes_on(tmp_path: Path) -> None:
    failing = [*fault("save-raise"), "save_steps=3", "max_steps=12"]
    answers = in_pool(tmp_path, "fsdp2", words_of(failing, 1))
    assert [code for code, _ in answers] == [0, 0], answers[0][1]
    log = RUN.rank_log(0).read_text()
    assert len(re.findall(r"ERROR the checkpoint of step 3 was not saved: .*rank 1.*ZeroDivisionError", log)) == 1
    assert 3 not in RUN.checkpoint_steps()
    assert 12 in RUN.checkpoint_steps()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.13's dynamo reads it itself
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # the fault, which looks at files
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_to_one_process_at_any_phase_saves(phase: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("train", *words_of(PHASES[phase], 0)) == ended().code
    assert_saved(phase, capsys.readouterr().out)


def test_a_signal_in_set_up_ends_at_once_and_a_run_with_a_checkpoint_can_go_on() -> None:
    stuck = fault("setup-sleep", rank=0)
    with Process("train", *SMALL, *stuck) as job:
        acted(job)
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 143, job.output
    assert job.lines[-1] == "ended at once by SIGTERM before the first step; there is no checkpoint"
    shutil.rmtree(RUN.root)
    assert forgather("train", *SMALL, "max_steps=2") == 0
    Path("acted-0").unlink()
    with Process("resume", "run", "max_steps=4", *stuck) as job:
        acted(job)
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 75, job.output
    assert "ended at once by SIGTERM before the first step; the newest checkpoint is step 2" in job.output
    assert job.lines[-2:] == ["to resume from step 2:", "forgather resume run"]


def test_training_that_stands_still_ends_by_hang_timeout() -> None:
    with Process("train", *SMALL, "hang_timeout=5", "hang_report_after=5", *fault("step-sleep", rank=0)) as job:
        assert job.finish() == 1, job.output
    said = r"error: hang_timeout: no progress within 5 s: rank 0 stands at .*faults.py:\d+ in _sleep$"
    [told] = [line for line in job.lines if line.startswith("error: ")]  # beside the report, which is due then too
    assert re.match(said, told), job.output
    assert f"error: {ended().reason}" == told
    assert "in on_step_begin" in job.output


LONG = [*SMALL, "max_steps=100000", "save_strategy=no"]


def assert_stopped(signum: signal.Signals) -> None:
    assert (ended().code, ended().reason) == (75, f"stopped by {signum.name}")
    assert RUN.checkpoint_steps() == [ended().step]


def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint() -> None:
    job = Terminal("train", *LONG)
    job.read_until(r"\d\.\d{4}\s[\s\S]+\d\.\d{4}\s")  # two rows of the table
    assert job.close() == 75
    assert_stopped(signal.SIGHUP)
    assert "checkpoint saved" in RUN.rank_log(0).read_text()


def test_control_c_stops_ranks_whose_output_goes_to_a_pipe_that_it_breaks() -> None:
    words = [*LONG, "trainer=ddp", "nproc_per_node=2", "per_device_train_batch_size=2"]
    job = Terminal(shell=f"FORGATHER train {' '.join(words)} 2>&1 | tee log; echo code ${{PIPESTATUS[0]}}")
    job.read_until(r"step 3/")
    job.press(b"\x03")
    assert job.finish() == 0
    assert "code 75\r\n" in job.output, job.output
    assert "Traceback" not in job.output
    assert_stopped(signal.SIGINT)


def test_under_nohup_a_run_outlives_terminal_and_pipe_and_a_burst_of_one_signal_is_one() -> None:
    nohup = (
        "import signal, sys; from forgather_cli.cli import app; from forgather_cli.launch import signals\n"
        "signals._BURST = 2.0; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # a busy machine holds this test up
        f"sys.argv = ['forgather', 'train', *{LONG!r}]; app.main()"
    )
    with Process(code=nohup) as job:
        job.read_until("step 3/")
        assert job.process.stdout is not None
        job.process.stdout.close()
        job.process.send_signal(signal.SIGHUP)
        size = RUN.metrics.stat().st_size
        job.until(lambda: RUN.metrics.stat().st_size >= 2 * size)
        for _ in range(3):  # as coreutils' timeout does, to the process and to its group
            job.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)  # else the system makes one of them
        assert job.process.wait(timeout=60) == 75
    assert_stopped(signal.SIGTERM)


@pytest.mark.parametrize(
    ("act", "state", "reason", "saved"),
    [
        ("control.should_training_stop = True", "done", "stopped by callback quits in on_step_end at step 3", [2, 3]),
        ("control.should_abort_without_save = True", "aborted",
         "aborted by callback quits in on_step_end at step 3; nothing was saved", [2]),
    ],
)  # fmt: skip
def test_exit_json_tells_what_ended_a_run_early(
    act: str, state: str, reason: str, saved: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quitting.py").write_text(
        "from forgather_cli.callbacks.base import TrainerCallback\n"
        "class Quits(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        f"        if state.global_step == 3: {act}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.delitem(sys.modules, "quitting", raising=False)
        words = ["max_steps=9", "save_steps=2", "+callbacks.quits._target_=quitting.Quits"]
        code = forgather("train", *SMALL, *words)
    assert code == (1 if state == "aborted" else 0)
    assert (ended().state, ended().code, ended().reason, ended().step) == (state, code, reason, 3)
    assert RUN.checkpoint_steps() == saved
    last = "".join(capsys.readouterr()).strip().splitlines()[-1]
    assert (last == "forgather resume run") == (state == "aborted")

"""``compose`` and ``Run``, and what they refuse. ``test_docs.py`` runs the examples in docs/."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import tiny

from forgather_cli import Run, compose
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.launch.run_lock import RunLock

SMALL = (
    "model=nano", "precision=fp32",
    "data=synthetic", "data.seq_len=16", "data.num_samples=64", "data.num_eval_samples=8", "max_steps=3",
    "global_batch_size=8", "warmup_steps=1", "logging_steps=1", "callbacks=minimal",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _here(own_directory: None) -> None: ...


def test_what_a_run_has_left_is_read() -> None:
    Path("page.md").write_text("A page of some words, again and again.\n" * 200)
    compose(
        "model=nano", "data=text", "data.files=[page.md]", "data.eval_files=[page.md]", "seq_len=64", "max_steps=20",
        "warmup_steps=2", "logging_steps=5", "eval_steps=10", "save_steps=10", "max_eval_samples=16",
        "callbacks=minimal", "output_dir=run",
    ).train()  # fmt: skip
    run, records = Run("run"), tiny.metrics(Path("run"))
    assert run.metrics == records
    table = run.table("loss", "eval_loss")
    assert [row["step"] for row in table] == [1, 5, 10, 15, 20]
    assert (table[0]["eval_loss"], table[-1]["loss"]) == (None, next(r["loss"] for r in records if r["step"] == 20))
    assert pandas.DataFrame(run.table())["tokens"].notna().all()
    assert [each.step for each in run.checkpoints] == [10, 20]
    assert run.exit.state == "done"
    texts = [run.generate("The ", checkpoint, max_new_tokens=20) for checkpoint in (10, 20, None, 20)]
    assert texts[0] != texts[1] == texts[2] == texts[3]
    assert run.generate("The ", max_new_tokens=5, temperature=0).startswith("The ")
    with pytest.raises(ConfigError, match="'eval_los'; did you mean eval_loss"):
        run.table("eval_los")
    with pytest.raises(SetupError, match=r"step 15; it has \[10, 20\]"):
        run.model(15)
    with pytest.raises(SetupError, match="give a run's directory"):
        Run("run/checkpoints")


def test_a_composed_trainer_holds_its_directory_while_it_trains_and_the_commands_take_what_it_leaves() -> None:
    trainer = compose(*SMALL, "output_dir=run")
    assert trainer.evaluate()["eval_loss"] > 0
    assert not Path("run").exists()  # who only evaluates leaves no trace
    with contextlib.ExitStack() as held:
        held.enter_context(RunLock(Path("run")))
        lock = subprocess.run(
            [sys.executable, "-c", "from forgather_cli.launch.run_lock import *; RunLock(Path('run'))"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert "is being written by another job" in lock.stderr
    trainer.train()
    assert Run("run").exit is not None
    assert compose("run", "max_steps=2", "output_dir=again").train().global_step == 2  # as forgather train RUN
    with pytest.raises(SetupError, match="already holds a run"):
        compose(*SMALL, "output_dir=run").train()
    resumed = compose(*SMALL, "output_dir=run", "max_steps=5")
    assert resumed.train(resume_from_checkpoint=True).global_step == 5
    assert Path("run/config.1.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trainer=ddp",), "forgather train trainer=ddp"),
        (("auto_find_batch_size=true",), "auto_find_batch_size"),
        (("learning_rte=1",), "did you mean learning_rate"),
    ],
)
def test_what_is_refused_names_the_setting(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose(*SMALL, *words)


def test_importing_the_package_costs_no_torch() -> None:
    code = "import sys, forgather_cli; forgather_cli.compose, forgather_cli.Run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

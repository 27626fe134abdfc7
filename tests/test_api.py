"""``compose`` and ``Run``, and what they refuse. ``test_docs.py`` runs the examples in docs/."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import program
import pytest
import tiny

import forgather_cli
from forgather_cli import Run, compose
from forgather_cli.config.paths import members
from forgather_cli.config.schema import LossOption, OptimizerOption, TrainerOption
from forgather_cli.errors import ConfigError, SetupError

SMALL = (*program.SMALL, "max_steps=3")


@pytest.fixture(autouse=True)
def _here(own_directory: None) -> None: ...


def test_what_a_run_has_left_is_read() -> None:
    Path("page.md").write_text("A page of some words, again and again.\n" * 200)
    compose(
        "model=nano", "data=text", "data.files=[page.md]", "data.eval_files=[page.md]", "seq_len=64", "max_steps=20",
        "warmup_steps=2", "logging_steps=5", "eval_steps=10", "save_steps=10", "max_eval_samples=16",
        "callbacks=minimal", "output_dir=run", "tokenizer=bytes",
    ).train()  # fmt: skip
    run, records = Run("run"), tiny.metrics(Path("run"))
    assert run.metrics == records
    table = run.table("loss", "eval_loss")
    assert [row["step"] for row in table] == [1, 5, 10, 15, 20]
    assert (table[0]["eval_loss"], table[-1]["loss"]) == (None, next(r["loss"] for r in records if r["step"] == 20))
    pandas = pytest.importorskip("pandas")  # not where every process collects this
    frame = pandas.DataFrame(run.table())
    assert frame["tokens"].notna().all()
    assert not {"train_runtime", "train_loss", "flops_per_second"} & {*frame}, "totals of the end are of no step"
    assert frame["total_tokens"].tolist() == [r["total_tokens"] for r in records if "loss" in r]
    with pytest.raises(ConfigError, match=r"train_runtime is a total of the whole run; run\.metrics"):
        run.table("loss", "train_runtime")
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


def test_what_a_composed_trainer_leaves_is_gone_on_with() -> None:
    trainer = compose(*SMALL, "output_dir=run")
    assert trainer.evaluate()["eval_loss"] > 0
    assert not Path("run").exists()  # who only evaluates leaves no trace
    trainer.train()
    assert Run("run").exit is not None
    assert compose("run", "max_steps=2", "output_dir=again").train().global_step == 2  # as forgather train RUN
    with pytest.raises(SetupError, match="already holds a run"):
        compose(*SMALL, "output_dir=run").train()
    resumed = compose(*SMALL, "output_dir=run", "max_steps=5")
    assert resumed.train(resume_from_checkpoint=True).global_step == 5
    assert Path("run/config.1.yaml").exists()


@pytest.mark.parametrize(
    ("words", "named", "said"),
    [
        ((*SMALL, "trainer=ddp"), {}, "forgather train trainer=ddp"),
        ((*SMALL, "auto_find_batch_size=true"), {}, "auto_find_batch_size"),
        (({"model": "nano"},), {}, r'got a dict.*compose\("default", "model=nano"\)'),
        (("default", {"model": "nano"}), {}, r'got a dict.*"model=nano"'),
        ((["model=nano", "max_steps=1"],), {}, r"got a list.*\*"),
        ((None,), {}, "got None"),
        ((), {"model": "nano", "max_steps": 1}, r'model: .*"model=nano", "max_steps=1"'),
        ((), {"config_dir": ["conf"]}, "config_dir: got a list"),
    ],
)
def test_what_is_refused_says_what_to_write(words: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose(*words, **named)


def test_the_settings_of_every_option_that_a_script_may_give_are_offered() -> None:
    for union in (OptimizerOption, LossOption, TrainerOption):
        names = {option.__name__ for option in members(union)}
        assert names
        assert names <= set(forgather_cli.__all__)


def test_threads_compose_side_by_side() -> None:
    choices = [f"optimizer={name}" for name in ("adamw", "sgd", "muon", "adafactor")]
    choices += [f"lr_scheduler={name}" for name in ("constant", "cosine", "wsd", "infinite")]

    def one(n: int) -> int:
        return compose(*SMALL, choices[n], f"max_steps={n + 1}", f"output_dir=run{n}").args.max_steps

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(one, range(8))) == list(range(1, 9))
    finally:
        sys.setswitchinterval(interval)


def test_relative_paths_are_those_of_the_directory_it_was_composed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Path("there").resolve()
    there.mkdir()
    Path("page.jsonl").write_text('{"text": "A page of some words, again and again, and again."}\n' * 400)
    small = ("model=nano", "seq_len=32", "global_batch_size=8", "max_steps=2", "warmup_steps=1", "callbacks=minimal")
    data = ("data=hf", "data.data_files=[page.jsonl]")
    compose(*small, *data, "output_dir=first").train()
    saved = "first/checkpoints/step-00000002"
    here = Path.cwd()
    trainers = {
        "text": compose(*small, *data, "output_dir=text", "logging_dir=logs", "dataloader_num_workers=1"),
        "stream": compose(*small, *data, "data.streaming=true", "output_dir=stream", "eval_strategy=no"),
        "more": compose(*small, *data, "output_dir=more", "max_steps=3", f"resume_from_checkpoint={saved}"),
    }
    monkeypatch.chdir(there)
    for name, trainer in trainers.items():
        trainer.train()
        run = Run(here / name)
        assert run.exit is not None
        assert run.checkpoints
        assert run.config["output_dir"] == str(here / name)
    assert trainers["more"].state.global_step == 3
    assert (here / "logs").exists()
    assert list(there.iterdir()) == []

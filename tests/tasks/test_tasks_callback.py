"""callbacks.tasks: what it adds and when, that training does not notice, failures, kills and stops."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from own_tasks import write_tasks
from program import Process, document, refusal, shown
from ranks import run_ranks
from safetensors.torch import load_file
from users_tasks import write_failing

from forgather_cli.checkpoint.load import Reader
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.errors import CallbackError
from forgather_cli.run_dir import RunDir

STRATEGIES = {
    "single": (1, ["trainer=single"]), "ddp": (2, ["trainer=ddp"]),
    "fsdp2": (2, ["trainer=fsdp2"]), "pipeline": (2, ["trainer=pipeline", "n_microbatches=4"]),
}  # fmt: skip
MODEL = [
    "model=nano", "precision=fp32", "model.hidden_size=32", "model.intermediate_size=64", "model.num_key_value_heads=1",
    "model.attention_dropout=0.1", "model.residual_dropout=0.1", "data=synthetic", "data.tokenizer=bytes",
    "data.seq_len=64", "data.num_samples=64", "data.num_eval_samples=8", "global_batch_size=8", "max_steps=4",
    "callbacks=minimal", "logging_steps=1", "warmup_steps=1", "save_steps=2", "async_save=false",
    "deterministic=true", "device=cpu",
]  # fmt: skip
NAMES = ("mine_choice", "mine_rolling", "mine_until")
METRICS = {
    "tasks/mine_choice/acc", "tasks/mine_choice/acc_norm", "tasks/mine_rolling/word_perplexity",
    "tasks/mine_rolling/bits_per_byte", "tasks/mine_until/letters",
}  # fmt: skip
WATCH = "+callbacks.watch._target_=users_tasks.Watch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_tasks(tmp_path_factory.mktemp("tasks") / "mine", 6)
    write_failing(found)
    return found


def asked(folder: Path, *names: str, **settings: object) -> str:
    """The word that adds the callback."""
    given = {"tasks": f"[{','.join(names or NAMES)}]", "tasks_dir": folder, "limit": 5, **settings}
    return f"+callbacks.tasks={{{', '.join(f'{name}: {value}' for name, value in given.items())}}}"


def config(path: Path, *words: str) -> Config:
    evaluates = [] if "eval_strategy=no" in words else ["eval_steps=2"]
    return load_config(None, [*MODEL, WATCH, f"output_dir={path}", *evaluates, *words]).config


def on_a_rank(settings: Config, path: Path, fails: str = "") -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAILS", fails)
        trainer = tiny.train(settings, RunDir(path))
    notes: list[str] = trainer.callbacks.by_name["watch"].notes
    return notes


@dataclass(frozen=True)
class Run:
    path: Path
    notes: list[list[str]]
    """Of each rank, what training goes on from."""

    def tensors(self, step: int = 4) -> dict[str, torch.Tensor]:
        """Weights, moments and random states."""
        root = RunDir(self.path).checkpoint(step)
        files = sorted(root.rglob("*.safetensors"))
        return {f"{file.relative_to(root)} {name}": t for file in files for name, t in load_file(file).items()}

    def reports(self, file: str = "tasks.jsonl") -> list[dict[str, Any]]:
        """What tasks have measured, with the steps."""
        found = [{**each, **each.get("metrics", {})} for each in tiny.metrics(self.path, file)]
        kept = [{k: v for k, v in each.items() if k == "step" or k.startswith("tasks/")} for each in found]
        return [each for each in kept if len(each) > 1]


def train(strategy: str, path: Path, *words: str, fails: str = "") -> Run:
    ranks, layout = STRATEGIES[strategy]
    given = (config(path, *layout, *words), path, fails)
    return Run(path, [on_a_rank(*given)] if ranks == 1 else run_ranks(ranks, on_a_rank, *given))


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """A run under a strategy, with tasks or without them, trained once."""

    @functools.cache
    def of(strategy: str, *, with_tasks: bool = True) -> Run:
        words = [asked(folder)] if with_tasks else []
        return train(strategy, tmp_path_factory.mktemp(strategy) / "run", *words)

    return of


each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def differing(one: Run, other: Run) -> set[str]:
    """In what two runs differ."""
    assert one.tensors().keys() == other.tensors().keys()
    found = {name for name, tensor in one.tensors().items() if not torch.equal(tensor, other.tensors()[name])}
    found |= {"curve"} if tiny.training_curve(one.path) != tiny.training_curve(other.path) else set()
    losses = [[r["eval_loss"] for r in tiny.metrics(each.path) if "eval_loss" in r] for each in (one, other)]
    found |= {"evaluations"} if losses[0] != losses[1] else set()
    return found | ({"generators or modes"} if one.notes != other.notes else set())


@pytest.mark.usefixtures("one_thread")
@each_strategy
def test_training_does_not_notice(runs: Callable[..., Run], strategy: str) -> None:
    with_tasks, without = runs(strategy), runs(strategy, with_tasks=False)
    assert len(with_tasks.notes[0]) == 6
    assert len(with_tasks.tensors()) > 10
    assert not differing(with_tasks, without)


@pytest.mark.usefixtures("one_thread")
def test_what_training_would_notice_is_found(runs: Callable[..., Run], tmp_path: Path) -> None:
    plain = runs("single", with_tasks=False)
    draws = "+callbacks.bad._target_=users_tasks.Draws"
    for kind, wanted in {"python": set(), "modes": {"curve"}}.items():
        run = train("single", tmp_path / kind, draws, f"+callbacks.bad.kind={kind}", "save_steps=4")
        assert {"generators or modes", *wanted} <= differing(run, plain)


@pytest.mark.usefixtures("one_thread")
@each_strategy
def test_each_evaluation_has_them(runs: Callable[..., Run], strategy: str) -> None:
    run = runs(strategy)
    assert [each["step"] for each in run.reports()] == [2, 4]
    assert all({*each} == {"step", *METRICS} for each in run.reports())
    in_log = [record for record in tiny.metrics(run.path) if "eval_loss" in record]
    assert [{k: record[k] for k in ("step", *METRICS)} for record in in_log] == run.reports()
    assert run.reports("metrics.jsonl") == run.reports()
    assert {*Reader(RunDir(run.path).checkpoint(4)).manifest.metrics} > METRICS


@pytest.mark.usefixtures("one_thread")
@each_strategy
def test_they_are_what_forgather_eval_says_of_the_checkpoint_on_one_device(
    runs: Callable[..., Run], strategy: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs(strategy)
    words = ["--tasks", ",".join(NAMES), "--tasks-dir", str(folder), "--limit", "5"]
    found = document(capsys, "eval", str(RunDir(run.path).checkpoint(4)), *words)["metrics"]
    newest = {k: v for k, v in run.reports()[-1].items() if k != "step"}
    assert newest == pytest.approx({k: v for k, v in found.items() if "stderr" not in k}, rel=1e-5)


def test_logs_and_curves_have_them(runs: Callable[..., Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = runs("single")
    newest = run.reports()[-1]
    (summary,) = document(capsys, "logs", "summary", str(run.path))
    assert summary["tasks"] == {k: v for k, v in newest.items() if k != "step"}
    assert f"tasks: tasks/mine_choice/acc {newest['tasks/mine_choice/acc']:.4g}, " in shown(
        capsys, "logs", "summary", str(run.path)
    )


@pytest.mark.usefixtures("one_thread")
def test_the_best_model_is_found_by_a_task(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An evaluation comes before each save that has none; what is shown has it, and a curve in TensorBoard."""
    metric = "tasks/mine_rolling/bits_per_byte"
    words = [
        asked(folder, "mine_rolling"), "load_best_model_at_end=true", f"metric_for_best_model={metric}", "max_steps=3",
        "save_steps=1", "eval_steps=3", "greater_is_better=true", "+callbacks.tensorboard={}",
    ]  # fmt: skip
    run = train("single", tmp_path / "run", *words)
    reports = run.reports()
    assert [each["step"] for each in reports] == [1, 2, 3]
    manifest = Reader(RunDir(run.path).checkpoint(3)).state("trainer")
    best = max(reports, key=lambda each: each[metric])
    assert (manifest["best_metric"], manifest["best_global_step"]) == (best[metric], best["step"])
    assert f"{metric} {best[metric]:.4g}" in capfd.readouterr().out
    curve = tiny.tensorboard(run.path / "tensorboard").Scalars(metric)
    assert {event.step: event.value for event in curve} == pytest.approx({r["step"]: r[metric] for r in reports})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_every_so_many_steps_without_evaluations(folder: Path, tmp_path: Path, strategy: str) -> None:
    run = train(strategy, tmp_path / "run", asked(folder, "mine_choice", every=3), "eval_strategy=no", "max_steps=7")
    assert [each["step"] for each in run.reports()] == [3, 6]
    assert run.reports("metrics.jsonl") == run.reports()
    (final,) = [record for record in tiny.metrics(run.path) if "train_runtime" in record]
    assert final["evaluation_seconds"] > 0


@pytest.mark.usefixtures("one_thread")
def test_an_evaluation_at_such_a_step_has_them_too(folder: Path, tmp_path: Path) -> None:
    run = train("single", tmp_path / "run", asked(folder, "mine_choice", every=4), "max_steps=8")
    assert [each["step"] for each in run.reports()] == [4, 8]
    evaluated = {r["step"]: "tasks/mine_choice/acc" in r for r in tiny.metrics(run.path) if "eval_loss" in r}
    assert evaluated == {2: False, 4: True, 6: False, 8: True}


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("strategy", "fails"), [("single", "0"), ("ddp", "0,1"), ("fsdp2", "1"), ("pipeline", "0")])
def test_a_failure_is_said_once_and_counted_and_training_goes_on(
    folder: Path, tmp_path: Path, strategy: str, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On all ranks, and on one of them while the others have not failed."""
    best = ["metric_for_best_model=tasks/failing/acc", "greater_is_better=true", "load_best_model_at_end=true"]
    run = train(strategy, tmp_path / "run", asked(folder, "failing"), *best, fails=fails)
    lines = tiny.metrics(run.path, "tasks.jsonl")
    assert [(line["step"], line["metrics"]["tasks/failures"]) for line in lines] == [(2, 1), (4, 2)]
    assert all("ZeroDivisionError: of the task's own code" in line["failure"] for line in lines)
    assert [r["tasks/failures"] for r in tiny.metrics(run.path) if "eval_loss" in r] == [1, 2]
    assert Reader(RunDir(run.path).checkpoint(4)).state("callbacks")["tasks"] == {"failures": 2}
    if strategy == "single":
        (said,) = [r.message for r in caplog.records if "failed" in r.message]
        assert said.startswith("tasks failed at step 2 (tasks failing: cannot be run (ZeroDivisionError: of the task's")


@pytest.mark.usefixtures("one_thread")
def test_a_rank_whose_model_fails_alone_keeps_nobody_waiting(folder: Path, tmp_path: Path) -> None:
    run = train("ddp", tmp_path / "run", asked(folder), "+callbacks.alone._target_=users_tasks.Alone")
    lines = tiny.metrics(run.path, "tasks.jsonl")
    assert ["rank 1: OutOfMemoryError: of one rank" in line["failure"] for line in lines] == [True, True]


@pytest.mark.usefixtures("one_thread")
def test_a_failure_ends_the_run_where_that_is_asked(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CallbackError, match="callback tasks failed in on_evaluate: tasks failing: cannot"):
        train("single", tmp_path / "run", asked(folder, "failing", on_failure="error"), fails="0")


# ------------------------------------------------------------------------------------------------------ kills and stops


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("moment", ["inside", "behind"])
def test_a_killed_run_resumes_bit_by_bit_with_each_report_once(
    runs: Callable[..., Run], strategy: str, moment: str
) -> None:
    """Killed while tasks are run, and once their report is written, before the checkpoint of that step."""
    whole, (ranks, layout) = runs(strategy), STRATEGIES[strategy]
    fault = ["+callbacks.kills._target_=users_tasks.Kills", "+callbacks.kills.step=4"]
    if moment == "inside":  # where the generators' states are looked at
        fault = ["+callbacks.fault._target_=faults.Fault", "+callbacks.fault.faults=[save-kill]",
                 f"+callbacks.fault.rank={ranks - 1}", "+callbacks.fault.after=3"]  # fmt: skip
    write_tasks(Path("mine"), 6)
    words = [*MODEL, "eval_steps=2", WATCH, *layout, asked(Path("mine")), *fault, "output_dir=run"]
    words += [f"nproc_per_node={ranks}"] if ranks > 1 else []
    with Process("train", *words) as job:
        assert job.finish() != 0, job.output
    assert RunDir(Path("run")).checkpoint_steps() == [2], job.output
    with Process("resume", "run") as job:
        assert job.finish() == 0, job.output
    run = Run(Path("run"), whole.notes)
    assert run.reports() == whole.reports()
    assert run.reports("metrics.jsonl") == whole.reports("metrics.jsonl")
    assert not differing(run, whole)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("every", ["null", "2"])
def test_a_stop_is_heard_in_the_middle_and_the_report_discarded(folder: Path, tmp_path: Path, every: str) -> None:
    """A run of several batches is stopped in the first of them, and what was measured by then is no report."""
    words = [asked(folder, every=every), "+callbacks.stops._target_=users_tasks.Stops", "per_device_eval_batch_size=1"]
    run = train("single", tmp_path / "run", *words)
    assert not run.reports("metrics.jsonl")
    assert not (run.path / "tasks.jsonl").exists()
    assert RunDir(run.path).checkpoint_steps() == [2]
    assert int((run.path / "asked").read_text()) <= 2  # a beginning, and what follows


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize(
    ("names", "words", "said"),
    [
        (NAMES, ["eval_strategy=no"], r"callbacks.tasks: .*eval_strategy=steps, set callbacks.tasks.every=100"),
        pytest.param(
            ["mine_chioce"], [], r"callbacks.tasks.tasks: lm-eval has no task 'mine_chioce'.*mine_choice",
            marks=pytest.mark.full,  # lm-eval looks at all that it has
        ),
        (NAMES, ["callbacks.tasks.tasks=[]"], "callbacks.tasks.tasks: is empty; name some"),
        (
            NAMES,
            ["callbacks.tasks=null", "metric_for_best_model=tasks/mine_choice/acc"],
            "no evaluation has tasks/mine",
        ),
        (
            NAMES,
            ["metric_for_best_model=tasks/mine_choice/accuracy"],
            "step 1 has no tasks/mine_choice/accuracy; set it",
        ),
        (
            NAMES,
            ["callbacks.tasks.apply_chat_template=true"],
            "apply_chat_template: needs a template; set data.chat_template",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], names: list[str], words: list[str], said: str
) -> None:
    evaluates = [] if "eval_strategy=no" in words else ["eval_steps=1"]
    error = refusal(capsys, "train", *MODEL, *evaluates, "output_dir=run", asked(folder, *names), *words)
    assert re.search(said, " ".join(error.split())), error


@pytest.mark.usefixtures("own_directory")
def test_without_lm_eval_the_message_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    error = refusal(capsys, "train", *MODEL, "output_dir=run", asked(folder))
    assert error == "error: callbacks.tasks=tasks: needs the package lm_eval; pip install 'forgather[tasks]'\n"
    assert not any(Path().iterdir())

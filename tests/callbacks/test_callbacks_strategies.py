"""Every callback under every strategy: what each leaves, and users' own, sound and broken."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import own_tasks
import pytest
import tiny
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from users_callbacks import EveryEvent

from forgather_cli.callbacks.base import EVENTS
from forgather_cli.checkpoint.load import Reader
from forgather_cli.config.schema import CallbackPart, Config
from forgather_cli.control import registry
from forgather_cli.errors import CallbackError
from forgather_cli.run_dir import RunDir

STRATEGIES = {
    "single": (1, ["trainer=single"]), "ddp": (2, ["trainer=ddp"]),
    "pipeline": (2, ["trainer=pipeline", "n_microbatches=4"]), "fsdp2": (2, ["trainer=fsdp2"]),
}  # fmt: skip

FULL = [
    "max_steps=8", "logging_steps=2", "eval_steps=4", "save_steps=4", "warmup_steps=2", "async_save=false",
    "callbacks.textgen.max_new_tokens=6", "callbacks.textgen.do_sample=false", "callbacks.profiler.start_step=2",
    "callbacks.profiler.num_steps=2", "callbacks.peak_memory.do_log=true",
    "+callbacks.seen._target_=test_callbacks_strategies.Seen",
]  # fmt: skip
MORE = ["max_steps=20", "callbacks.early_stopping.patience=1", "callbacks.early_stopping.threshold=100"]
LOGGED, EVALUATED = [1, 2, 4, 6, 8, 10, 12], [4, 8, 12]
"""Steps of a run that ``MORE`` ends."""


RARE = {"on_predict", "on_exception", "on_divergence", "on_rollback"}
"""Events that a sound training has none of."""


class Seen(EveryEvent):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.jobs: set[int] = set()

    def happens(self, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        self.events.append((event, state.global_step))
        if event == "on_step_end" and state.is_world_process_zero:
            run = str(kwargs["trainer"].run_dir.root.resolve())
            self.jobs.add(sum(entry.run_dir == run for entry in registry.running()))


@dataclass(frozen=True)
class Run:
    """``told``: by the callback ``name`` of each rank, with what the rank has ``printed``, and its ``outer`` loop.
    ``records``: by file, at the end of training."""

    path: Path
    told: list[Any]
    records: dict[str, list[dict[str, Any]]]

    def steps(self, key: str, file: str = "metrics.jsonl") -> list[int]:
        """Of the records that have ``key``."""
        return [record["step"] for record in self.records[file] if key in record]

    def state(self, name: str) -> Any:
        """Of a callback, in the last checkpoint."""
        return Reader(RunDir(self.path).checkpoint(12)).state("callbacks")[name]


@dataclass(frozen=True)
class Row:
    """What a callback is known by: ``holds`` of a run that has it, after 8 steps is gone on with, and ends after 12.
    ``words``: overrides that give it to ``callbacks=full``."""

    holds: Callable[[Run], object]
    words: tuple[str, ...] = ()


def of_tensorboard(folder: Path) -> list[int]:
    return sorted({event.step for event in tiny.tensorboard(folder).Scalars("train/loss")})


def profiles(run: Run) -> set[str]:
    return {file.name for file in (run.path / "profile").glob("*.txt")}


FOLDER = tempfile.TemporaryDirectory()
"""Of tasks."""
own_tasks.write_tasks(Path(FOLDER.name))
ROWS = {
    "metrics": Row(lambda run: run.steps("tok_per_sec")[-1] == 12),
    "weight_norm": Row(lambda run: run.steps("weight_norm") == LOGGED),
    "peak_memory": Row(lambda run: run.steps(f"peak_mem_rank_{len(run.told) - 1}") == LOGGED),
    "info": Row(lambda run: " parameters\n" in run.told[0]["printed"]),
    "progress": Row(lambda run: "step 12/20 " in run.told[0]["printed"]),
    "json": Row(lambda run: run.steps("loss") == LOGGED),
    "tensorboard": Row(lambda run: of_tensorboard(run.path / "tensorboard") == LOGGED),
    "grad_norms": Row(lambda run: run.steps("norms", "gradient_norms.jsonl") == EVALUATED),
    "parameter_norms": Row(lambda run: run.steps("spectral_norms", "parameter_norms.jsonl") == EVALUATED),
    "trackers": Row(
        lambda run: of_tensorboard(run.path / "trackers/p") == LOGGED,
        ("+callbacks.trackers.names=[tensorboard]", "+callbacks.trackers.project=p"),
    ),
    "textgen": Row(lambda run: (run.path / "samples.txt").read_text().count("=== step ") == 3),
    "diloco": Row(lambda run: run.told[0]["outer"] is None),  # without a server it does nothing; tests/diloco
    "control": Row(lambda run: run.told[0]["jobs"] == {1}),
    "divergence": Row(lambda run: run.state("divergence")["seen"] == len(LOGGED)),
    "early_stopping": Row(lambda run: run.told[0]["events"][-1] == ("on_train_end", 12)),
    "tasks": Row(
        lambda run: run.steps("samples", "tasks.jsonl") == run.steps("tasks/mine_rolling/bits_per_byte") == EVALUATED,
        (f"+callbacks.tasks={{tasks: [mine_rolling], tasks_dir: {FOLDER.name}, limit: 2}}",),
    ),
    "profiler": Row(lambda run: {f"rank-{len(run.told) - 1}-steps-{n}.txt" for n in ("3-4", "11-12")} <= profiles(run)),
}


def everything() -> list[str]:
    return [*FULL, *(word for row in ROWS.values() for word in row.words)]


def on_a_rank(config: Config, path: Path, home: Path, name: str) -> Any:
    """Train, in a config home of its own; returns what the callback ``name`` keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(home))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer = tiny.train(config, RunDir(path))
    seen = vars(trainer.callbacks.by_name[name])
    return {**seen, "printed": printed.getvalue(), "outer": trainer.run.outer}


def train(strategy: str, path: Path, name: str, *overrides: str, callbacks: str = "minimal") -> Run:
    ranks, words = STRATEGIES[strategy]
    config = tiny.config(path, *words, *overrides, callbacks=callbacks)
    given = (config, path, path.with_name("home"), name)
    told = [on_a_rank(*given)] if ranks == 1 else run_ranks(ranks, on_a_rank, *given)
    return Run(path, told, {file.name: tiny.metrics(path, file.name) for file in path.glob("*.jsonl")})


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """A run of 8 steps with callbacks=full under a strategy, trained once."""

    @functools.cache
    def of(strategy: str) -> Run:
        return train(strategy, tmp_path_factory.mktemp(strategy) / "run", "seen", *everything(), callbacks="full")

    return of


@pytest.fixture(scope="module")
def resumed(full: Callable[[str], Run]) -> Callable[[str], Run]:
    """The same run, gone on with until early stopping ends it."""

    @functools.cache
    def of(strategy: str) -> Run:
        words = [*everything(), *MORE, "resume_from_checkpoint=true"]
        return train(strategy, full(strategy).path, "seen", *words, callbacks="full")

    return of


each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@each_strategy
def test_every_callback_leaves_on_every_layout_what_it_leaves_on_one_device(
    full: Callable[[str], Run], strategy: str
) -> None:
    run, single, ranks = full(strategy), full("single"), STRATEGIES[strategy][0]
    assert sorted(run.records) == ["gradient_norms.jsonl", "metrics.jsonl", "parameter_norms.jsonl", "tasks.jsonl"]
    profiles = {f"rank-{rank}-steps-3-4.{end}" for rank in range(ranks) for end in ("trace.json", "txt")}
    assert profiles <= {file.name for file in (run.path / "profile").iterdir()}
    mine, theirs = ((each.path / "samples.txt").read_text() for each in (run, single))
    assert mine.split("=== step 12")[0] == theirs.split("=== step 12")[0]
    assert mine.startswith("=== step 4 ===\n--- 1 ---\n")
    assert mine.count("=== step ") >= 2
    assert {4, 8} <= set(RunDir(run.path).checkpoint_steps())
    assert not list(run.path.rglob("*.tmp"))
    assert run.told[0]["jobs"] == {1}  # it could be controlled while it ran, and is in nobody's way now
    assert not list(run.path.with_name("home").rglob("endpoint.json"))
    wanted = [event for event in single.told[0]["events"] if event[0] != "on_save"]
    assert {event for event, _ in wanted} == set(EVENTS) - RARE - {"on_save"}
    for told in run.told:
        assert [event for event in told["events"] if event[0] != "on_save"] == wanted
        assert len([event for event in told["events"] if event[0] == "on_save"]) == 2


def test_tensorboard_has_the_curves_of_the_records(full: Callable[[str], Run]) -> None:
    run = full("pipeline")
    events = tiny.tensorboard(run.path / "tensorboard")
    for tag, key in {"train/loss": "loss", "eval/loss": "eval_loss", "train/weight_norm": "weight_norm"}.items():
        wanted = {record["step"]: record[key] for record in run.records["metrics.jsonl"] if key in record}
        shown = {event.step: event.value for event in events.Scalars(tag) if event.step <= 8}
        assert shown == pytest.approx(wanted, rel=1e-6)
    texts = {"config/text_summary", "training info/text_summary", "samples/1/text_summary"}
    assert texts <= set(events.Tags()["tensors"])


@each_strategy
def test_records_are_those_of_one_device(full: Callable[[str], Run], strategy: str) -> None:
    found, wanted = (full(each).records["metrics.jsonl"] for each in (strategy, "single"))
    assert [record["step"] for record in found] == [1, 2, 4, 4, 6, 8, 8, 8]
    for mine, theirs in zip(found, wanted, strict=True):
        assert without_ranks(mine) == without_ranks(theirs)
        for key in ("loss", "grad_norm", "max_grad_norm", "learning_rate", "eval_loss", "weight_norm", "train_loss"):
            assert mine.get(key, 0.0) == pytest.approx(theirs.get(key, 0.0), rel=1e-5), (mine["step"], key)
        equal = ("tokens", "targets", "total_tokens", "total_targets", "total_flos", "epoch", "eval_tokens",
                 "eval_targets", "effective_batch_size")  # fmt: skip
        for key in equal:
            assert mine.get(key) == theirs.get(key), (mine["step"], key)
    peaks = {key for record in found for key in record if re.fullmatch(r"peak_mem_rank_\d", key)}
    assert peaks == {f"peak_mem_rank_{rank}" for rank in range(STRATEGIES[strategy][0])}


def without_ranks(record: dict[str, Any]) -> set[str]:
    """The names in a record, but for those of one rank, and the time in which ranks wait for others."""
    return {key for key in record if "_rank" not in key and key != "sync_seconds"}


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
def test_a_resumed_run_goes_on_and_early_stopping_ends_it(
    full: Callable[[str], Run], resumed: Callable[[str], Run], strategy: str
) -> None:
    old, run = full(strategy).records, resumed(strategy)
    for told in run.told:
        assert told["events"][-1] == ("on_train_end", 12)
    records = run.records["metrics.jsonl"]
    assert records[: len(old["metrics.jsonl"]) - 1] == old["metrics.jsonl"][:-1]
    assert [record["step"] for record in records if "eval_loss" in record] == [4, 8, 12]
    for file in ("gradient_norms.jsonl", "parameter_norms.jsonl"):
        assert [record["step"] for record in run.records[file]] == [4, 8, 12]
    names = {file.name for file in (run.path / "profile").glob("*.txt")}
    assert names == {f"rank-{rank}-steps-{steps}.txt" for rank in range(len(run.told)) for steps in ("3-4", "11-12")}
    assert (run.path / "samples.txt").read_text().count("=== step ") == 3
    assert RunDir(run.path).checkpoint_steps() == [4, 8, 12]


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
@pytest.mark.parametrize("name", [part.type for part in CallbackPart.members])
def test_each_leaves_what_its_row_says(resumed: Callable[[str], Run], name: str, strategy: str) -> None:
    assert name in ROWS, f"callbacks.{name} has no row in ROWS, which says what a run with it leaves"
    assert ROWS[name].holds(resumed(strategy))


def test_callbacks_for_the_hugging_face_trainer_run_unchanged(tmp_path: Path) -> None:
    """On one device, and on ranks that agree: the loop's flags and metrics are what such callbacks live by."""
    words = [
        "+callbacks.stop._target_=transformers.EarlyStoppingCallback", "+callbacks.stop.early_stopping_patience=2",
        "+callbacks.stop.early_stopping_threshold=100", "+callbacks.print._target_=transformers.PrinterCallback",
        "+callbacks.flow._target_=transformers.DefaultFlowCallback",
        "+callbacks.mine._target_=hf_callback.ForHuggingFace", "max_steps=20", "logging_steps=2", "eval_steps=4",
        "save_steps=4", "save_total_limit=10", "load_best_model_at_end=true", "async_save=false",
    ]  # fmt: skip
    single, several = (train(each, tmp_path / each / "run", "mine", *words) for each in ("single", "pipeline"))
    wanted = [note for note in single.told[0]["notes"] if note != ("save",)]
    for told in [*single.told, *several.told]:
        notes = told["notes"]
        assert [note[1] for note in notes if note[0] == "log"] == [1, 2, 4, 6, 8]
        assert [note[1] for note in notes if note[0] == "evaluate"] == [3, 4, 8]
        assert notes[0] == ("begin", 20, 2, 8)
        assert notes[-1] == ("end", 8, True)  # the first evaluation is the best so far, two more are no better
        assert notes.count(("save",)) == 3
        for mine, theirs in zip([note for note in notes if note != ("save",)], wanted, strict=True):
            assert mine[:2] == theirs[:2]
            assert mine[2:] == pytest.approx(theirs[2:], rel=1e-5)
    best = [note[3] for note in wanted if note[0] == "evaluate"]
    assert [value > 0 for value in best] == [False, True, True]  # as there, of the evaluations before
    assert [RunDir(run.path).checkpoint_steps() for run in (single, several)] == [[3, 4, 8]] * 2


SHORT = ["max_steps=6", "logging_steps=1", "eval_steps=2", "save_steps=2", "async_save=false", "deterministic=true"]
BEFORE_ANY_STEP = ["on_init_end", "on_train_begin", "on_epoch_begin"]
AT_THE_END = ["on_epoch_end", "on_train_end"]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(RunDir(path).checkpoint(6) / "model/model.safetensors")


@pytest.mark.usefixtures("one_thread")
def test_one_that_raises_is_named_with_its_event_and_the_run_can_go_on(tmp_path: Path) -> None:
    """In one event after another: each start goes on from what the one before has left."""
    run, bad = RunDir(tmp_path / "run"), "+callbacks.bad._target_=users_callbacks.Raises"
    between = [event for event in EVENTS if event not in {*RARE, *BEFORE_ANY_STEP, *AT_THE_END}]
    assert len(between) > 8
    for event in (*BEFORE_ANY_STEP, *between, *AT_THE_END):
        step = 0 if event in BEFORE_ANY_STEP else 3
        words = [*SHORT, bad, f"+callbacks.bad.event={event}", f"+callbacks.bad.step={step}"]
        message = f"^callback bad failed in {event}: ZeroDivisionError: of the user's in {event}$"
        with pytest.raises(CallbackError, match=message) as caught:
            tiny.train(tiny.config(run.root, *words, "resume_from_checkpoint=true"), run)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert bool(run.checkpoint_steps()) == (event not in BEFORE_ANY_STEP)
    tiny.train(tiny.config(run.root, *SHORT, "resume_from_checkpoint=true"), run)
    tiny.train(tiny.config(tmp_path / "whole", *SHORT), RunDir(tmp_path / "whole"))
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(run.root).items())


@pytest.mark.usefixtures("one_thread")
def test_one_that_raises_in_on_exception_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    targets = [f"+callbacks.{name}._target_=users_callbacks.Raises" for name in ("first", "second")]
    events = ["+callbacks.first.event=on_step_end", "+callbacks.second.event=on_exception"]
    with pytest.raises(CallbackError, match=r"^callback first failed in on_step_end"):
        tiny.train(tiny.config(tmp_path, *SHORT, *targets, *events), RunDir(tmp_path))
    assert "callback second failed in on_exception: ZeroDivisionError" in caplog.text

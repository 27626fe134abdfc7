"""The Trainer on several real ranks: what they agree on, what they count together, what they save together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from saving import damage, flip

from forgather_cli.callbacks.base import CommandCounts, TrainerCallback, TrainerControl
from forgather_cli.checkpoint.load import Reader
from forgather_cli.data.loaders.collate import Counts, Step
from forgather_cli.errors import ConfigError
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.place import Place
from forgather_cli.models.decoder import Decoder
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer import Trainer, TrainingArguments
from forgather_cli.trainer.from_python import ScriptJob
from forgather_cli.trainer.step_sync import Agreed, StepSync, Sum

LAYOUTS = {"ddp": ("trainer=ddp",), "fsdp2": ("trainer=fsdp2",), "pipeline": ("trainer=pipeline", "n_microbatches=2")}


def trained(root: str, *overrides: str, **hooks: Any) -> dict[str, Any]:
    """A whole run in this rank; what it came to."""
    run = Path(root)
    trainer = tiny.train(
        tiny.config(run, "nproc_per_node=2" if dist.is_initialized() else "seed=42", *overrides), RunDir(run), **hooks
    )
    return {
        "step": trainer.state.global_step,
        "stopped_by": trainer.run.sync.signum,
        "history": trainer.state.log_history,
        "tokens": trainer.run.metrics.total_tokens,
        "samples": trainer.run.metrics.total_samples,
        "flops": trainer.run.metrics.total_flops,
        "parameters": trainer.num_parameters,
        "rank_0": trainer.state.is_world_process_zero,
    }


def single(root: Path, *overrides: str) -> dict[str, Any]:
    return trained(str(root), *overrides)


def values(result: dict[str, Any], key: str) -> list[float]:
    return [record[key] for record in result["history"] if key in record]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_count_and_log_together_what_one_rank_does(layout: str, tmp_path: Path) -> None:
    settings = ("logging_steps=2", "logging_first_step=false", "data.ragged=true", "eval_steps=4", "save_strategy=no")
    alone = single(tmp_path / "single", *settings)
    ranks = run_ranks(2, trained, str(tmp_path / layout), *LAYOUTS[layout], *settings)
    for result in ranks:
        assert [result[key] for key in ("step", "tokens", "samples", "parameters")] == [
            alone[key] for key in ("step", "tokens", "samples", "parameters")
        ]
        assert result["flops"] == pytest.approx(alone["flops"])
        assert values(result, "tokens") == values(alone, "tokens")
        assert values(result, "eval_tokens") == values(alone, "eval_tokens")
        for key in ("loss", "grad_norm", "max_grad_norm", "eval_loss", "train_loss"):
            assert values(result, key) == pytest.approx(values(alone, key), rel=1e-5), key
    assert [result["rank_0"] for result in ranks] == [True, False]


def recomputing(root: str, *overrides: str) -> tuple[list[str], list[float]]:
    """The layers of this rank that recompute their activations in a run, and the gradient norms of its steps."""
    run = Path(root)
    more = ("gradient_checkpointing=true", "gradient_checkpointing_every=2", "nproc_per_node=2")
    trainer = tiny.train(tiny.config(run, *EVERY, *more, *overrides), RunDir(run))
    parts = [part for part in trainer.strategy.parts if isinstance(part, Decoder)]
    names = [name for part in parts for name, layer in part.model.layers.items() if "forward" in vars(layer)]
    return names, values({"history": trainer.state.log_history}, "grad_norm")


EVERY = ("num_hidden_layers=5", "residual_dropout=0.0", "logging_steps=1", "save_strategy=no", "eval_strategy=no")


@pytest.mark.parametrize("layout", [*LAYOUTS, "ZBVZeroBubble"])
def test_every_second_layer_of_the_full_model_is_recomputed(layout: str, tmp_path: Path) -> None:
    words = LAYOUTS.get(layout) or ("trainer=pipeline", f"schedule={layout}", "n_microbatches=4")
    ranks = run_ranks(2, recomputing, str(tmp_path / "ranks"), *words)
    found = [names for names, _ in ranks]
    assert sorted(found[0] + found[1]) == ["0", "2", "4"] if "pipeline" in words[0] else found == [["0", "2", "4"]] * 2
    alone = single(tmp_path / "alone", *EVERY)
    for _, norms in ranks:
        assert norms == pytest.approx(values(alone, "grad_norm"), rel=1e-5)


@pytest.mark.parametrize("layout", [*LAYOUTS, "ZBVZeroBubble"])
def test_anomaly_mode_changes_no_number_of_any_strategy(layout: str, tmp_path: Path) -> None:
    words = LAYOUTS.get(layout) or ("trainer=pipeline", f"schedule={layout}", "n_microbatches=4")
    ranks = run_ranks(2, trained, str(tmp_path / "ranks"), *EVERY, *words, "detect_anomaly=true")
    alone = single(tmp_path / "alone", *EVERY)
    for result in ranks:
        assert values(result, "grad_norm") == pytest.approx(values(alone, "grad_norm"), rel=1e-5)


def told_on(rank: int, from_poll: int, root: str, *overrides: str) -> dict[str, Any]:
    """A run in which one rank gets SIGTERM."""
    polls = iter(range(10_000))
    heard: list[int] = []
    context = RankContext(Place(dist.get_rank(), 2))
    context.poll = lambda: 15 if dist.get_rank() == rank and next(polls) >= from_poll else None
    context.acknowledge = heard.append
    result = trained(
        root,
        *overrides,
        rank=context,
    )
    return {**result, "heard": heard}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_one_step_with_a_checkpoint(rank: int, tmp_path: Path) -> None:
    settings = ("trainer=ddp", "max_steps=50", "eval_strategy=no", "save_strategy=no")
    ranks = run_ranks(2, told_on, rank, 6, str(tmp_path), *settings)
    assert [result["stopped_by"] for result in ranks] == [15, 15]
    assert [result["heard"] for result in ranks] == [[15], [15]]
    assert ranks[0]["step"] == ranks[1]["step"] <= 8
    assert RunDir(tmp_path).checkpoint_steps() == [ranks[0]["step"]]


def test_a_signal_in_an_evaluation_discards_it_on_all_ranks(tmp_path: Path) -> None:
    settings = ("trainer=ddp", "eval_on_start=true", "data.num_eval_samples=64", "per_device_eval_batch_size=1")
    ranks = run_ranks(2, told_on, 1, 5, str(tmp_path), *settings)
    assert [(result["stopped_by"], result["step"], values(result, "eval_loss")) for result in ranks] == [
        (15, 0, [])
    ] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("samples", [2, 7, 9])
def test_uneven_evaluation_counts_every_example_once(layout: str, samples: int, tmp_path: Path) -> None:
    settings = (f"data.num_eval_samples={samples}", "per_device_eval_batch_size=2", "max_steps=1", "eval_on_start=true",
                "eval_steps=100", "save_strategy=no", "data.ragged=true")  # fmt: skip
    alone = single(tmp_path / "single", *settings)
    for result in run_ranks(2, trained, str(tmp_path / layout), *LAYOUTS[layout], *settings):
        assert values(result, "eval_loss") == pytest.approx(values(alone, "eval_loss"), rel=1e-6)
        assert values(result, "eval_tokens") == values(alone, "eval_tokens")


def test_an_open_log_interval_goes_on_with_the_sums_of_all_ranks(tmp_path: Path) -> None:
    settings = ("max_steps=6", "logging_steps=6", "logging_first_step=false", "eval_strategy=no")
    alone = single(tmp_path / "single", *settings)
    run_ranks(2, trained, str(tmp_path / "ranks"), "trainer=ddp", "save_steps=3", *settings)
    saved = RunDir(tmp_path / "ranks").checkpoint(3)
    went_on = single(tmp_path / "more", *settings, f"resume_from_checkpoint={saved}")
    assert values(went_on, "loss") == pytest.approx(values(alone, "loss"), rel=1e-6)
    assert values(went_on, "grad_norm") == pytest.approx(values(alone, "grad_norm"), rel=1e-6)


def weights_and_moments(root: str, *overrides: str) -> tuple[list[float], dict[str, Any]]:
    run = Path(root)
    trainer = tiny.train(tiny.config(run, *overrides), RunDir(run))
    moments = {name: tensor.clone() for name, tensor in trainer.optimizer.state_tensors().items()}
    return values({"history": trainer.state.log_history}, "grad_norm"), moments


def test_ranks_that_train_by_themselves_resume_with_their_own_moments(tmp_path: Path) -> None:
    """Post-local SGD: a save waits for the next average, which is at steps 4, 6 and 8."""
    settings = (
        "trainer=ddp", "nproc_per_node=2", "post_local_sgd.enabled=true", "post_local_sgd.start_step=2",
        "post_local_sgd.period=2", "logging_steps=1", "eval_strategy=no", "max_steps=8", "deterministic=true",
        "data.ragged=true",
    )  # fmt: skip
    through = run_ranks(2, weights_and_moments, str(tmp_path / "through"), "save_steps=5", *settings)
    assert RunDir(tmp_path / "through").checkpoint_steps() == [6, 8]
    assert through[0][0] == through[1][0]  # the mean square over ranks is logged
    saved = RunDir(tmp_path / "through").checkpoint(6)
    again = run_ranks(2, weights_and_moments, str(tmp_path / "again"), f"resume_from_checkpoint={saved}", *settings)
    for rank in range(2):
        assert again[rank][0] == through[rank][0][6:]
        assert all(torch.equal(value, through[rank][1][name]) for name, value in again[rank][1].items())
    different = [n for n, value in through[0][1].items() if not torch.equal(value, through[1][1][n])]
    assert different
    alone = single(tmp_path / "alone", "max_steps=8", f"resume_from_checkpoint={saved}", "data.ragged=true")
    assert alone["step"] == 8  # with the mean of both


# -------------------------------------------------------------------------------------------------- the Python surface


def python_trainer(root: str) -> Trainer:
    args = TrainingArguments(f"{root}/out", per_device_eval_batch_size=3, report_to="none", use_cpu=True)
    return Trainer(model_init=tiny.decoder, args=args, eval_dataset=tiny.RandomTokens(7))


def predicted(root: str) -> Any:
    trainer = python_trainer(root)
    output = trainer.predict(tiny.RandomTokens(7, ragged=True))
    trainer.save_model(f"{root}/saved")
    return output.predictions, output.label_ids, output.metrics["test_loss"], trainer.strategy.name


def test_predict_and_save_model_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    one = predicted(str(tmp_path / "one"))
    for logits, labels, loss, name in run_ranks(2, predicted, str(tmp_path / "two")):
        assert name == "ddp"
        np.testing.assert_allclose(logits, one[0], atol=1e-6)
        np.testing.assert_array_equal(labels, one[1])
        assert loss == pytest.approx(one[2], rel=1e-6)
    weights = [(tmp_path / run / "saved" / "model.safetensors").read_bytes() for run in ("one", "two")]
    assert weights[0] == weights[1]


def measured(root: str) -> tuple[dict[str, float], list[Any]]:
    """Metrics of an evaluation, and what ``compute_metrics`` was given for them."""
    told: list[Any] = []

    def measures(prediction: Any) -> dict[str, float]:
        told.extend(prediction)
        counted = prediction.label_ids[:, 1:] != -100
        right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
        return {"accuracy": right[counted].mean(), "rows": len(right), "losses": prediction.losses.mean()}

    settings = {"per_device_eval_batch_size": 3, "include_for_metrics": ["inputs", "loss"], "use_cpu": True}
    args = TrainingArguments(f"{root}/out", **settings)
    trainer = Trainer(
        model_init=tiny.decoder, args=args, eval_dataset=tiny.RandomTokens(23, ragged=True), compute_metrics=measures
    )
    metrics = trainer.evaluate()
    return {name: metrics[f"eval_{name}"] for name in ("accuracy", "rows", "loss")}, told


def test_compute_metrics_on_two_ranks_gets_and_gives_what_one_does(tmp_path: Path) -> None:
    one, given = measured(str(tmp_path / "one"))
    assert one["rows"] == 23
    for metrics, told in run_ranks(2, measured, str(tmp_path / "two")):
        assert metrics == pytest.approx(one, rel=1e-6)
        assert len(told) == len(given) == 4  # predictions, labels, inputs, losses
        for mine, expected in zip(told[:3], given[:3], strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-6)


def random_seed_of(root: str) -> int:
    args = TrainingArguments(root, seed=-1, report_to="none", use_cpu=True)
    return Trainer(model_init=tiny.decoder, args=args).run.seed


def test_a_random_seed_is_that_of_rank_0_everywhere(tmp_path: Path) -> None:
    seeds = run_ranks(2, random_seed_of, str(tmp_path))
    assert seeds[0] == seeds[1]
    assert seeds[0] != run_ranks(2, random_seed_of, str(tmp_path))[0]


# ------------------------------------------------------------------------------------------------------- the step sync


def agreed() -> list[Any]:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.zeros(2, 4, dtype=torch.int64)}

    def step_of(batches: list[Any]) -> Step:
        return Step(batches, Counts.of(batches))

    def started(step: Any, stop: int | None, saved: bool, copies: int) -> StepSync:
        sync = StepSync(TrainerControl(), ScriptJob(lambda: stop), group=group, world_size=2, copies=copies)
        sync.start(step, save_done=saved)
        return sync

    def read(sync: StepSync) -> tuple[Agreed, int | None]:
        agreed = sync.read()
        assert agreed is not None
        assert agreed is sync.read()
        sync.apply_requests(agreed.requests)
        sync.clear()
        assert sync.read() is None
        return agreed, sync.signum

    first = started(step_of([batch] * (rank + 1)), None, True, 1)
    second = started(step_of([batch]), 2 if rank else 15, rank == 0, 2)
    third = started(step_of([batch]) if rank else None, 10 if rank == 0 else None, True, 1)
    return [read(third), read(first), read(second), Sum([rank, 1], group).read()]


def test_sums_under_way_together_are_read_in_any_order() -> None:
    both = run_ranks(2, agreed)
    assert both[0] == both[1]
    (third, third_stop), (first, first_stop), (second, second_stop), numbers = both[0]
    assert first.counts == Counts(targets=18, tokens=24, square_lengths=96, samples=6, positions=24)
    assert (first.has_data, first_stop, first.saves_done) == (True, None, True)
    assert second.counts == Counts(targets=6, tokens=8, square_lengths=32, samples=2, positions=8)  # read by two
    assert (second.has_data, second_stop, second.saves_done) == (True, 15, False)
    assert (third.has_data, third_stop) == (False, 10)
    assert numbers == [1, 2]


# 12: told to stop by what is no stop signal
@pytest.mark.parametrize(("asked", "signum"), [(None, None), (2, 2), (1, 1), (12, 15)])
def test_one_rank_needs_no_group(asked: int | None, signum: int | None) -> None:
    heard: list[int] = []
    sync = StepSync(TrainerControl(), ScriptJob(lambda: asked, heard.append))
    assert [sync.poll(), sync.poll()] == [asked is not None] * 2
    assert heard == ([] if signum is None else [signum])
    assert sync.signum == signum


class Asks(TrainerCallback):
    """Commands of rank 0: asks for ``what`` after ``step``, and notes what ranks agree on, and when."""

    def __init__(self, step: int, what: CommandCounts) -> None:
        self.step, self.what, self.now = step, what, CommandCounts()
        self.heard: list[tuple[int, CommandCounts]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.state = state
        kwargs["trainer"].run.sync.commands = self

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and state.is_world_process_zero:
            self.now = self.what

    def asked(self) -> CommandCounts:
        return self.now

    def on_agreed(self, all_ranks: CommandCounts) -> None:
        self.heard.append((self.state.global_step, all_ranks))


def commanded(
    root: str, what: CommandCounts, *overrides: str
) -> tuple[int, list[tuple[int, CommandCounts]], list[int]]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    layout = ("trainer=ddp", "nproc_per_node=2") if ranks > 1 else ()
    config = tiny.config(Path(root), *layout, "max_steps=8", "eval_strategy=no", *overrides)
    asks = Asks(2, what)
    trainer = Trainer(model_init=tiny.decoder, args=config, train_dataset=tiny.RandomTokens(64), callbacks=[asks])
    trainer.train()
    return trainer.state.global_step, asks.heard, RunDir(Path(root)).checkpoint_steps()


COMMANDS = {
    "save": (CommandCounts(saves=1), 8, [8]),
    "stop": (CommandCounts(stops=1), 4, [4]),
    "save_and_stop": (CommandCounts(saves=1, stops=1), 4, [4]),
    "abort": (CommandCounts(aborts=1), 4, []),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", COMMANDS)
def test_all_ranks_obey_a_command_at_most_two_steps_later(tmp_path: Path, ranks: int, name: str) -> None:
    what, last, _ = COMMANDS[name]
    answers = run_ranks(ranks, commanded, str(tmp_path), what) if ranks > 1 else [commanded(str(tmp_path), what)]
    for step, heard, saved in answers:
        assert [asked for _, asked in heard] == [what]
        assert 2 <= heard[0][0] <= 4
        assert step == last if last == 8 else step <= last
        assert len(saved) == {"save": 2, "abort": 0}.get(name, 1)
        assert all(2 < s <= 4 or s == step for s in saved)
    assert len({(step, tuple(saved)) for step, _, saved in answers}) == 1


def test_a_command_to_save_and_stop_saves_although_nothing_else_is_saved(tmp_path: Path) -> None:
    answers = run_ranks(2, commanded, str(tmp_path), CommandCounts(saves=1, stops=1), "save_strategy=no")
    assert [len(saved) for _, _, saved in answers] == [1, 1]
    assert len({step for step, _, _ in answers}) == 1


class DamagesTheLast(TrainerCallback):
    """Flips a bit of the weights of the checkpoint of step 4, on rank 0."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and kwargs["checkpoint"].name == "step-00000004":
            damage(kwargs["checkpoint"] / "model/model.safetensors", flip(-1))


def loads_the_best(root: str) -> tuple[int, str | None, dict[str, torch.Tensor]]:
    """The step of the best evaluation, the checkpoint that is named as the best, and the weights at the end."""
    settings = ["eval_steps=2", "save_steps=2", "load_best_model_at_end=true", "learning_rate=1e-2", "warmup_steps=0"]
    config = tiny.config(Path(root), "trainer=ddp", "nproc_per_node=2", *settings)
    data = tiny.RandomTokens(8)
    trainer = Trainer(
        model_init=tiny.decoder, args=config, train_dataset=data, eval_dataset=data, callbacks=[DamagesTheLast()]
    )
    trainer.train()
    return trainer.state.best_global_step, trainer.state.best_model_checkpoint, trainer.model.state_dict()


def test_a_damaged_best_checkpoint_is_loaded_by_no_rank(tmp_path: Path) -> None:
    ranks = run_ranks(2, loads_the_best, str(tmp_path))
    saved = Reader(RunDir(tmp_path).checkpoint(2))
    for best, named, weights in ranks:
        assert (best, named) == (4, str(saved.path))
        assert all(torch.equal(saved.read(name), weights[name]) for name in saved.model_names())


class AccuracyOfRank0(TrainerCallback):
    def __init__(self, until: int) -> None:
        self.until = until

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step <= self.until:
            kwargs["metrics"]["eval_accuracy"] = 0.5


def best_by_accuracy(root: str, until: int) -> tuple[int, str]:
    settings = ("eval_steps=2", "save_steps=2", "load_best_model_at_end=true", "greater_is_better=true")
    layout = ("trainer=ddp", "nproc_per_node=2", "metric_for_best_model=accuracy")
    config, data = tiny.config(Path(root), *layout, *settings), tiny.RandomTokens(64)
    callbacks = [AccuracyOfRank0(until)]
    trainer = Trainer(model_init=tiny.decoder, args=config, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    try:
        trainer.train()
    except ConfigError as error:
        return trainer.state.global_step, str(error)
    return trainer.state.global_step, Path(trainer.state.best_model_checkpoint or "none").name


@pytest.mark.parametrize(("until", "step", "told"), [(4, 4, "step-00000002"), (0, 2, "at step 2 has no accuracy; set")])
def test_ranks_miss_the_best_metric_together(tmp_path: Path, until: int, step: int, told: str) -> None:
    """What rank 0 has counts: a callback may add a metric there alone."""
    first, second = run_ranks(2, best_by_accuracy, str(tmp_path), until)
    assert first == second
    assert first[0] == step
    assert told in first[1]


class BetterOnRank0(TrainerCallback):
    """Adds a metric on rank 0 alone, which is better at every second evaluation."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            kwargs["metrics"]["eval_accuracy"] = 0.5 + state.global_step / 100 if state.global_step % 4 == 0 else 0.1


def saves_the_best(root: str) -> tuple[list[int], Any]:
    settings = ("eval_steps=2", "save_strategy=best", "greater_is_better=true", "max_steps=9", "save_total_limit=null")
    layout = ("trainer=ddp", "nproc_per_node=2", "metric_for_best_model=accuracy")
    config, data = tiny.config(Path(root), *layout, *settings), tiny.RandomTokens(128)
    trainer = Trainer(
        model_init=tiny.decoder, args=config, train_dataset=data, eval_dataset=data, callbacks=[BetterOnRank0]
    )
    trainer.train()
    return trainer.run_dir.checkpoint_steps(), trainer.state.best_global_step


def test_ranks_save_the_best_of_rank_0_together(tmp_path: Path) -> None:
    assert run_ranks(2, saves_the_best, str(tmp_path)) == [([2, 4, 8, 9], 8)] * 2


def diverging_seed(root: str) -> None:
    config = tiny.config(
        Path(root), "trainer=ddp", "nproc_per_node=2", "learning_rate=1e30", "max_grad_norm=null", "max_steps=40"
    )
    tiny.train(config, RunDir(Path(root)))


def test_divergence_ends_all_ranks_at_one_step(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, diverging_seed, str(tmp_path))
    first, second = caught.value.causes.values()
    assert type(first).__name__ == type(second).__name__ == "DivergenceError"
    assert str(first) == str(second)


# -------------------------------------------------------------------------------------------------------- ordered data


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The samples of tiny.RandomTokens in order."""

    def __init__(self, length: int, seed: int) -> None:
        self.tokens = tiny.RandomTokens(length, seed)

    def __iter__(self) -> Any:
        return iter(self.tokens)


def from_stream(
    root: str, lengths: list[int], *, own_seed: bool = False, resume: bool = False, **changes: Any
) -> tuple[list[float], int]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = Stream(lengths[rank], rank if own_seed else 0)
    settings = {"num_train_epochs": -1, "lr_scheduler_type": "constant", "save_strategy": "no", **changes}
    args = TrainingArguments(
        root, report_to="none", use_cpu=True, logging_steps=1, per_device_train_batch_size=2, learning_rate=1e-2,
        global_batch_size=4, **settings,
    )  # fmt: skip
    trainer = Trainer(model_init=tiny.decoder, args=args, train_dataset=data, eval_dataset=Stream(7, 1))
    trainer.train(resume_from_checkpoint=resume)
    return [record["loss"] for record in trainer.state.log_history if "grad_norm" in record], trainer.state.global_step


def test_a_stream_is_read_by_rank_0_for_all(tmp_path: Path) -> None:
    alone = from_stream(str(tmp_path / "one"), [18])
    assert alone[1] == 5
    for losses, steps in run_ranks(2, from_stream, str(tmp_path / "two"), [18, 0]):
        assert steps == 5
        assert losses == pytest.approx(alone[0], rel=1e-5)


@pytest.mark.parametrize("epochs", [-1, 2])
def test_shards_of_uneven_length_end_training_together(tmp_path: Path, epochs: int) -> None:
    once, again = zip(*run_ranks(2, shards, str(tmp_path), epochs), strict=True)
    assert once[0] == once[1]
    assert once[0][1] == 6 * abs(epochs)  # of 2 samples each, the last of one: the shorter shard has 11
    assert again == (([], once[0][1]),) * 2  # there is nothing left


def shards(root: str, epochs: int) -> tuple[tuple[list[float], int], ...]:
    settings: dict[str, Any] = {"num_train_epochs": epochs, "save_strategy": "epoch", "own_seed": True}
    settings |= {"dispatch_batches": False, "eval_strategy": "no"}
    return tuple(from_stream(root, [11, 30], resume=resume, **settings) for resume in (False, True))

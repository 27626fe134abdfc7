"""The loop: order of events, cadence, normalisation against plain PyTorch, stops and what is saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from saving import damage, flip
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.errors import CallbackError, ConfigError, DataError, DivergenceError, OutOfMemoryError
from forgather_cli.strategies.base import Batch, ModelSpec, Strategy
from forgather_cli.trainer import Trainer, TrainingArguments


class FakeStrategy(Strategy):
    """One parameter whose gradient is known: the loop can be watched without a model."""

    name = "fake"
    supports_optimizer_in_backward = True
    device = torch.device("cpu")
    data_rank, data_size, model_group = 0, 1, None

    def __init__(self, gradient: float = 1.0) -> None:
        self.gradient = gradient
        self.calls: list[tuple[int, float]] = []

    def materialize(self, spec: ModelSpec) -> None:
        self.parts = [spec.whole()]

    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        count = sum(1 for _ in microbatches)
        self.calls.append((count, float(step_targets)))
        for parameter in self.parts[0].parameters():
            parameter.grad = torch.full_like(parameter, self.gradient)
        return torch.tensor(2.0)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.tensor(3.0), torch.tensor(1.0)

    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        return torch.zeros(*batch["input_ids"].shape, 4)


class Recorder(TrainerCallback):
    """Notes every event with the step it came at."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []


def _recording(event: str) -> Callable[..., None]:
    def handler(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append((event, state.global_step))

    return handler


for _event in (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_forward_backward_begin", "on_forward_backward_end",
    "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_train_metrics", "on_step_end", "on_log_step",
    "on_log", "on_prediction_step", "on_evaluate", "on_save", "on_epoch_end", "on_train_end",
):  # fmt: skip
    setattr(Recorder, _event, _recording(_event))


def arguments(path: Path, **changes: Any) -> TrainingArguments:
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 2, "async_save": False, **changes}
    return TrainingArguments(str(path), **settings)


def fake(args: TrainingArguments, *callbacks: Any, samples: int = 64, evaluated: Any = None) -> Trainer:
    """A Trainer whose strategy has no model."""
    data = tiny.RandomTokens(samples)
    return Trainer(nn.Linear(1, 1), args, None, data, evaluated, callbacks=[*callbacks], strategy=FakeStrategy())


def test_events_of_a_step_come_in_the_order_of_the_contract(tmp_path: Path) -> None:
    recorder = Recorder()
    args = arguments(
        tmp_path, max_steps=1, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, save_steps=1
    )
    fake(args, recorder, evaluated=tiny.RandomTokens(4)).train()
    micro = ["on_forward_backward_begin", "on_forward_backward_end", "on_substep_end"]
    assert [name for name, _ in recorder.events] == [
        "on_train_begin", "on_epoch_begin", "on_step_begin", *micro, *micro, "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_train_metrics", "on_step_end", "on_prediction_step", "on_log", "on_evaluate", "on_save", "on_epoch_end",
        "on_log_step", "on_log", "on_log_step", "on_log", "on_train_end",
    ]  # fmt: skip


def test_cadence_counts_absolute_steps(tmp_path: Path) -> None:
    recorder = Recorder()
    args = arguments(
        tmp_path,
        max_steps=7,
        logging_steps=3,
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=5,
    )
    fake(args, recorder, evaluated=tiny.RandomTokens(4)).train()
    steps = lambda event: [step for name, step in recorder.events if name == event]  # noqa: E731
    assert steps("on_log_step") == [1, 3, 6, 7, 7]  # 7: what was left, and the run's metrics
    assert steps("on_evaluate") == [2, 4, 6]
    assert steps("on_save") == [5, 7]


def test_each_step_gets_all_its_micro_batches_and_the_count_of_its_targets(
    tmp_path: Path,
) -> None:
    strategy = FakeStrategy()
    args = arguments(tmp_path, global_batch_size=8, per_device_train_batch_size=3, save_strategy="no")
    Trainer(nn.Linear(1, 1), args, None, tiny.RandomTokens(64), strategy=strategy).train()
    assert strategy.calls == [(4, 8 * 15.0)] * 4  # micro-batches of 2: the largest even split below 3


def plain_training(
    model: nn.Module, batches: list[list[Batch]], lr: float, max_norm: float
) -> list[tuple[float, float]]:
    """The same run in plain PyTorch: (loss, gradient norm) of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    curve = []
    for step in batches:
        count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in step)
        total = 0.0
        for batch in step:
            logits = model(batch["input_ids"])[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((total, norm.item()))
    return curve


class Curve(TrainerCallback):
    """Losses, gradient norms and batches of a run."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def on_train_metrics(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.points.append((float(kwargs["loss"]), float(kwargs["grad_norm"])))


@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_accumulation_equals_plain_pytorch_with_ragged_labels(tmp_path: Path, accumulation: int) -> None:
    data = tiny.RandomTokens(64, ragged=True)
    model, curve, seen = tiny.decoder(), Curve(), []
    args = arguments(
        tmp_path, max_steps=5, gradient_accumulation_steps=accumulation, per_device_train_batch_size=8 // accumulation,
        learning_rate=0.5, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.5, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, args, None, data, callbacks=[curve])
    original = trainer.strategy.forward_backward

    def spy(microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        seen.append(batches := list(microbatches))
        return original(batches, step_targets)

    trainer.strategy.forward_backward = spy  # type: ignore[method-assign]
    trainer.train()
    whole = [[{k: torch.cat([b[k] for b in step]) for k in step[0]}] for step in seen]
    reference = tiny.decoder()
    for (loss, norm), (expected_loss, expected_norm) in zip(
        curve.points, plain_training(reference, whole, 0.5, 0.5), strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_evaluation_is_the_sum_over_all_targets_divided_by_their_number(tmp_path: Path) -> None:
    data, model = tiny.RandomTokens(13, ragged=True), tiny.decoder()
    trainer = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=4), None, None, data)
    metrics = trainer.evaluate()
    batch = {k: torch.stack([data[i][k] for i in range(13)]) for k in ("input_ids", "labels")}
    labels = batch["labels"][:, 1:].flatten()
    with torch.no_grad():
        expected = F.cross_entropy(model(batch["input_ids"])[:, :-1].flatten(0, 1), labels).item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert metrics["eval_targets"] == int((labels != -100).sum())
    assert trainer.optimizer is None


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    curves = []
    for evaluation in ({}, {"eval_strategy": "steps", "eval_steps": 2}):
        curve = Curve()
        args = arguments(tmp_path / str(len(curves)), max_steps=6, save_strategy="no", **evaluation)
        model = tiny.decoder(attention_dropout=0.2, residual_dropout=0.2)
        Trainer(model, args, None, tiny.RandomTokens(), tiny.RandomTokens(8), callbacks=[curve]).train()
        curves.append(curve.points)
    assert curves[0] == curves[1]


def test_optimizer_in_backward_equals_the_plain_optimizer(tmp_path: Path) -> None:
    models = []
    for fused in (False, True):
        model = tiny.decoder()
        args = arguments(
            tmp_path / str(fused), max_steps=6, max_grad_norm=None, fuse_optim_with_backward=fused, save_strategy="no"
        )
        Trainer(model, args, None, tiny.RandomTokens()).train()
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_gradient_checkpointing_changes_no_number(tmp_path: Path) -> None:
    curves = []
    for on in (False, True):
        curve = Curve()
        args = arguments(tmp_path / str(on), max_steps=4, gradient_checkpointing=on, save_strategy="no")
        Trainer(tiny.decoder(residual_dropout=0.1), args, None, tiny.RandomTokens(), callbacks=[curve]).train()
        curves.append(curve.points)
    assert curves[0] == curves[1]


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_never_saved(tmp_path: Path) -> None:
    strategy = FakeStrategy(gradient=math.nan)
    trainer = Trainer(nn.Linear(1, 1), arguments(tmp_path, save_steps=1), None, tiny.RandomTokens(), strategy=strategy)
    with pytest.raises(DivergenceError, match="gradient norm became nan by step"):
        trainer.train()
    assert trainer.state.global_step <= 3
    assert trainer.run_dir.checkpoint_steps() == []


def test_a_stop_saves_and_an_abort_does_not(tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def __init__(self, flag: str) -> None:
            self.flag = flag

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                setattr(control, self.flag, True)

    for flag, saved in (("should_training_stop", [2]), ("should_abort_without_save", [])):
        trainer = fake(arguments(tmp_path / flag), Asks(flag))
        assert trainer.train().global_step == 2
        assert trainer.run_dir.checkpoint_steps() == saved


def test_a_signal_saves_whatever_the_save_strategy_says(tmp_path: Path) -> None:
    polls = iter([None, None, 15])  # the first before step 1
    trainer = Trainer(
        nn.Linear(1, 1), arguments(tmp_path, save_strategy="no"), None, tiny.RandomTokens(), strategy=FakeStrategy(),
        should_stop=lambda: next(polls, 15),
    )  # fmt: skip
    trainer.train()
    assert trainer.run.sync.signum == 15
    assert trainer.run_dir.checkpoint_steps() == [2]


def test_a_signal_discards_the_evaluation_in_progress(tmp_path: Path) -> None:
    recorder = Recorder()
    stop: list[int] = []

    class StopsInEvaluation(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stop.append(15)

    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
    Trainer(
        nn.Linear(1, 1), args, None, tiny.RandomTokens(), tiny.RandomTokens(64),
        callbacks=[recorder, StopsInEvaluation()], strategy=FakeStrategy(),
        should_stop=lambda: stop[0] if stop else None,
    ).train()  # fmt: skip
    assert "on_evaluate" not in [name for name, _ in recorder.events]
    assert len(stop) == 1
    assert ("on_save", 1) in recorder.events


def test_epochs(tmp_path: Path) -> None:
    recorder = Recorder()
    args = arguments(
        tmp_path,
        max_steps=-1,
        num_train_epochs=2,
        logging_strategy="epoch",
        logging_steps=500,
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    trainer = fake(args, recorder, samples=10, evaluated=tiny.RandomTokens(4))
    assert trainer.train().global_step == 6  # 10 samples in batches of 4, the last one smaller
    for event in ("on_epoch_end", "on_evaluate", "on_save"):
        assert [step for name, step in recorder.events if name == event] == [3, 6]
    assert trainer.state.epoch == 2.0


def test_epoch_train_steps_is_the_length_of_an_epoch(tmp_path: Path) -> None:
    recorder = Recorder()
    args = arguments(tmp_path, max_steps=5, epoch_train_steps=2, save_strategy="no")
    fake(args, recorder).train()
    assert [step for name, step in recorder.events if name == "on_epoch_end"] == [2, 4, 5]


@pytest.mark.parametrize(
    ("damaged", "loaded", "limit", "kept"),
    [((), 2, 1, [2, 4]), ((2,), 3, None, [1, 2, 3, 4]), ((1, 2, 3, 4), None, None, [1, 2, 3, 4])],
)
def test_the_best_whole_model_is_kept_loaded_and_named(
    damaged: tuple[int, ...],
    loaded: int | None,
    limit: int | None,
    kept: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Worse(FakeStrategy):
        losses = iter([5.0, 1.0, 3.0, 4.0])

        def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
            return torch.tensor(next(self.losses)), torch.tensor(1.0)

    snapshots: dict[int, float] = {}

    class Watches(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            snapshots[state.global_step] = kwargs["model"].weight.item()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in damaged:
                damage(kwargs["checkpoint"] / "model/model.safetensors", flip(-1))

    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": limit}
    args = arguments(tmp_path, load_best_model_at_end=True, **changes)
    model, data = nn.Linear(1, 1), (tiny.RandomTokens(), tiny.RandomTokens(4))
    trainer = Trainer(model, args, None, *data, strategy=Worse(), callbacks=[Watches])
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert trainer.run_dir.checkpoint_steps() == kept
    assert model.weight.item() == snapshots[loaded or 4]
    assert trainer.state.best_model_checkpoint == (loaded and str(trainer.run_dir.checkpoint(loaded)))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for step in damaged:
        assert sum(f"step-{step:08d}: is damaged: model/model.safetensors has other" in line for line in told) == 1
    unloaded = "load_best_model_at_end: no whole and healthy checkpoint has eval_loss; the weights stay those of step 4"
    assert (unloaded in told) == (loaded is None)
    assert len(told) == len(damaged) + (loaded is None)


class Falling(FakeStrategy):
    """Evaluation losses by step."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses = iter(losses)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.tensor(next(self.losses)), torch.tensor(1.0)


def test_the_best_alone_is_saved_and_the_end_and_a_resume_remembers_the_best(tmp_path: Path) -> None:
    def trained(steps: int, *losses: float, at_start: bool = False) -> tuple[Trainer, list[int]]:
        args = arguments(
            tmp_path, save_strategy="best", eval_strategy="steps", eval_steps=1, max_steps=steps, save_total_limit=9,
            eval_on_start=at_start,
        )  # fmt: skip
        data, saved = (tiny.RandomTokens(), tiny.RandomTokens(4)), Recorder()
        trainer = Trainer(nn.Linear(1, 1), args, None, *data, strategy=Falling(*losses), callbacks=[saved])
        trainer.train(resume_from_checkpoint=True)
        return trainer, [step for event, step in saved.events if event == "on_save"]

    # an evaluation at the start is compared with, but saves nothing
    trainer, saved = trained(5, 9.0, 5.0, 6.0, 4.0, 4.0, 8.0, at_start=True)
    assert saved == [1, 3, 5], "new bests, and the end"
    assert [trainer.state.best_global_step, trainer.state.best_metric] == [3, 4.0]
    trainer, saved = trained(9, 4.5, 7.0, 3.0, 3.5)
    assert saved == [8, 9]
    assert trainer.run_dir.checkpoint_steps() == [1, 3, 5, 8, 9]


class Accuracy(TrainerCallback):
    """Adds what a user's metric function would, up to a step."""

    def __init__(self, until: int) -> None:
        self.until = until

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step <= self.until:
            kwargs["metrics"]["eval_accuracy"] = 0.5


def best_by(path: Path, metric: str, evaluated: Any, *callbacks: Any, load_best: bool = True) -> Trainer:
    args = arguments(
        path, eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=load_best, logging_steps=1,
        metric_for_best_model=metric, greater_is_better=metric == "accuracy",
    )  # fmt: skip
    strategy = ReadsLabels()
    trainer = Trainer(
        nn.Linear(1, 1), args, None, tiny.RandomTokens(), evaluated, callbacks=callbacks, strategy=strategy
    )
    trainer.train()
    return trainer


class ReadsLabels(FakeStrategy):
    """A loss of 3 for each target."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        count = (batch["labels"][:, 1:] != -100).sum()
        return 3.0 * count, count


def test_a_best_metric_that_an_evaluation_lacks_ends_the_run_there(tmp_path: Path) -> None:
    assert best_by(tmp_path / "has", "accuracy", tiny.RandomTokens(4), Accuracy(4)).state.best_metric == 0.5
    with pytest.raises(ConfigError) as caught:
        best_by(tmp_path / "lacks", "accuracy", tiny.RandomTokens(4), Accuracy(1))
    assert str(caught.value) == (
        "metric_for_best_model: the evaluation at step 2 has no accuracy; set it to one that it has (eval_loss, "
        "eval_perplexity, eval_tokens, eval_targets, eval_runtime, eval_samples_per_second), or "
        "load_best_model_at_end=false"
    )


def test_a_best_metric_that_no_evaluation_has_ends_the_run_at_the_first_one(tmp_path: Path) -> None:
    data = tiny.RandomTokens(4)
    with pytest.raises(ConfigError) as caught:
        best_by(tmp_path / "never", "f1", data, load_best=False)
    assert "metric_for_best_model: the evaluation at step 1 has no f1" in str(caught.value)
    assert "eval_loss" in str(caught.value)
    assert "load_best" not in str(caught.value)
    # one that only some have is compared where it is
    once = best_by(tmp_path / "once", "accuracy", data, Accuracy(1), load_best=False)
    assert (once.state.global_step, once.state.best_metric, once.state.best_global_step) == (4, 0.5, 1)


def test_an_evaluation_without_targets_has_no_loss_and_is_never_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tiny.RandomTokens(4)
    data.lengths.zero_()
    trainer = best_by(tmp_path / "goes on", "eval_loss", data, load_best=False)
    assert (trainer.state.global_step, trainer.state.best_metric) == (4, None)
    assert not any("eval_loss" in record or "eval_perplexity" in record for record in trainer.state.log_history)
    assert "the eval split has no targets (every label is -100), and so no loss" in caplog.text
    with pytest.raises(ConfigError, match="evaluation at step 1 has no loss, since it has no targets"):
        best_by(tmp_path / "refused", "loss", data)


def test_a_callback_that_raises_is_named_with_its_event(tmp_path: Path) -> None:
    class Broken(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ValueError("no such column")

    trainer = fake(arguments(tmp_path, save_steps=1), Broken)
    with pytest.raises(CallbackError, match="callback Broken failed in on_log: ValueError: no such column"):
        trainer.train()
    assert trainer.run_dir.checkpoint_steps() == [1]


def test_no_data_is_a_set_up_mistake(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train_dataset"):
        Trainer(nn.Linear(1, 1), arguments(tmp_path), strategy=FakeStrategy()).train()


def test_a_step_without_targets_divides_by_one_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tiny.RandomTokens()
    data.lengths.zero_()
    strategy = FakeStrategy()
    Trainer(nn.Linear(1, 1), arguments(tmp_path, save_strategy="no"), None, data, strategy=strategy).train()
    assert [targets for _, targets in strategy.calls] == [1.0] * 4
    assert sum("has no targets" in record.message for record in caplog.records) == 1


def evaluations(tmp_path: Path, **changes: Any) -> list[int]:
    """Steps of a 6-step run at which it evaluated."""
    recorder = Recorder()
    args = arguments(tmp_path, max_steps=6, **changes)
    data = tiny.RandomTokens()
    Trainer(nn.Linear(1, 1), args, None, data, data, callbacks=[recorder], strategy=FakeStrategy()).train()
    return [step for name, step in recorder.events if name == "on_evaluate"]


def test_evaluation_at_start_after_a_delay_and_with_a_save(tmp_path: Path) -> None:
    steps = {"eval_strategy": "steps", "eval_steps": 2}
    assert evaluations(tmp_path / "start", **steps, eval_on_start=True) == [0, 2, 4, 6]
    assert evaluations(tmp_path / "delay", **steps, eval_delay=3) == [4, 6]
    assert evaluations(tmp_path / "save", eval_on_save=True, save_steps=4) == [4, 6]


def test_running_out_of_memory_is_explained(tmp_path: Path) -> None:
    class Hungry(FakeStrategy):
        def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
            list(microbatches)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    trainer = Trainer(nn.Linear(1, 1), arguments(tmp_path), None, tiny.RandomTokens(), strategy=Hungry())
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.train()
    text = str(caught.value)
    assert text.startswith(
        "out of memory in step 1, micro-batches of 4 x 16 tokens: weights 0 MiB, gradients up to 0 M"
    )
    assert "a smaller per_device_train_batch_size (now 4; auto_find_batch_size=true finds one), gradient_c" in text
    assert caught.value.exit_code == 1


class FailsInEvaluation(FakeStrategy):
    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self.error = error

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        raise self.error

    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        raise self.error


def test_running_out_of_memory_in_an_evaluation_is_explained(tmp_path: Path) -> None:
    strategy = FailsInEvaluation(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"))
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=2)
    data = tiny.RandomTokens()
    trainer = Trainer(nn.Linear(1, 1), args, None, data, data, strategy=strategy)
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "out of memory in the evaluation at step 3, batches of 2 x 16 tokens: weights 0 MiB, optimizer 0 MiB, the rest "
        "activations (CUDA out of memory. Tried to allocate 20.00 GiB); most likely to help: a smaller "
        "per_device_eval_batch_size (now 2), loss=linear_cross_entropy, precision=bf16"
    )
    assert caught.value.smaller_batch is None
    with pytest.raises(OutOfMemoryError, match="in the prediction, batches of 2 x 16 tokens"):
        trainer.predict(data)


class FailsInStep(FakeStrategy):
    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_another_error_of_the_device_says_where_it_was_and_stays_what_it_is(tmp_path: Path) -> None:
    args, data = arguments(tmp_path, per_device_eval_batch_size=2), tiny.RandomTokens()
    with pytest.raises(torch.AcceleratorError, match="device-side assert") as caught:
        Trainer(nn.Linear(1, 1), args, None, data, strategy=FailsInStep()).train()
    [note] = caught.value.__notes__
    assert note.startswith("in step 1, micro-batches of 4 x 16 tokens: weights 0 MiB, gradients up to 0 MiB, optimizer")
    for message, notes in (("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm", 1), ("shapes differ", 0)):
        with pytest.raises(RuntimeError, match=message) as failed:
            Trainer(
                nn.Linear(1, 1), args, None, data, data, strategy=FailsInEvaluation(RuntimeError(message))
            ).evaluate()
        told = getattr(failed.value, "__notes__", [])
        assert len(told) == notes
        assert all("in the evaluation at step 0, batches of 2 x 16 tokens" in line for line in told)


def epochs_trained(path: Path, data: Any, *callbacks: Any, resume: bool = False, **changes: Any) -> tuple[int, float]:
    """Steps and epochs behind when training that counts epochs has ended; a run that does not end is given up."""

    class GivesUp(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_abort_without_save |= state.global_step == 100

    settings = {"max_steps": -1, "save_steps": 3, "lr_scheduler_type": "constant", "save_total_limit": None}
    args = arguments(path, **{**settings, **changes})
    trainer = Trainer(nn.Linear(1, 1), args, None, data, callbacks=[*callbacks, GivesUp], strategy=FakeStrategy())
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step, trainer.state.epoch


class StopsEpochs(TrainerCallback):
    """Ends each epoch after three steps, and the process, as a crash would, after ``cut``."""

    def __init__(self, cut: int | None = None) -> None:
        self.cut = cut

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop |= state.global_step % 3 == 0
        control.should_abort_without_save |= state.global_step == self.cut


@pytest.mark.parametrize(
    ("has_length", "save_steps", "changes"),
    [(True, 2, {}), (True, 3, {}), (False, 3, {}), (False, 2, {"epoch_train_steps": 7})],
)  # saved in the middle of an epoch, and with its last step
def test_epochs_that_callbacks_end_early_are_epochs(
    tmp_path: Path, has_length: bool, save_steps: int, changes: dict[str, Any]
) -> None:
    data = tiny.RandomTokens(64) if has_length else iter_style(tiny.RandomTokens(64))
    settings = {"num_train_epochs": 2, "save_steps": save_steps, **changes}
    assert epochs_trained(tmp_path / "whole", data, StopsEpochs(), **settings) == (6, 2.0)
    assert epochs_trained(tmp_path / "cut", data, StopsEpochs(cut=4), **settings)[0] == 4
    for _ in ("cut off", "finished"):
        assert epochs_trained(tmp_path / "cut", data, StopsEpochs(), resume=True, **settings) == (6, 2.0)


@pytest.mark.parametrize("epochs", [-1, 1, 2])
def test_data_without_a_length_ends_training_after_so_many_epochs(tmp_path: Path, epochs: int) -> None:
    stream, steps = iter_style(tiny.RandomTokens(22)), 6 * abs(epochs)
    settings = {"num_train_epochs": epochs, "save_steps": 6}
    assert epochs_trained(tmp_path, stream, **settings) == (steps, abs(epochs))
    assert epochs_trained(tmp_path, stream, resume=True, **settings) == (steps, abs(epochs))
    assert epochs_trained(tmp_path, stream, resume=True, num_train_epochs=3) == (18, 3.0)


def test_a_part_of_an_epoch_of_unknown_length_is_refused(tmp_path: Path) -> None:
    stream = iter_style(tiny.RandomTokens(22))
    with pytest.raises(DataError, match=r"num_train_epochs: 0.5 is no whole number, and .*; set whole epochs, max_st"):
        epochs_trained(tmp_path / "refused", stream, num_train_epochs=0.5)
    assert epochs_trained(tmp_path / "steps", stream, num_train_epochs=0.5, epoch_train_steps=8)[0] == 4


def test_a_fraction_of_an_epoch_is_rounded_up_to_steps(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=1.3, save_strategy="no")
    assert (
        Trainer(nn.Linear(1, 1), args, None, tiny.RandomTokens(40), strategy=FakeStrategy()).train().global_step == 13
    )


def test_an_iterable_is_repeated_until_max_steps(tmp_path: Path) -> None:
    data = iter_style(tiny.RandomTokens(8))
    args = arguments(tmp_path, max_steps=5, save_strategy="no")
    trainer = Trainer(nn.Linear(1, 1), args, None, data, strategy=FakeStrategy())
    assert trainer.train().global_step == 5
    assert trainer.state.epoch == 2.0


def iter_style(data: tiny.RandomTokens) -> IterableDataset[dict[str, Tensor]]:
    class Stream(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return (data[i] for i in range(len(data)))

    return Stream()

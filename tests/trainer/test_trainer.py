"""The loop: order of events, cadence, normalisation against plain PyTorch, stops and what is saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from saving import damage, flip
from torch import Tensor, nn

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.config.schema import EVENTS
from forgather_cli.errors import ConfigError, DataError, DivergenceError, OutOfMemoryError
from forgather_cli.strategies.base import Batch, ModelSpec, Strategy


class FakeStrategy(Strategy):
    """One parameter whose gradient is known: the loop can be watched without a model."""

    name = "fake"
    supports_optimizer_in_backward = True
    device = torch.device("cpu")
    data_rank, data_size, model_group = 0, 1, None

    def __init__(
        self, gradient: float = 1.0, losses: Iterable[float] = (), error: Exception | None = None, in_step: bool = False
    ) -> None:
        """``losses``: of the first evaluations, each of one batch. ``error``: of each evaluation, or of a step."""
        self.gradient, self.losses, self.error, self.in_step = gradient, iter(losses), error, in_step
        self.calls: list[tuple[int, float]] = []

    def materialize(self, spec: ModelSpec) -> None:
        self.parts = [spec.whole()]

    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        count = sum(1 for _ in microbatches)
        if self.error is not None and self.in_step:
            raise self.error
        self.calls.append((count, float(step_targets)))
        for parameter in self.parts[0].parameters():
            parameter.grad = torch.full_like(parameter, self.gradient)
        return torch.tensor(2.0)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.error is not None:
            raise self.error
        count = (batch["labels"][:, 1:] != -100).sum()
        return next(self.losses, 3.0) * count, count

    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        if self.error is not None:
            raise self.error
        return torch.zeros(*batch["input_ids"].shape, 4)


def recorder(into: list[tuple[str, int]]) -> TrainerCallback:
    def noting(event: str) -> Callable[..., None]:
        return lambda state, *_, **kwargs: into.append((event, state.global_step))

    return tiny.acts(**{event: noting(event) for event in EVENTS})


def steps_of(events: list[tuple[str, int]], event: str) -> list[int]:
    return [step for name, step in events if name == event]


def arguments(path: Path, **changes: Any) -> TrainingArguments:
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 2, "async_save": False, **changes}
    return TrainingArguments(str(path), **settings)


def fake(
    args: TrainingArguments, *callbacks: Any, data: Any = None, evaluated: Any = None, strategy: Any = None, **more: Any
) -> Trainer:
    given = {"train_dataset": data or tiny.RandomTokens(), "strategy": strategy or FakeStrategy(), **more}
    return Trainer(nn.Linear(1, 1), args, None, eval_dataset=evaluated, callbacks=[*callbacks], **given)


def curve_of(trainer: Trainer) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in trainer.state.log_history if "grad_norm" in record]


def test_events_of_a_step_come_in_the_order_of_the_contract(tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []
    args = arguments(
        tmp_path, max_steps=1, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, save_steps=1
    )
    fake(args, recorder(events), evaluated=tiny.RandomTokens(4)).train()
    micro = ["on_forward_backward_begin", "on_forward_backward_end", "on_substep_end"]
    assert [name for name, _ in events] == [
        "on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin", *micro, *micro, "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_train_metrics", "on_step_end", "on_prediction_step", "on_log", "on_evaluate", "on_save", "on_epoch_end",
        "on_log_step", "on_log", "on_log_step", "on_log", "on_train_end",
    ]  # fmt: skip


def test_cadence_counts_absolute_steps(tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []
    settings = {"logging_steps": 3, "logging_first_step": True, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(tmp_path, max_steps=7, save_steps=5, **settings)
    fake(args, recorder(events), evaluated=tiny.RandomTokens(4)).train()
    assert steps_of(events, "on_log_step") == [1, 3, 6, 7, 7]  # 7: what was left, and the run's metrics
    assert steps_of(events, "on_evaluate") == [2, 4, 6]
    assert steps_of(events, "on_save") == [5, 7]


def test_each_step_gets_all_its_micro_batches_and_the_count_of_its_targets(tmp_path: Path) -> None:
    strategy = FakeStrategy()
    fake(arguments(tmp_path, global_batch_size=8, per_device_train_batch_size=3), strategy=strategy).train()
    assert strategy.calls == [(4, 8 * 15.0)] * 4  # micro-batches of 2: the largest even split below 3


@pytest.mark.parametrize("accumulation", [1, 4])
def test_accumulation_equals_plain_pytorch_with_ragged_labels(tmp_path: Path, accumulation: int) -> None:
    data = tiny.RandomTokens(64, ragged=True)
    model = tiny.decoder()
    args = arguments(
        tmp_path, max_steps=5, logging_steps=1, gradient_accumulation_steps=accumulation, learning_rate=0.5,
        per_device_train_batch_size=8 // accumulation, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.5,
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, args, None, data)
    seen = tiny.note_batches(trainer.strategy)
    trainer.train()
    reference = tiny.decoder()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step, found in zip(seen, curve_of(trainer), strict=True):
        tokens, labels = (torch.cat([batch[key] for batch in step]) for key in ("input_ids", "labels"))
        loss = F.cross_entropy(reference(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx((loss.item(), norm.item()), rel=1e-5)
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
        model = tiny.decoder(attention_dropout=0.2, residual_dropout=0.2)
        settings = {"max_steps": 6, "logging_steps": 1, **evaluation}
        trainer = tiny.script(tmp_path / str(len(curves)), model, None, tiny.RandomTokens(8), **settings)
        trainer.train()
        curves.append(curve_of(trainer))
    assert curves[0] == curves[1]


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_never_saved(tmp_path: Path) -> None:
    trainer = fake(arguments(tmp_path, save_steps=1), strategy=FakeStrategy(gradient=math.nan))
    with pytest.raises(DivergenceError, match="gradient norm became nan by step"):
        trainer.train()
    assert trainer.state.global_step <= 3
    assert trainer.run_dir.checkpoint_steps() == []


def test_a_stop_saves_and_an_abort_does_not(tmp_path: Path) -> None:
    for flag, saved in (("should_training_stop", [2]), ("should_abort_without_save", [])):
        asks = tiny.acts(
            on_step_end=lambda state, control, flag=flag, **_: setattr(control, flag, state.global_step == 2)
        )
        trainer = fake(arguments(tmp_path / flag), asks)
        assert trainer.train().global_step == 2
        assert trainer.run_dir.checkpoint_steps() == saved


def test_a_signal_saves_whatever_the_save_strategy_says(tmp_path: Path) -> None:
    polls = iter([None, None, 15])  # the first before step 1
    trainer = fake(arguments(tmp_path, save_strategy="no"), should_stop=lambda: next(polls, 15))
    trainer.train()
    assert trainer.run.sync.signum == 15
    assert trainer.run_dir.checkpoint_steps() == [2]


def test_a_signal_discards_the_evaluation_in_progress(tmp_path: Path) -> None:
    events, stop = list[tuple[str, int]](), list[int]()
    stops = tiny.acts(on_prediction_step=lambda *_, **kwargs: stop.append(15))
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
    asked = {"should_stop": lambda: stop[0] if stop else None}
    fake(args, recorder(events), stops, evaluated=tiny.RandomTokens(64), **asked).train()
    assert steps_of(events, "on_evaluate") == []
    assert len(stop) == 1
    assert ("on_save", 1) in events


def test_epochs(tmp_path: Path) -> None:
    events, shorter = list[tuple[str, int]](), list[tuple[str, int]]()
    by_epoch = dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch")
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=2, logging_steps=500, **by_epoch)
    trainer = fake(args, recorder(events), data=tiny.RandomTokens(10), evaluated=tiny.RandomTokens(4))
    assert trainer.train().global_step == 6  # 10 samples in batches of 4, the last one smaller
    for event in ("on_epoch_end", "on_evaluate", "on_save"):
        assert steps_of(events, event) == [3, 6]
    assert trainer.state.epoch == 2.0
    args = arguments(tmp_path / "shorter", max_steps=5, epoch_train_steps=2, save_strategy="no")
    fake(args, recorder(shorter)).train()
    assert steps_of(shorter, "on_epoch_end") == [2, 4, 5]


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
    snapshots: dict[int, float] = {}

    def note(state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        snapshots[state.global_step] = model.weight.item()

    def spoil(state: Any, control: Any, checkpoint: Path, **kwargs: Any) -> None:
        if state.global_step in damaged:
            damage(checkpoint / "model/model.safetensors", flip(-1))

    changes = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": limit}
    args = arguments(tmp_path, load_best_model_at_end=True, **changes)
    strategy, acts = FakeStrategy(losses=[5.0, 1.0, 3.0, 4.0]), tiny.acts(on_step_end=note, on_save=spoil)
    trainer = fake(args, acts, evaluated=tiny.RandomTokens(4), strategy=strategy)
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert trainer.run_dir.checkpoint_steps() == kept
    assert trainer.model.weight.item() == snapshots[loaded or 4]
    assert trainer.state.best_model_checkpoint == (loaded and str(trainer.run_dir.checkpoint(loaded)))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for step in damaged:
        assert sum(f"step-{step:08d}: is damaged: model/model.safetensors has other" in line for line in told) == 1
    unloaded = "load_best_model_at_end: no whole and healthy checkpoint has eval_loss; the weights stay those of step 4"
    assert (unloaded in told) == (loaded is None)
    assert len(told) == len(damaged) + (loaded is None)


def test_the_best_alone_is_saved_and_the_end_and_a_resume_remembers_the_best(tmp_path: Path) -> None:
    def trained(steps: int, *losses: float, at_start: bool = False) -> tuple[Trainer, list[int]]:
        args = arguments(
            tmp_path, save_strategy="best", eval_strategy="steps", eval_steps=1, max_steps=steps, save_total_limit=9,
            eval_on_start=at_start,
        )  # fmt: skip
        events: list[tuple[str, int]] = []
        trainer = fake(args, recorder(events), evaluated=tiny.RandomTokens(4), strategy=FakeStrategy(losses=losses))
        trainer.train(resume_from_checkpoint=True)
        return trainer, steps_of(events, "on_save")

    # an evaluation at the start is compared with, but saves nothing
    trainer, saved = trained(5, 9.0, 5.0, 6.0, 4.0, 4.0, 8.0, at_start=True)
    assert saved == [1, 3, 5], "new bests, and the end"
    assert [trainer.state.best_global_step, trainer.state.best_metric] == [3, 4.0]
    trainer, saved = trained(9, 4.5, 7.0, 3.0, 3.5)
    assert saved == [8, 9]
    assert trainer.run_dir.checkpoint_steps() == [1, 3, 5, 8, 9]


def accuracy(until: int) -> TrainerCallback:
    def add(state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        metrics |= {"eval_accuracy": 0.5} if state.global_step <= until else {}

    return tiny.acts(on_evaluate=add)


def best_by(path: Path, metric: str, evaluated: Any, *callbacks: Any, load_best: bool = True) -> Trainer:
    args = arguments(
        path, eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=load_best, logging_steps=1,
        metric_for_best_model=metric, greater_is_better=metric == "accuracy",
    )  # fmt: skip
    trainer = fake(args, *callbacks, evaluated=evaluated)
    trainer.train()
    return trainer


def test_a_best_metric_that_an_evaluation_lacks_ends_the_run_there(tmp_path: Path) -> None:
    data = tiny.RandomTokens(4)
    assert best_by(tmp_path / "has", "accuracy", data, accuracy(4)).state.best_metric == 0.5
    with pytest.raises(ConfigError) as caught:
        best_by(tmp_path / "lacks", "accuracy", data, accuracy(1))
    told = "metric_for_best_model: the evaluation at step 2 has no accuracy; set it to one that it has (eval_loss, "
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("or load_best_model_at_end=false")
    with pytest.raises(
        ConfigError, match=r"^metric_for_best_model: the evaluation at step 1 has no f1.*eval_loss"
    ) as e:
        best_by(tmp_path / "never", "f1", data, load_best=False)
    assert "load_best" not in str(e.value)
    # one that only some have is compared where it is
    once = best_by(tmp_path / "once", "accuracy", data, accuracy(1), load_best=False)
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


def test_a_step_without_targets_divides_by_one_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tiny.RandomTokens()
    data.lengths.zero_()
    strategy = FakeStrategy()
    fake(arguments(tmp_path, save_strategy="no"), data=data, strategy=strategy).train()
    assert [targets for _, targets in strategy.calls] == [1.0] * 4
    assert sum("has no targets" in record.message for record in caplog.records) == 1


def evaluations(tmp_path: Path, **changes: Any) -> list[int]:
    events: list[tuple[str, int]] = []
    fake(arguments(tmp_path, max_steps=6, **changes), recorder(events), evaluated=tiny.RandomTokens()).train()
    return steps_of(events, "on_evaluate")


def test_evaluation_at_start_after_a_delay_and_with_a_save(tmp_path: Path) -> None:
    steps = {"eval_strategy": "steps", "eval_steps": 2}
    assert evaluations(tmp_path / "start", **steps, eval_on_start=True) == [0, 2, 4, 6]
    assert evaluations(tmp_path / "delay", **steps, eval_delay=3) == [4, 6]
    assert evaluations(tmp_path / "save", eval_on_save=True, save_steps=4) == [4, 6]


def test_running_out_of_memory_is_explained(tmp_path: Path) -> None:
    error, data = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), tiny.RandomTokens()
    with pytest.raises(OutOfMemoryError) as caught:
        fake(arguments(tmp_path / "step"), strategy=FakeStrategy(error=error, in_step=True)).train()
    text = str(caught.value)
    assert text.startswith("out of memory in step 1, micro-batches of 4 x 16 tokens: weights 0 MiB, gradients up")
    assert "a smaller per_device_train_batch_size (now 4; auto_find_batch_size=true finds one), gradient_c" in text
    assert caught.value.exit_code == 1
    args = arguments(tmp_path / "evaluation", eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=2)
    trainer = fake(args, evaluated=data, strategy=FakeStrategy(error=error))
    with pytest.raises(OutOfMemoryError) as caught:
        trainer.train()
    text = str(caught.value)
    assert text.startswith("out of memory in the evaluation at step 3, batches of 2 x 16 tokens: weights 0 MiB, optim")
    assert "(CUDA out of memory. Tried to allocate 20.00 GiB); most likely to help: a smaller per_device_eval" in text
    assert caught.value.smaller_batch is None
    with pytest.raises(OutOfMemoryError, match="in the prediction, batches of 2 x 16 tokens"):
        trainer.predict(data)


@pytest.mark.parametrize(
    ("error", "in_step", "note"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True,
         "in step 1, micro-batches of 4 x 16 tokens: weights 0 MiB, gradients up to 0 MiB, optimizer"),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), False,
         "in the evaluation at step 0, batches of 2 x 16 tokens"),
        (RuntimeError("shapes differ"), False, None),
    ],
)  # fmt: skip
def test_another_error_of_the_device_says_where_it_was_and_stays_what_it_is(
    tmp_path: Path, error: RuntimeError, in_step: bool, note: str | None
) -> None:
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    trainer = fake(args, evaluated=tiny.RandomTokens(), strategy=FakeStrategy(error=error, in_step=in_step))
    with pytest.raises(type(error), match=str(error)) as caught:
        trainer.train() if in_step else trainer.evaluate()
    told = getattr(caught.value, "__notes__", [])
    assert len(told) == (note is not None)
    assert all(str(note) in line for line in told)


def epochs_trained(path: Path, data: Any, *callbacks: Any, resume: bool = False, **changes: Any) -> tuple[int, float]:
    """Steps and epochs behind when training that counts epochs has ended; a run that does not end is given up."""

    def give_up(state: Any, control: Any, **kwargs: Any) -> None:
        control.should_abort_without_save |= state.global_step == 100

    settings = {"max_steps": -1, "save_steps": 3, "lr_scheduler_type": "constant", "save_total_limit": None}
    args = arguments(path, **{**settings, **changes})
    trainer = fake(args, *callbacks, tiny.acts(on_step_end=give_up), data=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step, trainer.state.epoch


def stops_epochs(cut: int | None = None) -> TrainerCallback:
    """Ends each epoch after three steps, and the process, as a crash would, after ``cut``."""

    def stop(state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop |= state.global_step % 3 == 0
        control.should_abort_without_save |= state.global_step == cut

    return tiny.acts(on_step_end=stop)


@pytest.mark.parametrize(
    ("has_length", "save_steps", "changes"),
    [(True, 2, {}), (True, 3, {}), (False, 3, {}), (False, 2, {"epoch_train_steps": 7})],
)  # saved in the middle of an epoch, and with its last step
def test_epochs_that_callbacks_end_early_are_epochs(
    tmp_path: Path, has_length: bool, save_steps: int, changes: dict[str, Any]
) -> None:
    data = tiny.RandomTokens(64) if has_length else tiny.stream(tiny.RandomTokens(64))
    settings = {"num_train_epochs": 2, "save_steps": save_steps, **changes}
    assert epochs_trained(tmp_path / "whole", data, stops_epochs(), **settings) == (6, 2.0)
    assert epochs_trained(tmp_path / "cut", data, stops_epochs(cut=4), **settings)[0] == 4
    for _ in ("cut off", "finished"):
        assert epochs_trained(tmp_path / "cut", data, stops_epochs(), resume=True, **settings) == (6, 2.0)


@pytest.mark.parametrize("epochs", [-1, 1, 2])
def test_data_without_a_length_ends_training_after_so_many_epochs(tmp_path: Path, epochs: int) -> None:
    stream, steps = tiny.stream(tiny.RandomTokens(22)), 6 * abs(epochs)
    settings = {"num_train_epochs": epochs, "save_steps": 6}
    assert epochs_trained(tmp_path, stream, **settings) == (steps, abs(epochs))
    assert epochs_trained(tmp_path, stream, resume=True, **settings) == (steps, abs(epochs))
    assert epochs_trained(tmp_path, stream, resume=True, num_train_epochs=3) == (18, 3.0)


def test_a_part_of_an_epoch_of_unknown_length_is_refused(tmp_path: Path) -> None:
    stream = tiny.stream(tiny.RandomTokens(22))
    with pytest.raises(DataError, match=r"num_train_epochs: 0.5 is no whole number, and .*; set whole epochs, max_st"):
        epochs_trained(tmp_path / "refused", stream, num_train_epochs=0.5)
    assert epochs_trained(tmp_path / "steps", stream, num_train_epochs=0.5, epoch_train_steps=8)[0] == 4
    assert epochs_trained(tmp_path / "repeated", tiny.stream(tiny.RandomTokens(8)), max_steps=5) == (5, 2.0)
    # of a known length it is rounded up to steps
    assert epochs_trained(tmp_path / "known", tiny.RandomTokens(40), num_train_epochs=1.25)[0] == 13

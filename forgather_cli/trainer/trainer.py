"""The training loop: one for all models, data and strategies.

``Trainer.train`` repeats epochs, ``Trainer.step`` is one optimizer step, ``Strategy.forward_backward`` computes its
gradients. What to do between steps (log, evaluate, save, stop) is decided by absolute step numbers (``schedule``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.callbacks.base import CallbackList, TrainerControl, TrainerState
from forgather_cli.config.batch import BatchPlan, batch_plan
from forgather_cli.config.schema import Config
from forgather_cli.data.loader import EvalLoader, Step, TrainLoader
from forgather_cli.distributed import clip_grad_norm
from forgather_cli.errors import ConfigError, DataError, DivergenceError
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import Batch, Strategy, default_strategy
from forgather_cli.trainer import schedule, setup
from forgather_cli.trainer.arguments import TrainingArguments, as_arguments
from forgather_cli.trainer.evaluate import EvaluationStopped, PredictionOutput, evaluate, predict
from forgather_cli.trainer.host import garbage_collection, out_of_memory_explained, seed_step
from forgather_cli.trainer.metrics import Interval, LateReader, TrainMetrics, flops_per_token
from forgather_cli.trainer.persistence import Persistence

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainOutput:
    """What ``train`` returns; Hugging Face's names. ``training_loss`` is the token-weighted mean over the run."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer:
    """Trains a causal language model; stands in for Hugging Face's Trainer in basic use.

    Give ``model`` or ``model_init`` (a maker of one, possibly on meta, then with
    ``init_weights(part, seed)``); ``args`` as
    TrainingArguments, a dict of them, or a recipe's settings; datasets that are map-style, iterable, or ready
    dataloaders of dicts with ``input_ids`` and ``labels``. ``loss_fn(logits, labels)`` returns the mean over its own
    targets, or takes ``num_items_in_batch``. ``callbacks`` are objects, classes, or (name, object) pairs.
    ``should_stop`` is polled after every step: a truthy value (a signal number) saves and ends training.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Config | TrainingArguments | dict[str, Any] | None = None,
        data_collator: Callable[[list[Any]], Batch] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        *,
        callbacks: Iterable[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_factory: Callable[..., Any] | None = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        lr_scheduler_factory: Callable[..., Any] | None = None,
        optimizer_groups: dict[str, Any] | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        fused_loss_factory: Callable[[nn.Module], Callable[..., Tensor]] | None = None,
        enable_activation_checkpoint_fn: Callable[[nn.Module], Any] | None = None,
        strategy: Strategy | None = None,
        init_weights: Callable[[nn.Module, int], None] | None = None,
        should_stop: Callable[[], int | None] = lambda: None,
        config_tree: dict[str, Any] | None = None,
        data_description: dict[str, Any] | None = None,
    ) -> None:
        if (model is None) == (model_init is None):
            raise ConfigError("model: give a model or a model_init, and not both")
        self.args = as_arguments(args)
        self.processing_class = processing_class
        self.config_tree = config_tree or {}
        self.data_description = data_description or {}
        self.run_dir = RunDir(Path(self.args.output_dir or "trainer_output"))
        self.state = TrainerState(train_batch_size=self.args.per_device_train_batch_size)
        self.control = TrainerControl()
        self.seed = self.args.seed if self.args.seed >= 0 else int.from_bytes(os.urandom(4), "little") >> 1
        self.stopped_by: int | None = None
        self._should_stop = should_stop
        self._data_collator, self._train_dataset, self._eval_dataset = data_collator, train_dataset, eval_dataset
        setup.prepare_process(self.args, self.seed)

        self.strategy = strategy or default_strategy(self.args, loss_fn, fused_loss_factory)
        build = setup.with_activation_checkpointing(
            model_init or (lambda: model), self.args, enable_activation_checkpoint_fn  # type: ignore[arg-type, return-value]
        )
        self.strategy.materialize(build, None if init_weights is None else lambda part: init_weights(part, self.seed))
        setup.compile_parts(self.strategy, self.args)
        self.model: nn.Module = self.strategy.parts[0]
        self._make_optimizer = setup.OptimizerRecipe(
            self.args, optimizers, optimizer_factory, optimizer_cls_and_kwargs, lr_scheduler_factory, optimizer_groups
        )
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.train_loader: TrainLoader | None = None

        self.callbacks = CallbackList()
        for entry in callbacks:
            name, callback = entry if isinstance(entry, tuple) else (None, entry)
            self.callbacks.add(callback, name)
        self._emit("on_init_end")

    # ---------------------------------------------------------------------------------------------- public surface

    def add_callback(self, callback: Any) -> None:
        """Append a callback: an object or a class."""
        self.callbacks.add(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end, or until something stops it; returns the run's metrics.

        ``resume_from_checkpoint`` overrides the setting of that name: True is the newest valid checkpoint in
        ``output_dir`` (a fresh start if there is none), a path is that one.
        """
        self._prepare(self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint)
        try:
            with garbage_collection(self.args) as self.garbage, self.persistence:
                self._emit("on_train_begin")
                self._train()
                metrics = self._finish()
                self._emit("on_train_end")
        except BaseException as error:
            self.callbacks.emit_quietly("on_exception", self.args, self.state, self.control, exception=error)
            raise
        return TrainOutput(self.state.global_step, self.metrics.mean_loss(), metrics)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and perplexity over the whole evaluation split. Builds no optimizer. Emits on_log and on_evaluate."""
        loader = self._eval_loader(eval_dataset)
        metrics = evaluate(self.strategy, loader, prefix=metric_key_prefix, after_batch=lambda: self._on_batch(loader))
        metrics["epoch"] = self.state.epoch
        self._track_best(metrics)
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self._emit("on_log", logs=metrics)
        self._emit("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Logits and labels of every example, and the loss. Builds no optimizer. Emits on_predict."""
        loader = self._eval_loader(test_dataset)
        logits, labels = predict(self.strategy, loader, lambda: self._on_batch(loader))
        metrics: dict[str, float] = {}
        if labels is not None:
            metrics = evaluate(self.strategy, loader, prefix=metric_key_prefix, after_batch=lambda: False)
        self._emit("on_predict", metrics=metrics)
        return PredictionOutput(logits, labels, metrics)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write weights, config and tokenizer as a Hugging Face directory (default: ``output_dir``)."""
        setup.save_model(self.strategy, self.processing_class, Path(output_dir or self.run_dir.root))

    def info(self) -> dict[str, Any]:
        """What is about to be trained, flat and printable."""
        return setup.describe(self)

    # --------------------------------------------------------------------------------------------------- preparation

    def _prepare(self, resume: bool | str) -> None:
        """Build what training needs, restore a checkpoint, and try everything that can fail before the first step."""
        if self._train_dataset is None:
            raise DataError("train_dataset: missing; training needs one")
        self.batch_plan: BatchPlan = batch_plan(self.args, self.strategy.data_size)
        self.persistence = Persistence(self)
        reader = self.persistence.find(resume) if resume else None
        if reader is not None and self.args.seed < 0:
            self.seed = reader.state("trainer")["seed"]  # drawn at random by the first start
        self.train_loader = setup.train_loader(self)
        self._steps_per_epoch = self.args.epoch_train_steps or setup.length(self.train_loader)
        self.state.max_steps = self._total_steps() or 0
        self.optimizer, self.lr_scheduler, callback = self._make_optimizer(self.strategy, self.state.max_steps or None)
        if callback is not None:
            self.callbacks.add(callback)
        seq_len = self.data_description.get("seq_len", 0)
        self.metrics = TrainMetrics(
            self.strategy.device,
            self.strategy.data_group,
            sum(flops_per_token(part, seq_len) for part in self.strategy.parts),
            self.args.speed_metrics_start_step,
        )
        self._norms = LateReader(self.strategy.device)
        self._saved_step: int | None = None
        self._eval_metrics: dict[str, float] = {}
        self._parameters = [p for part in self.strategy.parts for p in part.parameters() if p.requires_grad]
        self._has_eval = self._eval_dataset is not None
        if reader is not None:
            self.persistence.restore(reader)
            self.state.max_steps = self._total_steps() or 0
        self.persistence.trial()
        self.state.num_train_epochs = self.args.num_train_epochs
        self.state.logging_steps, self.state.eval_steps = self.args.logging_steps, self.args.eval_steps
        self.state.save_steps = self.args.save_steps
        self._started = time.perf_counter()
        self._start_samples, self._start_tokens = self.metrics.total_samples, self.metrics.total_tokens
        for part in self.strategy.parts:
            part.train()

    def _total_steps(self) -> int | None:
        loader = self.train_loader
        assert loader is not None
        return schedule.total_steps(
            self.args,
            steps_per_epoch=self._steps_per_epoch,
            done=self.state.global_step,
            epochs_done=self._epoch() if self.state.global_step else 0.0,
        )

    def _eval_loader(self, dataset: Any) -> EvalLoader:
        dataset = self._eval_dataset if dataset is None else dataset
        if dataset is None:
            raise DataError("eval_dataset: missing; evaluation needs one (or set eval_strategy=no)")
        return setup.eval_loader(self, dataset)

    # ------------------------------------------------------------------------------------------------------ the loop

    def _train(self) -> None:
        if self.args.eval_on_start and self.state.global_step == 0 and self._has_eval:
            self._evaluate()
        assert self.train_loader is not None
        self._stream: Iterator[Step] = iter(self.train_loader)
        self.metrics.restart_clock()
        while not self._finished():
            self._train_epoch()

    def _train_epoch(self) -> None:
        self.control.should_epoch_stop = False
        self._emit("on_epoch_begin")
        assert self.train_loader is not None
        epoch, before, ended = self.train_loader.epoch, self.state.global_step, False
        while not (self._finished() or self.control.should_epoch_stop or self._epoch_is_full(before)):
            step = self._next_step()
            if step is None:
                ended = True
                break
            self.step(step)
            self._scheduled_work()
        if ended and self.state.global_step == before and not self._epoch_was_resumed():
            raise DataError("train_dataset: gave no training step; it is empty or smaller than one global batch")
        if self.stopped_by is None and not self.control.should_abort_without_save:
            self._end_epoch(epoch, ended)

    def _next_step(self) -> Step | None:
        start = time.perf_counter()
        step = next(self._stream, None)
        self.metrics.waited(time.perf_counter() - start)
        return step

    def _end_epoch(self, epoch: int, data_ended: bool) -> None:
        """Emit on_epoch_end, roll the data over, and do the work that is due once per epoch."""
        data_used_up = data_ended or self.control.should_epoch_stop or self._data_is_used_up()
        loader = self.train_loader
        assert loader is not None
        if data_used_up:
            # before the save below, so that a resume from it begins the next epoch and repeats nothing
            loader.set_epoch(epoch + 1)
            self._stream = iter(loader)
        self.state.epoch = self._epoch()
        if data_ended and self.args.num_train_epochs < 0 and self.state.max_steps == 0:
            self.control.should_training_stop = True
        control = self.control
        control.should_log |= self.args.logging_strategy == "epoch"
        control.should_evaluate |= schedule.eval_due_at_epoch(self.args, self.state.epoch) and self._has_eval
        control.should_save |= self.args.save_strategy == "epoch"
        self._emit("on_epoch_end")
        self._do_asked_work()

    @out_of_memory_explained
    def step(self, step: Step) -> None:
        """One optimizer step: gradients of the whole step, clip, optimizer, scheduler. Waits for nothing on the device."""
        self._emit("on_step_begin")
        seed_step(self.seed, self.state.global_step, self.strategy.data_rank, self.strategy.device)
        targets = torch.full((), max(step.num_targets, 1), dtype=torch.float32, device=self.strategy.device)
        loss = self.strategy.forward_backward(self._microbatches(step), targets)
        norm = self.optimizer.grad_norm() if self.args.fuse_optim_with_backward else self._clip()
        self._emit("on_pre_optimizer_step")
        self.optimizer.step()
        self._emit("on_optimizer_step")
        self.lr_scheduler.step()
        for parameter in self._parameters:
            parameter.grad = None
        tokens = sum(batch["input_ids"].numel() for batch in step.microbatches)
        self.metrics.add(loss, norm, targets=step.num_targets, tokens=tokens, samples=step.num_samples)
        if self.callbacks.handles("on_train_metrics"):
            self._emit("on_train_metrics", loss=loss, grad_norm=norm, tokens=tokens)
        self._last_loss, self._last_norm = loss, norm
        self.state.global_step += 1
        self.state.num_input_tokens_seen = self.metrics.total_tokens
        self._check_finite(self._norms.push(norm))
        if step.num_targets == 0:
            self._warn_no_targets()

    def _microbatches(self, step: Step) -> Iterator[Batch]:
        """The step's micro-batches, with the events that surround each: the strategy asks for the next when it is done."""
        for batch in step.microbatches:
            self._emit("on_forward_backward_begin")
            yield batch
            self._emit("on_forward_backward_end")
            self._emit("on_substep_end")

    def _clip(self) -> Tensor:
        return clip_grad_norm(self._parameters, self.args.max_grad_norm, self.strategy.model_group)

    def _check_finite(self, norm: float | None) -> None:
        if norm is not None and not norm < float("inf"):
            raise DivergenceError(
                f"the gradient norm became {norm} at step {self.state.global_step - LateReader.DELAY}; nothing was saved "
                "since, go on from the newest checkpoint with a lower learning_rate or a smaller max_grad_norm"
            )

    def _warn_no_targets(self) -> None:
        if not getattr(self, "_warned_no_targets", False):
            self._warned_no_targets = True
            log.warning(
                "step %d has no targets (every label is -100): its loss and gradient are 0; check labels and seq_len",
                self.state.global_step,
            )

    # ------------------------------------------------------------------------------------------- work between steps

    def _scheduled_work(self) -> None:
        step, control = self.state.global_step, self.control
        self.state.epoch = self._epoch()
        control.should_log |= schedule.log_due(self.args, step)
        control.should_evaluate |= schedule.eval_due(self.args, step) and self._has_eval
        control.should_save |= schedule.save_due(self.args, step)
        self._emit("on_step_end")
        self._do_asked_work()
        self.garbage.after_step(step)

    def _do_asked_work(self) -> None:
        control = self.control
        if control.should_abort_without_save:
            control.should_training_stop = True
            return
        if control.should_log:
            self._log()
        if control.should_evaluate:
            self._evaluate()
        if control.should_save:
            self._save()
        for path in self.persistence.published():
            self._emit("on_save", checkpoint=path)
        self.stopped_by = self.stopped_by or self._should_stop()

    def _log(self) -> None:
        self.control.should_log = False
        if not self.metrics.pending:
            return
        logs, interval = self.metrics.read()
        logs["learning_rate"] = self.lr_scheduler.get_last_lr()[0]
        logs["epoch"] = self.state.epoch
        self._emit_log(logs, interval)

    def _emit_log(self, logs: dict[str, float], interval: Interval | None) -> None:
        self.state.total_flos = self.metrics.total_flops
        self._emit("on_log_step", logs=logs, interval=interval)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._emit("on_log", logs=logs)

    def _evaluate(self) -> None:
        self.control.should_evaluate = False
        start = time.perf_counter()
        try:
            self._eval_metrics = self.evaluate()
            self._eval_step = self.state.global_step
        except EvaluationStopped:
            log.info("the evaluation at step %d was stopped and discarded", self.state.global_step)
        self.metrics.pause(time.perf_counter() - start)

    def _on_batch(self, loader: EvalLoader) -> bool:
        """After each evaluation batch; True if the evaluation is to be given up."""
        self._emit("on_prediction_step", eval_dataloader=loader)
        self.stopped_by = self.stopped_by or self._should_stop()
        return self.stopped_by is not None or self.control.should_abort_without_save

    def _track_best(self, metrics: dict[str, float]) -> None:
        value = metrics.get(self.args.metric_for_best_model, metrics.get(f"eval_{self.args.metric_for_best_model}"))
        if value is None:
            return
        best = self.state.best_metric
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step

    def _save(self) -> None:
        """Start a checkpoint of this step, unless it has one; evaluate first where the best one is to be known."""
        self.control.should_save = False
        step = self.state.global_step
        if step == self._saved_step:
            return
        needs_metric = self.args.load_best_model_at_end or self.args.eval_on_save
        if needs_metric and self._has_eval and getattr(self, "_eval_step", None) != step and self.stopped_by is None:
            self._evaluate()
        start = time.perf_counter()
        metrics = {"loss": float(self._last_loss), "grad_norm": float(self._last_norm)} if step else {}
        if getattr(self, "_eval_step", None) == step:
            metrics |= self._eval_metrics
        if self.persistence.save(metrics, final=step == self.state.max_steps):
            self._saved_step = step
        self.metrics.pause(time.perf_counter() - start)

    def _finish(self) -> dict[str, float]:
        """The end of training: last log, final checkpoint, best model, the run's metrics."""
        for norm in self._norms.drain():
            self._check_finite(norm)
        control = self.control
        aborted = control.should_abort_without_save
        if self.state.max_steps and self.state.global_step >= self.state.max_steps:
            self._log()
        if not aborted and (self.stopped_by is not None or self.args.save_strategy != "no"):
            self._save()
        self.persistence.wait()
        for path in self.persistence.published():
            self._emit("on_save", checkpoint=path)
        if self.args.load_best_model_at_end and self.stopped_by is None and not aborted:
            self.persistence.load_best()
        metrics = self._final_metrics()
        self._emit_log(metrics, None)
        return metrics

    def _final_metrics(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._started
        steps = self.state.global_step - self.state.resumed_step
        tokens = self.metrics.total_tokens - self._start_tokens
        flops = tokens * (self.metrics.total_flops / max(self.metrics.total_tokens, 1))
        return {
            "train_runtime": seconds,
            "train_samples": self.metrics.total_samples,
            "train_samples_per_second": (self.metrics.total_samples - self._start_samples) / seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": self.metrics.mean_loss(),
            "effective_batch_size": self.batch_plan.global_batch,
            "total_tokens": self.metrics.total_tokens,
            "tokens_per_second": tokens / seconds,
            "total_flops": self.metrics.total_flops,
            "flops_per_second": flops / seconds,
            "epoch": self.state.epoch,
        }

    # -------------------------------------------------------------------------------------------------- small facts

    def _finished(self) -> bool:
        if self.control.should_training_stop or self.stopped_by is not None:
            return True
        return bool(self.state.max_steps) and self.state.global_step >= self.state.max_steps

    def _epoch(self) -> float:
        """Epochs done, with the fraction of the current one where the length is known."""
        loader = self.train_loader
        assert loader is not None
        if self.args.epoch_train_steps:
            return self.state.global_step / self.args.epoch_train_steps
        length = self._steps_per_epoch
        if not length:
            return float(loader.epoch)
        return loader.epoch + min(1.0, self._steps_of_epoch() / length)

    def _epoch_is_full(self, first_step: int) -> bool:
        length = self.args.epoch_train_steps
        return bool(length) and self.state.global_step > first_step and self.state.global_step % length == 0  # type: ignore[operator]

    def _data_is_used_up(self) -> bool:
        """True if map-style data has no whole step left in this epoch; other data tells when it is asked for one."""
        loader = self.train_loader
        assert loader is not None
        length = setup.length(loader)
        return "stream" not in loader.state_dict() and length is not None and self._steps_of_epoch() >= length

    def _steps_of_epoch(self) -> int:
        """Steps of this epoch that are done, by the number of samples, so that it holds after a change of batch size."""
        assert self.train_loader is not None
        return -(-int(self.train_loader.state_dict()["sample"]) // self.train_loader.global_batch_size)

    def _epoch_was_resumed(self) -> bool:
        return self.state.resumed_step == self.state.global_step and self.state.resumed_step > 0

    def _emit(self, event: str, **kwargs: Any) -> None:
        if not self.callbacks.handles(event):
            return
        kwargs.setdefault("eval_dataloader", None)
        self.callbacks.emit(
            event,
            self.args,
            self.state,
            self.control,
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            train_dataloader=self.train_loader,
            trainer=self,
            **kwargs,
        )


"""The training loop: one for all models, data and strategies.

``Trainer.train`` repeats epochs, ``Trainer.step`` is one optimizer step, ``Strategy.forward_backward`` computes its
gradients. What to do between steps (log, evaluate, save, stop) is decided by absolute step numbers (``schedule``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.callbacks.base import CallbackList, NoWriter, TrainerControl, TrainerState
from forgather_cli.checkpoint.gather import gather
from forgather_cli.config import schedule
from forgather_cli.config.batch import batch_plan
from forgather_cli.config.schema import Config, TrainerOption
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.loader import EvalLoader, Microbatched, TrainLoader
from forgather_cli.distributed import clip_grad_norm, cpu_group, world
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.models.parts import trainable_parameters
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import Batch, Strategy, default_strategy
from forgather_cli.trainer import results, setup
from forgather_cli.trainer.arguments import TrainingArguments, as_arguments, placed
from forgather_cli.trainer.best import track_best
from forgather_cli.trainer.describe import describe
from forgather_cli.trainer.device_errors import evaluation_explained, step_explained
from forgather_cli.trainer.epochs import Epochs, Microbatches, WorldStep
from forgather_cli.trainer.evaluate import (
    PredictionOutput,
    Predictions,
    Uninterrupted,
    evaluate,
    in_rounds,
    users_metrics,
)
from forgather_cli.trainer.from_python import Objects, checked_config, described_data
from forgather_cli.trainer.metrics import Flops, TrainMetrics
from forgather_cli.trainer.optimizers import OptimizerRecipe, as_group_settings
from forgather_cli.trainer.process import garbage_collection, seed_step
from forgather_cli.trainer.recovery import Recovery
from forgather_cli.trainer.resume import Persistence
from forgather_cli.trainer.run_files import RunFiles
from forgather_cli.trainer.step_end import BetweenSteps
from forgather_cli.trainer.stopping import Stopping

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainOutput:
    """What ``train`` returns; Hugging Face's names. ``training_loss`` is the token-weighted mean over the run."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer:
    """Trains a causal language model; stands in for Hugging Face's Trainer in basic use.

    Give ``model`` or ``model_init`` (makes one, possibly on meta, then with ``init_weights(part, seed)``); ``args``
    as TrainingArguments, a dict of them, or a recipe's settings; datasets that are map-style, iterable, or ready
    dataloaders of dicts with ``input_ids`` and ``labels``. ``loss_fn(logits, labels)`` returns the mean over its own
    targets, or takes ``num_items_in_batch``. ``callbacks`` are objects, classes, or (name, object) pairs.
    ``should_stop`` is polled after every step: a truthy value (a signal number) on any rank saves and ends training on
    all, and ``on_stop`` is called with it.

    In a job of several ranks all of them make a Trainer and call its methods alike; the process group exists before.
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
        compute_metrics: Callable[[Any], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        strategy: Strategy | TrainerOption | str | None = None,
        init_weights: Callable[[nn.Module, int], None] | None = None,
        should_stop: Callable[[], int | None] = lambda: None,
        on_stop: Callable[[int], None] = lambda signum: None,
        config_tree: dict[str, Any] | None = None,
        data_description: dict[str, Any] | None = None,
    ) -> None:
        if (model is None) == (model_init is None):
            raise ConfigError("model: give a model or a model_init, and not both")
        if loss_fn is not None and fused_loss_factory is not None:
            raise ConfigError("loss_fn: excludes fused_loss_factory, got both; give one")
        self.args, made_strategy = placed(as_arguments(args), strategy)
        self.processing_class = processing_class
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.train_dataset, self.eval_dataset, self.data_collator = train_dataset, eval_dataset, data_collator
        self.config_tree = config_tree or {}
        self.data_description = data_description or {}
        logging_dir = None if self.args.logging_dir is None else Path(self.args.logging_dir)
        self.run_dir = RunDir(Path(self.args.output_dir or "trainer_output"), logging_dir)
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.used_lr: float | None = None
        """Of the newest update."""
        self.train_loader: TrainLoader | None = None
        self.eval_loader: EvalLoader | None = None
        self._warned_no_targets = False
        self._make_optimizer = OptimizerRecipe(
            self.args,
            optimizers,
            optimizer_factory,
            optimizer_cls_and_kwargs,
            lr_scheduler_factory,
            as_group_settings(optimizer_groups),
        )
        self._files: RunFiles | None = None
        if isinstance(self.args, TrainingArguments):
            objects = Objects(
                model=model,
                model_init=model_init,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                optimizer=self._make_optimizer,
                loss=loss_fn or fused_loss_factory,
                made_strategy=made_strategy,
                enable_checkpointing=enable_activation_checkpoint_fn,
            )
            config = checked_config(self.args, objects)
            self._files = RunFiles(self, config)
            self.config_tree, self.data_description = self._files.tree, described_data(objects)
            callbacks = [*self._files.callbacks(config, given := list(callbacks)), *given]

        self.strategy = made_strategy or default_strategy(self.args, loss_fn, fused_loss_factory)
        self.world, self.cpu_group = world(), cpu_group()
        self.seed = self._agreed_seed()
        setup.prepare_process(self.args, self.seed)
        self.state, self.control = self._fresh_state(), TrainerControl()
        self.stopping = Stopping(self, should_stop, on_stop)
        spec = setup.model_spec(
            model_init or partial(_itself, model),
            self.args,
            self.strategy,
            init=None if init_weights is None else lambda part: init_weights(part, self.seed),
            enable_checkpointing=enable_activation_checkpoint_fn,
        )
        self.strategy.materialize(spec)
        self.model: nn.Module = self.strategy.parts[0]
        self.collate_fn = setup.collate_fn(self.args, self.model, data_collator)
        self.num_parameters = setup.num_parameters(self.strategy.parts, self.cpu_group)

        self.callbacks = CallbackList()
        for entry in callbacks:
            name, callback = entry if isinstance(entry, tuple) else (None, entry)
            self.callbacks.add(callback, name)
        self.emit("on_init_end")

    # ---------------------------------------------------------------------------------------------- public surface

    def add_callback(self, callback: Any) -> None:
        """Append a callback: an object or a class."""
        self.callbacks.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback: this object, or the first of this class; None if there is none."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """``pop_callback`` without the answer."""
        self.callbacks.pop(callback)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end, or until something stops it; returns the run's metrics.

        ``resume_from_checkpoint`` overrides the setting of that name: True is the newest valid checkpoint in
        ``output_dir`` (a fresh start if there is none), a path is that one.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if self._files is None:  # whoever gave a recipe's settings has the directory
            return self._train(resume)
        with self._files.taken(resume=resume is not False):
            return self._train(resume)

    def _train(self, resume: bool | str) -> TrainOutput:
        self._prepare(resume)
        try:
            with garbage_collection(self.args) as self._garbage, self.persistence:
                self.emit("on_train_begin")
                self._between_steps.at_start()
                while not self._finished():
                    self._train_epoch()
                    if self._finished():
                        self._between_steps.last_look()  # which may find that training goes on, some steps back
                metrics = self._between_steps.finish()
                self.emit("on_train_end")
                self.recovery.raise_if_diverged()
        except BaseException as error:
            self.emit("on_exception", quietly=True, exception=error)
            raise
        return TrainOutput(self.state.global_step, self.metrics.mean_loss(), metrics)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and perplexity over the whole evaluation split. Builds no optimizer. Emits on_log and on_evaluate."""
        what = f"the evaluation at step {self.state.global_step}"
        predictions = None if self.compute_metrics is None else self._predictions()
        metrics = self._evaluated(eval_dataset, metric_key_prefix, what, self.stopping, predictions)[1]
        metrics["epoch"] = self.state.epoch
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self.emit("on_log", logs=metrics)
        self.emit("on_evaluate", metrics=metrics)
        track_best(self.args, self.state, metrics)  # after it: Hugging Face's early stopping compares with the old best
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Logits and labels of every example, the loss, and the metrics of ``compute_metrics``. Builds no optimizer.
        Emits on_predict.
        """
        arrays, metrics = self._evaluated(
            test_dataset, metric_key_prefix, "the prediction", Uninterrupted(), self._predictions()
        )
        self.emit("on_predict", metrics=metrics)
        return PredictionOutput(arrays.get("predictions"), arrays.get("labels"), metrics)

    def _predictions(self) -> Predictions | None:
        args = self.args
        if args.prediction_loss_only:
            return None
        return Predictions(
            self.strategy,
            preprocess=self.preprocess_logits_for_metrics,
            with_inputs="inputs" in args.include_for_metrics,
            with_losses="loss" in args.include_for_metrics,
            keep=args.eval_accumulation_steps or 1,
        )

    def _evaluated(
        self, dataset: Any, prefix: str, what: str, interrupts: Any, predictions: Predictions | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Collective. What the model says of a split, by name, where ``predictions`` keeps it; and the metrics."""
        rounds = in_rounds(self._eval_loader(dataset), self.cpu_group, interrupts)
        on_batch = partial(self.emit, "on_prediction_step")
        with evaluation_explained(what, rounds, self.args, self.strategy, self.optimizer) as watched:
            metrics = evaluate(
                self.strategy, watched, self.world, prefix=prefix, on_batch=on_batch, predictions=predictions
            )
        arrays = {} if predictions is None else predictions.gathered(self.cpu_group)
        if self.compute_metrics is not None and arrays.get("labels") is not None:
            metrics |= users_metrics(self.compute_metrics, arrays, prefix)
        return arrays, metrics

    def get_train_dataloader(self) -> Microbatched:
        """Collective. One epoch of this rank's training batches, from its beginning, in the order of training."""
        if self.train_dataset is None:
            raise DataError("train_dataset: missing; give the Trainer one")
        self.batch_plan = batch_plan(self.args, self.strategy.data_size, multiple_of=self.strategy.batch_multiple)
        return Microbatched(setup.train_loader(self))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EvalLoader:
        """Collective. This rank's batches of a split (default: ``eval_dataset``), every example once over all ranks."""
        return self._eval_loader(eval_dataset)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0 of all."""
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.state.is_local_process_zero

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of ``split`` (train, eval, test), on rank 0."""
        if self.is_world_process_zero():
            results.show(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` into ``output_dir``, and with ``combined`` add to ``all_results.json``."""
        if self.is_world_process_zero():
            results.save(self.run_dir.root, split, metrics, combined=combined)

    def save_state(self) -> None:
        """Write the counters and the log history as ``trainer_state.json`` into ``output_dir``."""
        if self.is_world_process_zero():
            results.write(self.run_dir.root / "trainer_state.json", asdict(self.state))

    def save_model(self, output_dir: str | None = None) -> None:
        """Write weights, config and tokenizer as a Hugging Face directory (default: ``output_dir``)."""
        setup.save_model(self, Path(output_dir or self.run_dir.root))

    @property
    def tensorboard(self) -> Any:
        """The run's TensorBoard writer (``add_scalar``, ``add_histogram``, ``add_image``, ``add_figure``, ...): that of
        the active TensorBoard callback. On other ranks than 0, outside training and without such a callback one that
        does nothing. Ask for it at each use: after a rollback it is another one.
        """
        found = (getattr(callback, "tb_writer", None) for callback in self.callbacks.by_name.values())
        return next((writer for writer in found if writer is not None), NoWriter())

    def info(self) -> dict[str, Any]:
        """What is about to be trained, flat and printable."""
        return describe(self)

    # --------------------------------------------------------------------------------------------------- preparation

    @cached_property
    def data_ranks(self) -> DataRanks | None:
        """Collective. The ranks as data sees them, with a group that rank 0 may send batches over; None alone."""
        if self.world.size == 1:
            return None
        return DataRanks(cpu_group(), self.world.rank, self.strategy.data_rank)

    def _agreed_seed(self) -> int:
        """Collective. The setting's, or a random one of rank 0."""
        drawn = int.from_bytes(os.urandom(4), "little") >> 1
        return self.args.seed if self.args.seed >= 0 else gather(drawn, self.cpu_group)[0]

    def _fresh_state(self) -> TrainerState:
        return TrainerState(
            train_batch_size=self.args.per_device_train_batch_size,
            is_world_process_zero=self.world.rank == 0,
            is_local_process_zero=int(os.environ.get("LOCAL_RANK", "0")) == 0,
        )

    def _prepare(self, resume: bool | str) -> None:
        """Build what training needs, restore a checkpoint, and try everything that can fail before the first step."""
        if self.train_dataset is None:
            raise DataError("train_dataset: missing; training needs one")
        self.state = self._fresh_state()
        self.control = TrainerControl()
        self.stopping.begin()
        args, state, strategy = self.args, self.state, self.strategy
        self.batch_plan = batch_plan(args, strategy.data_size, multiple_of=strategy.batch_multiple)
        self.persistence, self.recovery = Persistence(self), Recovery(self)
        reader = self.persistence.find(resume) if resume else None
        if reader is not None and args.seed < 0:
            self.seed = reader.state("trainer")["seed"]  # drawn at random by the first start
        self.train_loader = setup.train_loader(self)
        ticket, look_ahead = self.stopping.ticket, self.cpu_group is not None
        self.epochs = Epochs(args, state, self.control, self.train_loader, ticket, look_ahead=look_ahead)
        self.epochs.reckon()
        self.optimizer, self.lr_scheduler, callback = self._make_optimizer(strategy, state.max_steps or None)
        if callback is not None:
            self.callbacks.add(callback)
        self._parameters = [p for _, p in trainable_parameters(strategy.parts)]  # once where two parts share one
        self._flops = Flops.of(strategy.parts, self.cpu_group)
        self.metrics = TrainMetrics(
            strategy.device,
            self.world,
            args.speed_metrics_start_step,
            norms_differ=strategy.averaging is not None,
            may_overflow=strategy.scaler is not None,
        )
        if reader is not None:
            self.persistence.restore(reader)
            self.epochs.reckon()
        self.recovery.begin(reader)
        self.persistence.trial()
        if self.eval_dataset is not None and schedule.evaluates(args):
            self._eval_loader(None)
        state.num_train_epochs = args.num_train_epochs
        state.logging_steps, state.eval_steps, state.save_steps = args.logging_steps, args.eval_steps, args.save_steps
        self._between_steps = BetweenSteps(self)
        for part in strategy.parts:
            part.train()

    def _eval_loader(self, dataset: Any) -> EvalLoader:
        dataset = self.eval_dataset if dataset is None else dataset
        if dataset is None:
            raise DataError("eval_dataset: missing; evaluation needs one (or set eval_strategy=no)")
        if self.eval_loader is None or self.eval_loader.dataset is not dataset:
            self.eval_loader = setup.eval_loader(self.args, self.strategy, dataset, self.data_ranks, self.collate_fn)
        return self.eval_loader

    # ------------------------------------------------------------------------------------------------------ the loop

    def _train_epoch(self) -> None:
        """Steps until the data or the epoch ends, or training does; then the work that is due once per epoch."""
        control, epochs, data_ended = self.control, self.epochs, False
        epochs.begin()
        self.emit("on_epoch_begin")
        while not (self._finished() or control.should_epoch_stop or epochs.is_full()):
            start = time.perf_counter()
            step = epochs.next_step()
            self.metrics.waited(time.perf_counter() - start)
            if step is None:
                data_ended = True
                break
            loss, norm = self.step(step)
            self.state.epoch = epochs.done()
            self._between_steps.after_step(loss, norm)
            self._garbage.after_step(self.state.global_step)
        if self.stopped_by is not None or control.should_abort_without_save:
            return  # in the middle of an epoch, which a resume ends
        epochs.end(data_ended=data_ended)  # before a save, so that a resume from it begins the next epoch
        self._between_steps.after_epoch()

    @step_explained
    def step(self, step: WorldStep) -> tuple[Tensor, Tensor | None]:
        """One optimizer step: gradients of the whole step, clip, optimizer, scheduler. Waits for the device under fp16
        alone: a step whose gradients overflowed is counted, but leaves weights, moments and schedule as they are.

        Returns this rank's share of the loss and the global gradient norm before clipping, both 0-dim on the device; no
        norm of a step that was skipped.
        """
        strategy, state = self.strategy, self.state
        self.emit("on_step_begin")
        seed_step(self.seed, state.global_step, self.world.rank, strategy.device)
        targets = torch.full((), max(step.counts.targets, 1), dtype=torch.float32, device=strategy.device)
        loss = strategy.forward_backward(Microbatches(step.microbatches, self.emit), targets)
        norm, scaler = self._clipped(), strategy.scaler
        skipped = scaler is not None and scaler.overflowed(norm)
        if not skipped:
            self._apply_gradients()
        for parameter in self._parameters:
            parameter.grad = None
        self._count(step, loss, norm, skipped=skipped)
        state.global_step += 1
        state.num_input_tokens_seen = self.metrics.total_tokens
        if not skipped:
            self.recovery.watch(norm)
            return loss, norm
        assert scaler is not None
        self.recovery.overflowed(scaler)
        return loss, None

    def _clipped(self) -> Tensor:
        """Collective. The global gradient norm, of gradients that are ready for the optimizer afterwards."""
        args, strategy = self.args, self.strategy
        if args.fuse_optim_with_backward:
            norm: Tensor = self.optimizer.grad_norm(strategy.model_group, strategy.duplicates)
        else:
            scale = 1.0 if strategy.scaler is None else strategy.scaler.scale
            group, duplicates = strategy.model_group, strategy.duplicates
            norm = clip_grad_norm(self._parameters, args.max_grad_norm, group, duplicates, loss_scale=scale)
        return norm.to(strategy.device)  # of gradients that are kept in host memory (fsdp2 with cpu_offload)

    def _apply_gradients(self) -> None:
        self.emit("on_pre_optimizer_step")
        self.optimizer.step()
        if self.strategy.averaging is not None:
            self.strategy.averaging.after_optimizer_step()
        self.emit("on_optimizer_step")
        self.used_lr = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()

    def _count(self, step: WorldStep, loss: Tensor, norm: Tensor, *, skipped: bool) -> None:
        """Add a step to the metrics; sums stay on the device."""
        targets, tokens, samples = step.counts.targets, step.counts.tokens, step.counts.samples
        flops = self._flops.of_tokens(tokens, step.counts.square_lengths)
        add = self.metrics.add_skipped if skipped else self.metrics.add
        add(loss, norm, targets=targets, tokens=tokens, samples=samples, flops=flops)
        if self.callbacks.handles("on_train_metrics"):
            self.emit("on_train_metrics", loss=loss, grad_norm=norm, tokens=tokens)
        if targets == 0 and not self._warned_no_targets:
            self._warned_no_targets = True
            log.warning(
                "step %d has no targets (every label is -100): its loss and gradient are 0; check labels and seq_len",
                self.state.global_step + 1,
            )

    # ------------------------------------------------------------------------------------------------ for its helpers

    @property
    def stopped_by(self) -> int | None:
        """The signal that ends training on all ranks."""
        return self.stopping.signum

    def _finished(self) -> bool:
        control = self.control
        if control.should_training_stop or control.should_abort_without_save or self.stopped_by is not None:
            return True
        return bool(self.state.max_steps) and self.state.global_step >= self.state.max_steps

    def poll_stop(self) -> bool:
        """Collective. True if any rank has been told to stop: the run is to end. Waits for all ranks."""
        return self.stopping.poll()

    def emit(self, event: str, *, quietly: bool = False, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Send an event to the callbacks that handle it, with the run's objects; see ``CallbackList``.

        ``state``: another one than the run's present one.
        """
        if not self.callbacks.handles(event):
            return
        send = self.callbacks.emit_quietly if quietly else self.callbacks.emit
        send(
            event,
            self.args,
            state or self.state,
            self.control,
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            train_dataloader=self.train_loader,
            eval_dataloader=self.eval_loader,
            trainer=self,
            **kwargs,
        )


def _itself(model: nn.Module | None) -> nn.Module:
    assert model is not None
    return model

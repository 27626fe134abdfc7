"""The training loop: one for all models, data and strategies.

``Trainer.train`` prepares and repeats ``_train_epoch``; ``step`` is one optimizer step, whose gradients
``Strategy.forward_backward`` computes. ``StepEnd`` decides by absolute step numbers what follows a step: log,
evaluate, save, stop.
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

from forgather_cli.callbacks.base import BuiltIn, CallbackList, NoWriter, TrainerCallback, TrainerControl, TrainerState
from forgather_cli.checkpoint.components import Sharing
from forgather_cli.config import schedule
from forgather_cli.config.batch import batch_plan
from forgather_cli.config.schema import Config, TrainerOption
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.loader import EvalLoader, MicrobatchLoader
from forgather_cli.distributed import clip_grad_norm, cpu_group, gather, world
from forgather_cli.errors import ConfigError, DataError, PartError
from forgather_cli.launch.exit_status import ExitStatus
from forgather_cli.loss import loss_and_outputs
from forgather_cli.models.parts import trainable_parameters
from forgather_cli.optim.build import Optimizers
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import Batch, Strategy, check_shares
from forgather_cli.trainer import from_python
from forgather_cli.trainer.arguments import (
    RecipeArguments,
    TrainingArguments,
    as_arguments,
    script_settings,
    with_strategy,
)
from forgather_cli.trainer.build import collate_fn, eval_loader, model_spec, num_parameters, strategy_of, train_loader
from forgather_cli.trainer.checkpoints import RESERVED, Checkpoints, drawn_seed, save_model, write_side_files
from forgather_cli.trainer.device_errors import explain_model, explain_step
from forgather_cli.trainer.epochs import Epochs, MicrobatchEvents, StepData
from forgather_cli.trainer.evaluate import (
    PredictionOutput,
    Predictions,
    evaluate,
    has_samples,
    tasks_of,
    track_best,
    users_metrics,
)
from forgather_cli.trainer.finish import finish
from forgather_cli.trainer.from_python import Objects, RunFiles, ScriptJob, built_in, described_data, script_files
from forgather_cli.trainer.generate import generated
from forgather_cli.trainer.metrics import Flops, TrainMetrics
from forgather_cli.trainer.optimizers import (
    OptimizerRecipe,
    as_group_settings,
    as_optimizers,
    as_schedule,
    print_groups,
)
from forgather_cli.trainer.outer import outer_loop
from forgather_cli.trainer.own_components import StateComponent, own_components
from forgather_cli.trainer.own_parts import explain_part
from forgather_cli.trainer.process import garbage_collection, prepare_process, seed_step
from forgather_cli.trainer.recovery import Recovery
from forgather_cli.trainer.run import TrainingRun, describe
from forgather_cli.trainer.step_end import StepEnd
from forgather_cli.trainer.step_sync import StepSync, TrainingJob
from forgather_cli.trainer.subclass import checked_overrides

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
    all, and ``on_stop`` is called with it; where a command has started the run, its ``job`` is asked and told instead.
    ``run_files`` takes the run directory while a recipe's settings are trained.

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
        *further: Any,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[Any, Any] | None = None,
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
        data_files: dict[str, str] | None = None,
        run_files: RunFiles | None = None,
        job: TrainingJob | None = None,
        **unknown: Any,
    ) -> None:
        from_python.check_kinds(dict(locals()))
        if (model is None) == (model_init is None):
            raise ConfigError("model: give a model or a model_init, and not both")
        self.args, made_strategy = with_strategy(as_arguments(args), strategy)
        overrides = checked_overrides(type(self), Trainer, self.args, made_strategy=made_strategy is not None)
        self.processing_class = processing_class
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.train_dataset, self.eval_dataset, self.data_collator = train_dataset, eval_dataset, data_collator
        self._warned_no_targets = self._is_training = False
        self._added: list[StateComponent] = []
        root, logs = self.args.output_dir or "trainer_output", self.args.logging_dir
        run_dir = RunDir(Path(root), None if logs is None else Path(logs))
        groups = as_group_settings(optimizer_groups)
        ways = (optimizers or (None, None), optimizer_factory, optimizer_cls_and_kwargs, lr_scheduler_factory)
        self._recipe = OptimizerRecipe(self.args, *ways, groups)
        self.optimizer: Any = None
        """None before training, unless the script sets that of the next one; a ``ParameterOptimizer`` from then on."""
        self.lr_scheduler: Any = None

        # A script's settings and objects are checked, recorded and shown like a recipe.
        callbacks = [each() if isinstance(each, type) else each for each in callbacks or ()]
        enable_activation_checkpoint_fn = from_python.function_of_model(enable_activation_checkpoint_fn)
        self._files = run_files
        if isinstance(self.args, TrainingArguments):
            objects = Objects(
                model=model, model_init=model_init, train_dataset=train_dataset, eval_dataset=eval_dataset,
                optimizer=self._recipe, loss=loss_fn or fused_loss_factory, made_strategy=made_strategy,
                enable_checkpointing=enable_activation_checkpoint_fn, callbacks=built_in(callbacks),
            )  # fmt: skip
            self._files = script_files(run_dir, self.args, objects)
            config_tree, data_description = self._files.tree, described_data(objects)
            callbacks = [*self._files.callbacks, *callbacks]

        # The strategy joins the ranks: from here on they can agree on something.
        compute_loss = self.compute_loss if "compute_loss" in overrides else None
        strategy, self._settings_loss, self._loss, scaler = strategy_of(
            self.args, made_strategy, loss_fn, fused_loss_factory, compute_loss
        )
        here, group = world(), cpu_group()
        drawn = int.from_bytes(os.urandom(4), "little") >> 1
        seed = self.args.seed if self.args.seed >= 0 else gather(drawn, group)[0]
        script = script_settings(self.args)
        prepare_process(self.args, script, seed)

        # The model: built, adapted, cut and filled as the strategy does it.
        spec = model_spec(
            model_init or partial(_same, model),
            self.args,
            strategy,
            init=None if init_weights is None else lambda part: init_weights(part, seed),
            enable_checkpointing=enable_activation_checkpoint_fn,
        )
        try:
            strategy.materialize(spec)
        except (RuntimeError, MemoryError, PartError) as error:
            explain_model(error)
            raise
        check_shares(strategy, here, group)
        self.model: nn.Module = strategy.parts[0]
        self.num_parameters = num_parameters(strategy.parts, group)
        self._collate_fn = collate_fn(script, self.model, data_collator)

        self.run = TrainingRun(
            args=self.args,
            script=script,
            run_dir=run_dir,
            config_tree=config_tree or {},
            data_description=data_description or {},
            data_files=data_files or {},
            world=here,
            cpu_group=group,
            strategy=strategy,
            seed=seed,
            job=job or ScriptJob(should_stop, on_stop, run_dir if self._files and here.rank == 0 else None),
            emit=self.emit,
            write_model_files=lambda directory: write_side_files(self.model, self.processing_class, directory),
            scaler=scaler,
            seed_rank=here.rank,
        )
        self._start_over()
        # the ``args`` of events: a script's own object, or a recipe's settings under Hugging Face's names
        self._event_args: Any = RecipeArguments(self.args) if isinstance(self.args, Config) else self.args
        self.callbacks = CallbackList(callbacks)
        for callback in self.callbacks.by_name.values():
            if isinstance(callback, BuiltIn):
                callback.taken_by(run_dir, self.run.config_tree)
        makers = (getattr(callback, "outer_loop", None) for callback in self.callbacks.by_name.values())
        brought = next((made for make in makers if make is not None and (made := make(self.run)) is not None), None)
        self.run.outer = outer_loop(strategy, here, brought)
        self.emit("on_init_end")

    # ---------------------------------------------------------------------------------------------- public surface

    def add_callback(self, callback: Any) -> None:
        """Append a callback: an object or a class."""
        added = self.callbacks.by_name[self.callbacks.add(callback)]
        if isinstance(added, BuiltIn):
            added.taken_by(self.run_dir, self.run.config_tree)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback: this object, or the first of this class; None if there is none."""
        return self.callbacks.pop(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback: this object, or the first of this class."""
        self.callbacks.pop(callback)

    def add_state_component(
        self,
        key: str,
        object: Any,
        sharing: Sharing | str = Sharing.GLOBAL,
        *,
        required: bool = False,
        process_group: str | None = None,
        group_id: str | int | None = None,
    ) -> None:
        """Have the state of an object in checkpoints, and restored from them; see ``StateComponent``.

        On all ranks alike, before ``train()``; a callback does it in ``on_init_end``. Raises ConfigError.
        """
        if self._is_training:
            raise ConfigError(f"state component {key!r}: training has begun; add it before train(), or in on_init_end")
        self._added.append(StateComponent(key, object, sharing, required, process_group, group_id))

    def get_state_components(self) -> list[StateComponent]:
        """Components of a subclass's own, beside those that are added; asked once for each training, when model and
        optimizer are made."""
        return []

    def get_process_groups(self) -> dict[str, Any]:
        """Process groups of a subclass's own, by the names that its components have for them."""
        return {}

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end, or until something stops it; returns the run's metrics.

        ``resume_from_checkpoint`` overrides the setting of that name: True is the newest valid checkpoint in
        ``output_dir`` (a fresh start if there is none), a path is that one.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if self._files is None:  # a command has started it, and holds the run directory already
            return self._train(resume)
        with self._files.taken(self.run, self.callbacks, self.finish, resume=resume is not False):
            return self._train(resume)

    def _train(self, resume: bool | str) -> TrainOutput:
        try:
            self._prepare(resume)
        except Exception as error:
            explain_part(error, self.run, "before the first step")
            raise
        self._is_training = True
        run, anomaly = self.run, self.args.detect_anomaly
        if anomaly and run.world.rank == 0:
            log.warning("detect_anomaly: every backward pass looks for NaN, and steps take several times as long")
        # set_detect_anomaly, since detect_anomaly warns by itself
        anomaly_mode = torch.autograd.set_detect_anomaly(anomaly or torch.is_anomaly_enabled())
        try:
            with anomaly_mode, garbage_collection(self.args) as self._garbage, self.checkpoints:
                self.emit("on_train_begin")
                if run.outer is not None:
                    run.outer.begin()
                self._step_end.at_start()
                while not self._is_finished():
                    self._train_epoch()
                    if self._is_finished():
                        self._step_end.after_last_step()  # may roll back, and training continues
                metrics = self._step_end.finish()
                self.emit("on_train_end")
                self._recovery.raise_if_diverged()
        except BaseException as error:
            self.emit("on_exception", quietly=True, exception=error)
            raise
        finally:
            self._is_training = False
        return TrainOutput(run.state.global_step, run.metrics.mean_loss(), metrics)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and perplexity over the whole evaluation split. Builds no optimizer. Emits on_log and on_evaluate."""
        state = self.state
        what = f"the evaluation at step {state.global_step}"
        predictions = None
        if self.compute_metrics is not None:
            predictions = Predictions.of(self.run.script, self.strategy, self.preprocess_logits_for_metrics)
        _, metrics = self._evaluated(eval_dataset, metric_key_prefix, what, self.run.sync, predictions)
        metrics["epoch"] = state.epoch
        self.log(metrics)
        self.emit("on_evaluate", metrics=metrics)
        track_best(self.args, state, metrics)  # after it: Hugging Face's early stopping compares with the old best
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Logits and labels of every example, the loss, and the metrics of ``compute_metrics``. Builds no optimizer.
        Emits on_predict.
        """
        predictions = Predictions.of(self.run.script, self.strategy, self.preprocess_logits_for_metrics)
        arrays, metrics = self._evaluated(test_dataset, metric_key_prefix, "the prediction", None, predictions)
        self.emit("on_predict", metrics=metrics)
        return PredictionOutput(arrays.get("predictions"), arrays.get("labels"), metrics)

    def generate(self, prompts: Any, **settings: Any) -> Any:
        """Collective. Each prompt with what the model, as it is now, writes to it; the same on all ranks.

        ``prompts``: a text or a list of texts, which come back as texts; or token ids, a list or tensor of them or a
        list of such, which come back as lists. ``settings``: those of ``config.schema.Sampling``, as of ``forgather
        generate``: max_new_tokens, temperature (0 is greedy), num_beams, seed, stop and so on. A row ends with the
        tokenizer's end token, which is left out, or before a text of ``stop``. Raises ConfigError.
        """
        return generated(self, prompts, settings)

    def _evaluated(
        self, dataset: Any, prefix: str, what: str, sync: StepSync | None, predictions: Predictions | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Collective. The arrays that ``predictions`` keeps of a split, by name, if it is given; and the metrics."""
        run = self.run
        loader = self._eval_loader(dataset)
        with tasks_of(self._loss, loader.dataset, self.processing_class, run.strategy.device) as tasks:
            metrics = evaluate(
                run.strategy,
                loader,
                self.args,
                what=what,
                prefix=prefix,
                on_batch=partial(self.emit, "on_prediction_step"),
                group=run.cpu_group,
                sync=sync,
                predictions=predictions,
                run=run,
                tasks=tasks,
            )
        arrays = {} if predictions is None else predictions.gathered(run.cpu_group)
        if self.compute_metrics is not None and arrays.get("labels") is not None:
            metrics |= users_metrics(self.compute_metrics, arrays, prefix)
        return arrays, metrics

    # ------------------------------------------------------------------------------------- what a subclass may override

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The settings' loss of a micro-batch, 0-dim: its sum over ``num_items_in_batch``, the targets of the step on
        all ranks, or without that its own mean. With ``return_outputs`` (loss, what the model returned).

        An override is called in the place of the settings' loss, in evaluation with ``return_outputs=True``
        (``loss.ComputedLoss``); without one the strategy has that loss and nothing is called.
        """
        assert self._settings_loss is not None
        return loss_and_outputs(self._settings_loss, model, inputs, num_items_in_batch, return_outputs=return_outputs)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Set ``optimizer``, unless it is set, to what the arguments and settings say, and return it: torch's, where
        there is one, or several as a ``ParameterOptimizer``. ``model``: another one than the Trainer's.
        """
        if self.optimizer is None:
            made = self._recipe.optimizer(trainable_parameters(self.strategy.parts if model is None else [model]))
            is_one = isinstance(made, Optimizers) and len(made.optimizers) == 1
            self.optimizer = made.optimizers[0] if is_one else made
        return self.optimizer

    def create_scheduler(self, num_training_steps: int | None, optimizer: Any = None) -> Any:
        """Set ``lr_scheduler``, unless it is set, to what the arguments and settings say, and return it.

        ``num_training_steps``: None where the data do not tell. ``optimizer``: another one than the Trainer's.
        """
        if self.lr_scheduler is None:
            scheduled = as_optimizers(self.optimizer if optimizer is None else optimizer, self._named_parameters)
            self.lr_scheduler = self._recipe.scheduler(scheduled, num_training_steps)
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add numbers to ``state.log_history`` and tell callbacks, which show and write them (on_log).

        ``start_time`` is Hugging Face's: speeds are in the logs already.
        """
        logs.setdefault("epoch", self.state.epoch)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.emit("on_log", logs=logs)

    def get_train_dataloader(self) -> Any:
        """Collective. One epoch of this rank's training batches, from its beginning, in the order of training.

        What an override returns is read as a ready dataloader in the place of ``train_dataset``.
        """
        if self.train_dataset is None:
            raise DataError("train_dataset: missing; give the Trainer one")
        strategy = self.strategy
        self.run.batch_plan = batch_plan(self.args, strategy.data_size, multiple_of=strategy.batch_multiple)
        return MicrobatchLoader(train_loader(self.run, self.train_dataset, self._collate_fn, self._data_ranks))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Collective. This rank's batches of a split (default: ``eval_dataset``), every example once over all ranks.

        What an override returns is read as a ready dataloader in the place of the split.
        """
        run, dataset = self.run, self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise DataError("eval_dataset: missing; evaluation needs one (or set eval_strategy=no)")
        if run.eval_loader is None or run.eval_loader.dataset is not dataset:
            run.eval_loader = eval_loader(self.args, run.strategy, dataset, self._data_ranks, self._collate_fn)
        return run.eval_loader

    # ----------------------------------------------------------------------------------------------- progress and files

    @property
    def state(self) -> TrainerState:
        """How far training is."""
        return self.run.state

    @property
    def control(self) -> TrainerControl:
        """The flags by which callbacks control the loop."""
        return self.run.control

    @property
    def strategy(self) -> Strategy:
        return self.run.strategy

    @property
    def run_dir(self) -> RunDir:
        return self.run.run_dir

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0 of all."""
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.state.is_local_process_zero

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print the metrics of ``split`` (train, eval, test), on rank 0."""
        if self.is_world_process_zero():
            from_python.print_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` into ``output_dir``, and with ``combined`` add to ``all_results.json``."""
        if self.is_world_process_zero():
            from_python.save_metrics(self.run_dir.root, split, metrics, combined=combined)

    def save_state(self) -> None:
        """Write the counters and the log history as ``trainer_state.json`` into ``output_dir``."""
        if self.is_world_process_zero():
            from_python.write_json(self.run_dir.root / "trainer_state.json", asdict(self.state))

    def save_model(self, output_dir: str | None = None) -> None:
        """Write weights, config and tokenizer as a Hugging Face directory (default: ``output_dir``)."""
        save_model(self.run, Path(output_dir or self.run_dir.root))

    @property
    def tensorboard(self) -> Any:
        """The run's TensorBoard writer (``add_scalar``, ``add_histogram``, ``add_image``, ``add_figure``, ...): that of
        the active TensorBoard callback. On other ranks than 0, outside training and without such a callback one that
        does nothing. Read it anew at each use: a rollback replaces it.
        """
        found = (getattr(callback, "tb_writer", None) for callback in self.callbacks.by_name.values())
        return next((writer for writer in found if writer is not None), NoWriter())

    def info(self) -> dict[str, Any]:
        """What is about to be trained, flat and printable."""
        return describe(self.run, self.num_parameters)

    def finish(self) -> ExitStatus:
        """How training ended; rank 0 writes it into the run directory. Raises TrainingError (``finish``)."""
        return finish(self.run, self.callbacks, self.checkpoints)

    # ---------------------------------------------------------------------------------------------------- preparation

    @cached_property
    def _data_ranks(self) -> DataRanks | None:
        """Collective. Which rank reads which data, with a group over which rank 0 may send batches; None alone."""
        here = self.run.world
        return None if here.size == 1 else DataRanks(cpu_group(), here.rank, self.strategy.data_rank)

    def _start_over(self) -> None:
        """Set progress, flags and step sync to those of a run that begins."""
        run, args = self.run, self.args
        run.state, run.control = TrainerState(), TrainerControl()
        run.state.train_batch_size = args.per_device_train_batch_size
        run.state.is_world_process_zero = run.world.rank == 0
        run.state.is_local_process_zero = int(os.environ.get("LOCAL_RANK", "0")) == 0
        run.sync = StepSync(
            run.control,
            run.job,
            group=run.cpu_group,
            world_size=run.world.size,
            copies=run.world.size // run.strategy.data_size,
        )

    def _prepare(self, resume: bool | str) -> None:
        """Make what training needs, restore a checkpoint, and try everything that can fail before the first step."""
        self._start_over()
        run, args, state, strategy = self.run, self.args, self.run.state, self.run.strategy
        run.batch_plan = batch_plan(args, strategy.data_size, multiple_of=strategy.batch_multiple)
        self.checkpoints = Checkpoints(run, self.callbacks.by_name)
        self._recovery = Recovery(run, self.checkpoints)
        reader = self.checkpoints.find(resume) if resume or resume == "" else None
        if reader is not None and args.seed < 0:
            run.seed = drawn_seed(reader)

        config: Any = getattr(self.model, "config", None)  # of a class of transformers
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        if run.world.rank == 0 and (coefficient := getattr(config, "router_aux_loss_coef", None)):
            log.warning(
                "router_aux_loss_coef=%s: the auxiliary loss of the model's router is left out of the loss here, so "
                "that experts may come to be used unevenly",
                coefficient,
            )

        # data, optimizer and metrics, as of step 0
        made = self.get_train_dataloader()
        is_ours = isinstance(made, MicrobatchLoader)
        run.train_loader = made.loader if is_ours else train_loader(run, made, self._collate_fn, self._data_ranks)
        run.epochs = Epochs(
            args,
            state,
            run.control,
            run.train_loader,
            sync=None if run.cpu_group is None else run.sync,
            save_done=lambda: self.checkpoints.is_done,
        )
        run.epochs.update_max_steps()
        self._create_optimizer_and_scheduler(state.max_steps or None)
        self._parameters = [p for _, p in self._named_parameters]  # once where two parts share one
        run.metrics = TrainMetrics(
            strategy.device,
            run.world,
            args.speed_metrics_start_step,
            Flops.of(strategy.parts, run.cpu_group),
            norms_differ=run.ranks_differ,
            may_overflow=run.scaler is not None,
        )

        # as of the checkpoint
        components = [*self._added, *self.get_state_components()]
        self.checkpoints.own = own_components(components, self.get_process_groups(), RESERVED, run.cpu_group)
        if reader is not None:
            self.checkpoints.restore(reader, self._recovery.position)
            run.epochs.update_max_steps()
        self._recovery.begin(reader)
        self.checkpoints.trial()
        can_evaluate = has_samples(run, self.eval_dataset)
        if can_evaluate and schedule.evaluates(args):
            self._eval_loader(None)
        state.num_train_epochs = args.num_train_epochs
        state.logging_steps, state.eval_steps, state.save_steps = args.logging_steps, args.eval_steps, args.save_steps
        self._step_end = StepEnd(
            run, self.checkpoints, self._recovery, self.evaluate, self.log, can_evaluate=can_evaluate
        )
        for part in strategy.parts:
            part.train()

    @property
    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return trainable_parameters(self.strategy.parts)

    def _create_optimizer_and_scheduler(self, total_steps: int | None) -> None:
        """By the methods that a subclass may override, anew for each training, unless the script has set one since."""
        run = self.run
        if self.optimizer is run.optimizer:
            self.optimizer = None
        if self.lr_scheduler is run.lr_scheduler:
            self.lr_scheduler = None
        made = self.create_optimizer()
        run.optimizer = as_optimizers(made if self.optimizer is None else self.optimizer, self._named_parameters)
        made = self.create_scheduler(total_steps)
        run.lr_scheduler = as_schedule(made if self.lr_scheduler is None else self.lr_scheduler, run.optimizer)
        self.optimizer, self.lr_scheduler = run.optimizer, run.lr_scheduler
        if run.script.debug_optimizer_groups:
            print_groups(run.optimizer, self._named_parameters, run.cpu_group)
        for scheduler in run.lr_scheduler.schedulers:
            if isinstance(scheduler, TrainerCallback):
                self.callbacks.add(scheduler)

    def _eval_loader(self, dataset: Any) -> EvalLoader:
        """Collective. ``get_eval_dataloader``, in this rank's batches and on its device."""
        made = self.get_eval_dataloader(dataset)
        if not isinstance(made, EvalLoader):
            made = eval_loader(self.args, self.strategy, made, self._data_ranks, self._collate_fn)
        self.run.eval_loader = made
        return made

    # ------------------------------------------------------------------------------------------------------- the loop

    def _train_epoch(self) -> None:
        """Steps until the data or the epoch ends, or training does; then the work that is due once per epoch."""
        run, control, epochs, data_ended = self.run, self.run.control, self.run.epochs, False
        epochs.begin()
        self.emit("on_epoch_begin")
        while not (self._is_finished() or control.should_epoch_stop or epochs.is_full()):
            if run.outer is not None:
                start = time.perf_counter()
                run.outer.before_step(self.checkpoints.wait)
                run.metrics.exchange_seconds += time.perf_counter() - start
                if self._is_finished():
                    break
            start, data = time.perf_counter(), None
            try:
                data = epochs.next_step()
                run.metrics.data_seconds += time.perf_counter() - start
                if data is None:
                    data_ended = True
                    break
                loss, norm = self.step(data)
            except Exception as error:
                explain_step(error, run, [] if data is None else data.microbatches)
                raise
            run.state.epoch = epochs.done()
            if run.outer is not None:
                run.outer.after_step(data.counts)
            self._step_end.after_step(loss, norm)
            self._garbage.after_step(run.state.global_step)
        if run.sync.signum is not None or control.should_abort_without_save:
            return  # in the middle of an epoch, which a resumed run completes
        epochs.end(data_ended=data_ended)  # before a save, so that a resume from it begins the next epoch
        self._step_end.after_epoch()

    def step(self, data: StepData) -> tuple[Tensor, Tensor | None]:
        """One optimizer step: gradients of the whole step, clip, optimizer, scheduler.

        Waits for the device only under fp16: a step whose gradients overflowed is counted, but leaves weights, moments
        and schedule as they are. Returns this rank's share of the loss and the global gradient norm before clipping
        (None for such a step), both 0-dim on the device.
        """
        run, args, strategy, counts = self.run, self.args, self.run.strategy, data.counts
        scaler = run.scaler
        self.emit("on_step_begin")
        seed_step(run.seed, run.state.global_step, run.seed_rank, strategy.device)
        step_targets = torch.full((), max(counts.targets, 1), dtype=torch.float32, device=strategy.device)
        any_handler = any(map(self.callbacks.handlers.get, MicrobatchEvents.EVENTS))
        batches = MicrobatchEvents(data.microbatches, self.emit) if any_handler else data.microbatches
        loss = strategy.forward_backward(batches, step_targets)

        if args.fuse_optim_with_backward:
            norm: Tensor = run.optimizer.grad_norm(strategy.model_group, strategy.duplicates)
        else:
            norm = clip_grad_norm(
                self._parameters,
                args.max_grad_norm,
                strategy.model_group,
                strategy.duplicates,
                loss_scale=1.0 if scaler is None else scaler.scale,
            )
        norm = norm.to(strategy.device)  # of gradients that are kept in host memory (fsdp2 with cpu_offload)
        skipped = scaler is not None and scaler.overflowed(norm)

        if not skipped:
            self.emit("on_pre_optimizer_step")
            run.optimizer.step()
            if run.outer is not None:
                run.outer.after_optimizer_step()
            self.emit("on_optimizer_step")
            run.used_lr = run.lr_scheduler.learning_rate()
            run.lr_scheduler.step()
        for parameter in self._parameters:
            parameter.grad = None

        run.metrics.add(counts, loss, norm, skipped=skipped)  # sums stay on the device
        self.emit("on_train_metrics", loss=loss, grad_norm=norm, tokens=counts.tokens)
        run.state.global_step += 1
        run.state.num_input_tokens_seen = run.metrics.total_tokens
        if counts.targets == 0 and not self._warned_no_targets:
            self._warned_no_targets = True
            log.warning(
                "step %d has no targets (every label is -100): its loss and gradient are 0; check labels and seq_len",
                run.state.global_step,
            )
        if scaler is not None and skipped:
            self._recovery.overflowed(scaler)
            return loss, None
        self._recovery.watch(norm)
        return loss, norm

    def _is_finished(self) -> bool:
        run, control = self.run, self.run.control
        if control.should_training_stop or control.should_abort_without_save or run.sync.signum is not None:
            return True
        return 0 < run.state.max_steps <= run.state.global_step

    def emit(self, event: str, *, quietly: bool = False, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Send an event to the callbacks that handle it, with the run's objects; see ``CallbackList``.

        ``state`` replaces the run's.
        """
        if not self.callbacks.handlers[event]:
            return
        run = self.run
        send = self.callbacks.emit_quietly if quietly else self.callbacks.emit
        send(
            event,
            self._event_args,
            state or run.state,
            run.control,
            model=self.model,
            processing_class=self.processing_class,
            optimizer=run.optimizer,
            lr_scheduler=run.lr_scheduler,
            train_dataloader=run.train_loader,
            eval_dataloader=run.eval_loader,
            trainer=self,
            **kwargs,
        )


def _same(model: nn.Module | None) -> nn.Module:
    assert model is not None
    return model

"""``Trainer``: the training loop as scripts make and call it, under Hugging Face's names where that library has one."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from forgather_cli.callbacks.base import BuiltIn, NoWriter, TrainerCallback, TrainerControl, TrainerState
from forgather_cli.callbacks.norms import FullParameters
from forgather_cli.callbacks.textgen import as_table
from forgather_cli.checkpoint.components import Component, Sharing
from forgather_cli.config import schedule
from forgather_cli.config.batch import batch_plan
from forgather_cli.config.schema import CallbackPart, Config, TrainerOption
from forgather_cli.data.loaders.collate import CollateFn
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.loader import EvalLoader, MicrobatchLoader, TrainLoader
from forgather_cli.distributed import cpu_group
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.labels import num_targets
from forgather_cli.loss.losses import UserLoss, loss_and_outputs
from forgather_cli.loss.sums import cross_entropy_sum
from forgather_cli.models.parts import trainable_parameters
from forgather_cli.optim.build import Optimizers
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import Batch, Strategy
from forgather_cli.trainer import evaluate as evaluation
from forgather_cli.trainer import from_python
from forgather_cli.trainer.arguments import TrainingArguments, as_arguments, script_settings, with_strategy
from forgather_cli.trainer.build import collate_fn, eval_loader, train_loader
from forgather_cli.trainer.checkpoints import RESERVED, Checkpoints, kept_tensors, load_model, save_model
from forgather_cli.trainer.evaluate import PredictionOutput, Predictions
from forgather_cli.trainer.generate import beginnings, generated
from forgather_cli.trainer.given import Hooks, Objects
from forgather_cli.trainer.optimizers import (
    OptimizerRecipe,
    as_group_settings,
    as_optimizers,
    as_schedule,
    print_groups,
)
from forgather_cli.trainer.own_components import StateComponent, own_components
from forgather_cli.trainer.run import describe
from forgather_cli.trainer.step_sync import StepSync, TrainingJob
from forgather_cli.trainer.subclass import checked_overrides
from forgather_cli.trainer.trainer import Loop


class Trainer(Loop):
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
        run_files: from_python.RunFiles | None = None,
        job: TrainingJob | None = None,
        **unknown: Any,
    ) -> None:
        from_python.check_kinds(dict(locals()))
        if (model is None) == (model_init is None):
            raise ConfigError("model: give a model or a model_init, and not both")
        self.args, made_strategy = with_strategy(as_arguments(args), strategy)
        config = self.args
        if isinstance(config, TrainingArguments):
            config = from_python.config_of(config, model_init if model is None else model, train_dataset)
        overrides = checked_overrides(type(self), Trainer, config, made_strategy=made_strategy is not None)
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.train_dataset, self.do_train = train_dataset, train_dataset is not None
        self.eval_dataset, self.data_collator = eval_dataset, data_collator
        self._added: list[StateComponent] = []
        self.optimizer: Any = None
        """None before training, unless the script sets that of the next one; a ``ParameterOptimizer`` from then on."""
        self.lr_scheduler: Any = None
        groups = as_group_settings(optimizer_groups)
        ways = (optimizers or (None, None), optimizer_factory, optimizer_cls_and_kwargs, lr_scheduler_factory)
        self._recipe = OptimizerRecipe(config, *ways, groups)
        objects = Objects(
            model=model, model_init=model_init, init_weights=init_weights, processing_class=processing_class,
            train_dataset=train_dataset, eval_dataset=eval_dataset, optimizer=self._recipe, made_strategy=made_strategy,
            loss_fn=loss_fn, fused_loss_factory=fused_loss_factory,
            compute_loss=self.compute_loss if "compute_loss" in overrides else None,
            enable_checkpointing=from_python.function_of_model(enable_activation_checkpoint_fn),
            callbacks=[each() if isinstance(each, type) else each for each in callbacks or ()],
        )  # fmt: skip
        if "default_callbacks" in overrides:
            rest = replace(config.callbacks, metrics=None, info=None, progress=None, json=None)
            config = replace(config, callbacks=rest)
            objects.callbacks[:0] = self.default_callbacks()
        logs = None if config.logging_dir is None else Path(config.logging_dir)
        run_dir = RunDir(Path(config.output_dir or "trainer_output"), logs)
        self._files = run_files
        if isinstance(self.args, TrainingArguments):  # checked, recorded and shown like a recipe
            self._files = from_python.script_files(run_dir, self.args, config, objects)
            config_tree, data_description = self._files.tree, from_python.described_data(objects)
            objects.callbacks[:0] = self._files.callbacks
            objects = from_python.constructed(self.args, objects, run_dir)
        hooks = Hooks(
            hold=self._hold, make_train_loader=self._make_train_loader, make_optimizer=self._make_optimizer,
            own_components=self._own_components, prepare_evaluation=self._prepare_evaluation, evaluate=self.evaluate,
            log=self.log,
        )  # fmt: skip
        super().__init__(
            config, script_settings(self.args), objects, hooks, run_dir=run_dir, config_tree=config_tree or {},
            data_description=data_description or {}, data_files=data_files or {},
            job=job or from_python.ScriptJob(should_stop, on_stop, run_dir if self._files else None),
        )  # fmt: skip
        self.train_dataset, self.eval_dataset = map(self._as_the_loss_reads, (self.train_dataset, self.eval_dataset))
        if objects.init_weights is not init_weights:  # made on meta: parameters are empty
            self.load_checkpoint(self.args.resume_from_checkpoint)

    # ------------------------------------------------------------------------------------- callbacks and components

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

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. Each parameter of the model by name and whole, whatever a rank holds of it: on every rank, under
        every strategy, one at a time.

        Names and shapes are those of the whole model, tied ones once, in the same order on all ranks; dtypes those of
        training. A tensor is a copy on the Trainer's device, without gradient, for the caller to keep. All ranks go
        through all of them: they send each other everything, and each has memory for one more. Between averages of
        post-local SGD each rank has its own.
        """
        return FullParameters(self).tensors()

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

    # ----------------------------------------------------------------------------------- evaluation and generation

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss and perplexity over the whole evaluation split. Builds no optimizer. Emits on_log and on_evaluate."""
        state, predictions = self.state, None
        if self.compute_metrics is not None:
            predictions = Predictions.of(self.run.script, self.strategy, self.preprocess_logits_for_metrics)
        what = f"the evaluation at step {state.global_step}"
        _, metrics = self._evaluated(eval_dataset, metric_key_prefix, what, self.run.sync, predictions)
        for callback in self.callbacks.by_name.values():
            metrics |= getattr(callback, "measured_at_evaluation", lambda _: {})(self)
        metrics["epoch"] = state.epoch
        self.log(metrics)
        self.emit("on_evaluate", metrics=metrics)
        # after it: Hugging Face's early stopping compares with the old best
        evaluation.track_best(self.run.config, state, metrics)
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

    def held_out_prompts(self) -> list[list[int]]:
        """Token ids that two held-out examples begin with, of training data where there is none: a chat up to its first
        answer, of text the first tokens, what an encoder reads. The begin token alone where data can be read only once.
        """
        return beginnings(self, self._collate_fn)

    def _evaluated(
        self, dataset: Any, prefix: str, what: str, sync: StepSync | None, predictions: Predictions | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Collective. The arrays that ``predictions`` keeps of a split, by name, if it is given; and the metrics."""
        run = self.run
        loader = self._eval_loader(dataset)
        if self._settings_loss is not None and self._settings_loss.before_evaluation is not None:
            self._settings_loss.before_evaluation(loader.dataset)
        with evaluation.tasks_of(self._loss, loader.dataset, self._token_bytes, run.strategy.device) as tasks:
            metrics = evaluation.evaluate(
                run.strategy, loader, run.config, what=what, prefix=prefix, group=run.cpu_group, sync=sync, run=run,
                on_batch=partial(self.emit, "on_prediction_step"), predictions=predictions, tasks=tasks,
                token_bytes=self._token_bytes, minimised=self._loss,
            )  # fmt: skip
        arrays = {} if predictions is None else predictions.gathered(run.cpu_group)
        if self.compute_metrics is not None and arrays.get("labels") is not None:
            metrics |= evaluation.users_metrics(self.compute_metrics, arrays, prefix)
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
            given = self.optimizer if optimizer is None else optimizer
            scheduled = as_optimizers(given, trainable_parameters(self.strategy.parts))
            self.lr_scheduler = self._recipe.scheduler(scheduled, num_training_steps)
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add numbers to ``state.log_history`` and tell callbacks (on_log): the user's own, which may add to them, then
        those of Forgather, which show and write them.

        ``start_time`` is Hugging Face's: speeds are in the logs already.
        """
        logs.setdefault("epoch", self.state.epoch)
        record = {**logs, "step": self.state.global_step}
        self.state.log_history.append(record)
        self.emit("on_log", whose="own", logs=(told := dict(logs)))
        # what they add, and no more: transformers' PrinterCallback (5.24) takes total_flos out, for what it prints
        told.update(logs)
        whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in told.items()}
        logs.update({name: value.tolist() if hasattr(value, "tolist") else value for name, value in whole.items()})
        record.update(logs | {"step": record["step"]})
        self.emit("on_log", whose="ours", logs=logs)

    def get_train_dataloader(self) -> Any:
        """Collective. One epoch of this rank's training batches, from its beginning, in the order of training.

        What an override returns is read as a ready dataloader in the place of ``train_dataset``.
        """
        if self.train_dataset is None:
            raise DataError("train_dataset: missing; give the Trainer one")
        strategy = self.strategy
        self.run.batch_plan = batch_plan(self.run.config, strategy.data_size, multiple_of=strategy.batch_multiple)
        return MicrobatchLoader(
            train_loader(self.run, self.train_dataset, self._collate_fn, self._data_ranks, self._token_bytes)
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Collective. This rank's batches of a split (default: ``eval_dataset``), every example once over all ranks.

        What an override returns is read as a ready dataloader in the place of the split.
        """
        run, dataset = self.run, self._as_the_loss_reads(self.eval_dataset if eval_dataset is None else eval_dataset)
        if dataset is None:
            raise DataError("eval_dataset: missing; evaluation needs one (or set eval_strategy=no)")
        if run.eval_loader is None or run.eval_loader.dataset is not dataset:
            run.eval_loader = eval_loader(self.run.config, run.strategy, dataset, self._data_ranks, self._collate_fn)
        return run.eval_loader

    def _as_the_loss_reads(self, dataset: Any) -> Any:
        made = None if self._settings_loss is None else self._settings_loss.data
        return dataset if made is None or dataset is None else made(dataset)

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
        """Print a table of the metrics of ``split`` (train, eval, test), sorted by name, on rank 0 (transformers 5.23,
        ``trainer_pt_utils.py: log_metrics``).
        """
        if not self.is_world_process_zero():
            return
        told = {}
        for name, value in sorted(metrics.items()):
            shown = datetime.timedelta(seconds=round(value)) if "_runtime" in name else value
            told[name] = str(round(shown, 4) if isinstance(shown, float) else shown)
        width, places = max(map(len, told), default=0), max(map(len, told.values()), default=0)
        print(f"***** {split} metrics *****")
        for name, text in told.items():
            print(f"  {name:<{width}} = {text:>{places}}")

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write ``<split>_results.json`` into ``output_dir``, and with ``combined`` into ``all_results.json`` what that
        has not yet or no more.
        """
        self._write(f"{split}_results.json", metrics)
        path = self.run_dir.root / "all_results.json"
        if combined and self.is_world_process_zero():
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            self._write(path.name, before | metrics)

    def save_state(self) -> None:
        """Write the counters and the log history as ``trainer_state.json`` into ``output_dir``."""
        self._write("trainer_state.json", asdict(self.state))

    def _write(self, name: str, values: dict[str, Any]) -> None:
        """Into ``output_dir``, on rank 0."""
        if self.is_world_process_zero():
            self.run_dir.root.mkdir(parents=True, exist_ok=True)
            text = json.dumps(values, indent=4, sort_keys=True, default=str) + "\n"
            (self.run_dir.root / name).write_text(text, encoding="utf-8")

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

    # --------------------------------------------------- names of the source documents (docs/python_api.md has a table)

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """Fresh ones of those that every script's run has. What an override returns stands in their place."""
        return [CallbackPart.of_type(name).load_maker()() for name in ("metrics", "info", "progress", "json")]

    def load_best_model(self) -> None:
        """Collective. Load the weights of the best checkpoint that is kept, by ``metric_for_best_model``."""
        self.checkpoint_manager.wait()
        self.checkpoint_manager.load_best()

    def load_checkpoint(self, path: Any) -> None:
        """Collective. Load the weights of the checkpoint at ``path`` now; the next ``train()`` goes on from it. True is
        the newest in ``output_dir``, if there is one.
        """
        run, resume = self.run, path if path is True else str(path)
        if (reader := self.checkpoint_manager.find(resume)) is not None:
            load_model(reader, kept_tensors(run), run.cpu_group)
            run.config = replace(run.config, resume_from_checkpoint=resume)

    @property
    def train_dataloader(self) -> Any:
        """That of the events, from ``train()`` on; before it there is ``get_train_dataloader()``."""
        return self.run.train_loader

    @property
    def checkpoint_manager(self) -> Checkpoints:
        """Collective where there is none yet. ``checkpoints``, which each ``train()`` makes anew."""
        if not hasattr(self, "checkpoints"):
            self.checkpoints = Checkpoints(self.run, self.callbacks.by_name)
        return self.checkpoints

    @cached_property  # in whose place a subclass may set one of its own
    def loss_fn(self) -> Callable[..., Tensor]:
        """``(logits, labels)`` -> the mean over the targets: the script's own function, else cross entropy with the
        settings' ``label_smoothing`` and ``z_loss``.
        """
        if isinstance(self._settings_loss, UserLoss):
            return self._settings_loss.function
        options: Any = {name: getattr(self.run.config.loss, name, 0.0) for name in ("z_loss", "label_smoothing")}
        shift = 0 if getattr(self.model, "is_encoder_decoder", False) else 1

        def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
            total = cross_entropy_sum(logits, labels, shift=shift, **options)
            return total / num_targets(labels, shift).clamp(min=1)

        return loss_fn

    def unwrapped_model(self) -> nn.Module:
        """``model``, which nothing wraps: under fsdp2 with this rank's rows, under pipeline this rank's first stage."""
        return self.model

    def pipeline_generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, generation_config: Any = None, **settings: Any
    ) -> Tensor:
        """Collective. ``generate`` as transformers' ``model.generate``, under every strategy: of prompts (B, T), which
        ``attention_mask`` leaves padding out of, come (B, T + n), padded behind the end of each text.

        ``generation_config``: that library's object, or a dict of ``settings``.
        """
        settings, tokenizer = (as_table(generation_config) or {}) | settings, self.processing_class
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [row[kept > 0].tolist() for row, kept in zip(input_ids, mask, strict=True)]
        whole = generated(self, rows, settings)
        new = [input_ids.new_tensor(ids[len(row) :]) for ids, row in zip(whole, rows, strict=True)]
        pads = settings.get("pad_token_id"), *(getattr(tokenizer, f"{kind}_token_id", None) for kind in ("pad", "eos"))
        return torch.cat((input_ids, pad_sequence(new, True, next((i for i in pads if i is not None), 0))), 1)

    def get_state_components(self) -> list[Any]:
        """Those of Forgather: the model, and from ``train()`` on optimizer, scheduler, trainer, data, rng, callbacks.

        An override returns its own, ``StateComponent`` each, beside these or alone; it is asked once for each training,
        when model and optimizer are made. These are in every checkpoint anyway.
        """
        shared = Sharing.REPLICATED if self.run.strategy.model_group is None else Sharing.PER_RANK
        weights = {"model": self.model, "optimizer": self.run.optimizer}
        held = [Component(key, each, shared) for key, each in weights.items() if each is not None]
        return held if self.run.optimizer is None else [*held, *self.checkpoints.restorable()]

    def get_process_groups(self) -> dict[str, Any]:
        """``ddp_group``, the ranks that read other data for the same layers, and ``pp_group``, those of one pipeline,
        where there are several. An override adds groups of its own, by the names that its components have for them."""
        names = ("ddp_group", "pp_group")
        return {name: group for name in names if (group := getattr(self.run.strategy, name)) is not None}

    # --------------------------------------------------------------------------------------------- what the loop asks

    @contextmanager
    def _hold(self, resume: bool) -> Iterator[None]:
        if self._files is None:  # a command has started it, and holds the run directory already
            yield
            return
        try:
            with self._files.taken(self.run, self.callbacks, self.finish, resume=resume):
                yield
        finally:
            # a Trainer is a cycle: from the garbage collector workers do not hear that they are to end, and each takes
            # 5 s of it (multiprocessing closes their queues first; torchdata 0.11, _shutdown_workers)
            if hasattr(self.run, "epochs"):  # not where its preparation failed
                self.run.epochs.close()
            if self.run.eval_loader is not None:
                self.run.eval_loader.close()

    def _make_train_loader(self) -> TrainLoader:
        made = self.get_train_dataloader()
        if isinstance(made, MicrobatchLoader):
            return made.loader
        return train_loader(self.run, made, self._collate_fn, self._data_ranks, self._token_bytes)

    @cached_property
    def _token_bytes(self) -> Tensor | None:
        return evaluation.token_bytes_of(self.processing_class, self._loss)

    def _make_optimizer(self, total_steps: int | None) -> None:
        """Anew for each training, unless the script has set one since."""
        run, parameters = self.run, trainable_parameters(self.strategy.parts)
        if self.optimizer is run.optimizer:
            self.optimizer = None
        if self.lr_scheduler is run.lr_scheduler:
            self.lr_scheduler = None
        made = self.create_optimizer()
        if self.optimizer is None:  # an override may only return it, and create_scheduler reads it there
            self.optimizer = made
        run.optimizer = as_optimizers(self.optimizer, parameters)
        made = self.create_scheduler(total_steps)
        run.lr_scheduler = as_schedule(made if self.lr_scheduler is None else self.lr_scheduler, run.optimizer)
        self.optimizer, self.lr_scheduler = run.optimizer, run.lr_scheduler
        if run.script.debug_optimizer_groups:
            print_groups(run.optimizer, parameters, run.cpu_group)
        for scheduler in run.lr_scheduler.schedulers:
            if isinstance(scheduler, TrainerCallback):
                self.callbacks.add(scheduler)

    def _own_components(self) -> list[Component]:
        given = [*self._added, *self.get_state_components()]
        return own_components(given, self.get_process_groups(), RESERVED, self.run.cpu_group)

    def _prepare_evaluation(self) -> bool:
        can_evaluate = evaluation.has_samples(self.run, self.eval_dataset)
        if can_evaluate and schedule.evaluates(self.run.config):
            self._eval_loader(None)
        return can_evaluate

    @cached_property
    def _collate_fn(self) -> CollateFn | None:
        return collate_fn(self.run.script, self.run.model, self.data_collator)

    @cached_property
    def _data_ranks(self) -> DataRanks | None:
        """Collective. Which rank reads which data, with a group over which rank 0 may send batches; None alone."""
        here = self.run.world
        return None if here.size == 1 else DataRanks(cpu_group(), here.rank, self.strategy.data_rank)

    def _eval_loader(self, dataset: Any) -> EvalLoader:
        """Collective. ``get_eval_dataloader``, in this rank's batches and on its device."""
        made = self.get_eval_dataloader(dataset)
        if not isinstance(made, EvalLoader):
            made = eval_loader(self.run.config, self.strategy, made, self._data_ranks, self._collate_fn)
        self.run.eval_loader = made
        return made

"""The training loop: one for all models, data and strategies. It reads top to bottom, as things happen.

``Loop`` makes strategy and model; ``train`` prepares and repeats ``_train_epoch``; ``step`` is one optimizer step,
whose gradients ``Strategy.forward_backward`` computes; then comes ``StepEnd.after_step`` (step_end.py): log, evaluate,
save, stop. What scripts call is ``Trainer`` (script.py), which is this loop under Hugging Face's names.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.callbacks.base import BuiltIn, CallbackList, TrainerControl, TrainerState
from forgather_cli.config.batch import batch_plan
from forgather_cli.config.schema import Config
from forgather_cli.data.loaders.collate import Step
from forgather_cli.data.text.auto_tokenizer import warn_of_other_ids
from forgather_cli.distributed import clip_grad_norm, cpu_group, gather, world
from forgather_cli.errors import PartError
from forgather_cli.hardware import kernels_in_order, shadowed_cudnn
from forgather_cli.launch.exit_status import ExitStatus
from forgather_cli.models.attention import kernels_of
from forgather_cli.models.parts import trainable_parameters
from forgather_cli.precision.dtypes import compute_dtype
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import check_shares
from forgather_cli.trainer.arguments import RecipeArguments, ScriptSettings
from forgather_cli.trainer.build import model_spec, num_parameters, print_model, strategy_of
from forgather_cli.trainer.checkpoints import Checkpoints, drawn_seed, frozen_base, write_side_files
from forgather_cli.trainer.device_errors import explain_model, explain_step
from forgather_cli.trainer.epochs import Epochs, MicrobatchEvents
from forgather_cli.trainer.finish import finish
from forgather_cli.trainer.given import Hooks, Objects
from forgather_cli.trainer.metrics import Flops, TrainMetrics
from forgather_cli.trainer.outer import outer_loop
from forgather_cli.trainer.own_parts import explain_part
from forgather_cli.trainer.process import garbage_collection, prepare_process, seed_step
from forgather_cli.trainer.recovery import Recovery
from forgather_cli.trainer.run import TrainingRun
from forgather_cli.trainer.step_end import StepEnd
from forgather_cli.trainer.step_sync import StepSync, TrainingJob

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainOutput:
    """What ``train`` returns; Hugging Face's names. ``training_loss`` is the token-weighted mean over the run."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Loop:
    """Trains a model as a config says. What no config holds are ``objects``; what its owner does are ``hooks``."""

    def __init__(
        self,
        config: Config,
        script: ScriptSettings,
        objects: Objects,
        hooks: Hooks,
        *,
        run_dir: RunDir,
        config_tree: dict[str, Any],
        data_description: dict[str, Any],
        data_files: dict[str, str],
        job: TrainingJob,
    ) -> None:
        """``script``: a script's TrainingArguments, or the defaults of what only these have. The others: see
        ``TrainingRun``.
        """
        self._hooks, self.processing_class = hooks, objects.processing_class
        self._warned_no_targets = self._is_training = False

        # The strategy joins the ranks: from here on they can agree on something.
        strategy, self._settings_loss, self._loss, scaler = strategy_of(config, objects)
        here, group = world(), cpu_group()
        drawn = int.from_bytes(os.urandom(4), "little") >> 1
        seed = config.seed if config.seed >= 0 else gather(drawn, group)[0]
        prepare_process(config, script, seed)

        # The model: built, adapted, cut and filled as the strategy does it.
        fill = objects.init_weights
        spec = model_spec(
            objects.make_model,
            config,
            strategy,
            init=None if fill is None else lambda part: fill(part, seed),
            seed=seed,
            losses=(self._settings_loss, self._loss),
            enable_checkpointing=objects.enable_checkpointing,
            checkpointing_options=script.gradient_checkpointing_kwargs,
        )
        try:
            strategy.materialize(spec)
        except (RuntimeError, MemoryError, PartError) as error:
            explain_model(error)
            raise
        check_shares(strategy, here, group)
        if config.debug_model_params or config.debug_split_model or config.debug_pipeline:
            print_model(config, strategy.parts)
        self.model: nn.Module = strategy.parts[0]
        self.num_parameters = num_parameters(strategy.parts, group)
        base = frozen_base(config, group)
        held = [] if base is None else gather([name for name, _ in trainable_parameters(strategy.parts)], group)

        self.run = TrainingRun(
            config=config, script=script, run_dir=run_dir, config_tree=config_tree, data_description=data_description,
            data_files=data_files, world=here, cpu_group=group, strategy=strategy, seed=seed, scaler=scaler,
            seed_rank=here.rank, job=job, emit=self.emit, base=base, trained=frozenset(chain(*held)),
            write_model_files=lambda directory: write_side_files(
                self.model, self.processing_class, directory, self.run
            ),
        )  # fmt: skip
        self._start_over()
        # the ``args`` of events: a script's own object, or a recipe's settings under Hugging Face's names
        self._event_args: Any = script if self.run.is_script else RecipeArguments(config)
        self.callbacks = CallbackList(objects.callbacks)
        for callback in self.callbacks.by_name.values():
            if isinstance(callback, BuiltIn):
                callback.taken_by(run_dir, config_tree)
        makers = (getattr(callback, "outer_loop", None) for callback in self.callbacks.by_name.values())
        brought = next((made for make in makers if make is not None and (made := make(self.run)) is not None), None)
        self.run.outer = outer_loop(strategy, here, brought)
        self.emit("on_init_end")

    def _start_over(self) -> None:
        """Set progress, flags and step sync to those of a run that begins."""
        run = self.run
        run.state, run.control = TrainerState(), TrainerControl()
        run.state.num_processes = run.world.size
        run.state.train_batch_size = run.config.per_device_train_batch_size
        run.state.is_world_process_zero = run.world.rank == 0
        run.state.is_local_process_zero = int(os.environ.get("LOCAL_RANK", "0")) == 0
        run.sync = StepSync(
            run.control,
            run.job,
            group=run.cpu_group,
            world_size=run.world.size,
            copies=run.world.size // run.strategy.data_size,
        )

    # ------------------------------------------------------------------------------------------------------- the loop

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the end, or until something stops it; returns the run's metrics.

        ``resume_from_checkpoint`` overrides the setting of that name: True is the newest valid checkpoint in
        ``output_dir`` (a fresh start if there is none), a path is that one.
        """
        run, config, resume = self.run, self.run.config, resume_from_checkpoint
        resume = config.resume_from_checkpoint if resume is None else resume
        with self._hooks.hold(resume is not False):
            try:
                self._prepare(resume)
            except Exception as error:
                explain_part(error, run, "before the first step")
                raise
            self._is_training = True
            if config.detect_anomaly and run.world.rank == 0:
                log.warning("detect_anomaly: every backward pass looks for NaN, and steps take several times as long")
            if run.world.rank == 0:
                length, dtype = run.data_description.get("seq_len") or 1024, compute_dtype(config.precision)
                if (name := kernels_of(self.model, run.strategy.device, dtype, length)) is not None:
                    log.info("attention: %s", name)
                if (found := shadowed_cudnn()) is not None:
                    log.warning("%s; %s", *found)
            kernels = kernels_in_order(run.strategy.device)
            # set_detect_anomaly, since detect_anomaly warns by itself
            anomaly_mode = torch.autograd.set_detect_anomaly(config.detect_anomaly or torch.is_anomaly_enabled())
            try:
                with anomaly_mode, kernels, garbage_collection(config) as self._garbage, self.checkpoints:
                    self.emit("on_train_begin")
                    if run.outer is not None:
                        run.outer.begin()
                    self._step_end.at_start()
                    while not run.is_finished():
                        self._train_epoch()
                        if run.is_finished():
                            self._step_end.after_last_step()  # may roll back, and training continues
                    metrics = self._step_end.end_of_training()
                    self.emit("on_train_end")
                    self._recovery.raise_if_diverged()
            except BaseException as error:
                self.emit("on_exception", quietly=True, exception=error)
                raise
            finally:
                self._is_training = False
        return TrainOutput(run.state.global_step, run.metrics.mean_loss(), metrics)

    def _prepare(self, resume: bool | str) -> None:
        """Make what training needs, restore a checkpoint, and try everything that can fail before the first step."""
        self._start_over()
        run, config, state, strategy = self.run, self.run.config, self.run.state, self.run.strategy
        run.batch_plan = batch_plan(config, strategy.data_size, multiple_of=strategy.batch_multiple)
        self.checkpoints = Checkpoints(run, self.callbacks.by_name)
        self.checkpoints.clean()
        self._recovery = Recovery(run, self.checkpoints)
        reader = self.checkpoints.find(resume) if resume is not False else None
        if reader is not None and config.seed < 0:
            run.seed = drawn_seed(reader)

        if run.world.rank == 0:
            warn_of_other_ids(self.model, config.data)
        model: Any = getattr(self.model, "config", None)  # of a class of transformers
        model = model.get_text_config() if hasattr(model, "get_text_config") else model
        if run.world.rank == 0 and (coefficient := getattr(model, "router_aux_loss_coef", None)):
            log.warning(
                "router_aux_loss_coef=%s: the auxiliary loss of the model's router is left out of the loss here, so "
                "that experts may come to be used unevenly",
                coefficient,
            )

        # data, optimizer and metrics, as of step 0
        run.train_loader = self._hooks.make_train_loader()
        sync = None if run.cpu_group is None else run.sync
        run.epochs = Epochs(
            config, state, run.control, run.train_loader, sync=sync, save_done=lambda: self.checkpoints.is_done
        )
        run.epochs.update_max_steps()
        self._hooks.make_optimizer(state.max_steps or None)
        self._parameters = [p for _, p in trainable_parameters(strategy.parts)]  # once where two parts share one
        data = run.train_loader.data
        data.keeps_sources = self._loss is not None and self._loss.sums_rows and not config.trainer.cuts_layers
        names = [f"loss/{name}" for name in data.names if data.keeps_sources]
        if len(names) < len(data.names) and run.world.rank == 0:
            log.info("loss/NAME is not logged: this loss, or this trainer, gives one sum of all sources")
        names += () if self._loss is None else self._loss.names
        run.metrics = TrainMetrics(
            strategy.device, run.world, config.speed_metrics_start_step, Flops.of(strategy.parts, run.cpu_group),
            norms_differ=run.ranks_differ, may_overflow=run.scaler is not None, sources=data.names, names=names,
        )  # fmt: skip
        if self._loss is not None:
            self._loss.sums = run.metrics.named if names else None

        # as of the checkpoint
        self.checkpoints.own = self._hooks.own_components()
        if reader is not None:
            self.checkpoints.restore(reader, self._recovery.position)
            run.epochs.update_max_steps()
        self._recovery.begin(reader)
        self.checkpoints.trial()
        self.checkpoints.note_data(starts=True)
        can_evaluate = self._hooks.prepare_evaluation()
        state.num_train_epochs = config.num_train_epochs
        if self._settings_loss is not None and self._settings_loss.before_training is not None:
            self._settings_loss.before_training(self, reader)
        self._step_end = StepEnd(run, self.checkpoints, self._recovery, self._hooks, can_evaluate=can_evaluate)
        without_dropout = self._loss is not None and self._loss.without_dropout
        if without_dropout and run.world.rank == 0:
            log.info(
                "loss=%s: nothing is dropped, whatever the dropout settings say",
                getattr(config.loss, "type", config.loss),
            )
        for part in strategy.parts:
            part.train(not without_dropout)

    def _train_epoch(self) -> None:
        """Steps until the data or the epoch ends, or training does; then the work that is due once per epoch."""
        run, control, epochs, data_ended = self.run, self.run.control, self.run.epochs, False
        epochs.begin()
        self.emit("on_epoch_begin")
        while not (run.is_finished() or control.should_epoch_stop or epochs.is_full()):
            if run.outer is not None:
                start = time.perf_counter()
                run.outer.before_step(self.checkpoints.wait)
                run.metrics.exchange_seconds += time.perf_counter() - start
                if run.is_finished():
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

    def step(self, data: Step) -> tuple[Tensor, Tensor | None]:
        """One optimizer step: gradients of the whole step, clip, optimizer, scheduler.

        Waits for the device only under fp16: a step whose gradients overflowed is counted, but leaves weights, moments
        and schedule as they are. Returns this rank's share of the loss and the global gradient norm before clipping
        (None for such a step), both 0-dim on the device.
        """
        run, config, strategy, counts = self.run, self.run.config, self.run.strategy, data.counts
        scaler = run.scaler
        self.emit("on_step_begin")
        seed_step(run.seed, run.state.global_step, run.seed_rank, strategy.device)
        step_targets = torch.full((), max(counts.units, 1), dtype=torch.float32, device=strategy.device)
        any_handler = any(map(self.callbacks.handlers.get, MicrobatchEvents.EVENTS))
        batches = MicrobatchEvents(data.microbatches, self.emit) if any_handler else data.microbatches
        loss = strategy.forward_backward(batches, step_targets)
        if self._settings_loss is not None and self._settings_loss.before_update is not None:
            self._settings_loss.before_update(run)

        if config.fuse_optim_with_backward:
            norm: Tensor = run.optimizer.grad_norm(strategy.model_group, strategy.duplicates)
        else:
            norm = clip_grad_norm(
                self._parameters,
                config.max_grad_norm,
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

    def finish(self) -> ExitStatus:
        """How training ended; rank 0 writes it into the run directory. Raises TrainingError (``finish``)."""
        return finish(self.run, self.callbacks, self.checkpoints)

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

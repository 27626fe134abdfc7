"""What follows a step: log, evaluate, save, in this order, when due by absolute step numbers; and the end of a run."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from torch import Tensor

from forgather_cli.config import schedule
from forgather_cli.distributed import all_sum
from forgather_cli.errors import NotFiniteError
from forgather_cli.run_dir import step_of
from forgather_cli.trainer.checkpoints import Checkpoints
from forgather_cli.trainer.evaluate import EvaluationStopped, agree_on_best
from forgather_cli.trainer.given import Hooks
from forgather_cli.trainer.metrics import Interval
from forgather_cli.trainer.recovery import Recovery
from forgather_cli.trainer.run import TrainingRun

log = logging.getLogger(__name__)


class StepEnd:
    """Logs, evaluates and saves when that is due, or when a command or a callback has set it in ``control``."""

    def __init__(
        self, run: TrainingRun, checkpoints: Checkpoints, recovery: Recovery, hooks: Hooks, *, can_evaluate: bool
    ) -> None:
        """``can_evaluate``: there is an evaluation dataset."""
        self._run, self._checkpoints, self._recovery = run, checkpoints, recovery
        self._hooks, self._can_evaluate = hooks, can_evaluate
        self._evaluated_step: int | None = None
        self._discarded_step: int | None = None
        self._eval_metrics: dict[str, float] = {}
        self._saved_step = recovery.saved_step
        self._newest: tuple[Tensor, Tensor] | None = None  # loss and gradient norm of the last update
        self._started = time.perf_counter()
        self._before = self._counts()

    def at_start(self) -> None:
        """Before the first step: a signal that came during set-up, and the first evaluation."""
        run = self._run
        run.sync.poll()
        if run.config.eval_on_start and run.state.global_step == 0 and self._can_evaluate:
            self._evaluate()
        run.metrics.restart_clock()

    def after_step(self, loss: Tensor, norm: Tensor | None) -> None:
        """Set in ``control`` what is due, emit on_step_end, where callbacks may add to that or take it back, and do it.

        ``norm`` None: the step was skipped, and the weights are those of the step before.
        """
        if norm is not None:
            self._newest = (loss, norm)
        config, control, state = self._run.config, self._run.control, self._run.state
        step = state.global_step
        control.should_log |= schedule.log_due(config, step, state.logging_steps)
        control.should_evaluate |= schedule.eval_due(config, step, state.eval_steps) and self._can_evaluate
        control.should_save |= schedule.save_due(config, step, state.save_steps)
        self._run.job.stepped(step)
        self._run.emit("on_step_end")
        self._do_what_is_due()

    def after_epoch(self) -> None:
        """As ``after_step`` at the end of an epoch, with on_epoch_end."""
        config, control = self._run.config, self._run.control
        control.should_log |= config.logging_strategy == "epoch"
        control.should_evaluate |= schedule.eval_due_at_epoch(config, self._run.state.epoch) and self._can_evaluate
        control.should_save |= config.save_strategy == "epoch"
        self._run.emit("on_epoch_end")
        self._do_what_is_due()

    def after_last_step(self) -> None:
        """All steps are done: read what is still on the device. If that shows a divergence, a rollback may follow, and
        training goes on from there."""
        control = self._run.control
        if control.should_abort_without_save:
            return
        self._recovery.watch_last()
        if control.divergence is None and self._run.sync.signum is None:
            self._log()
        if control.divergence is not None:
            self._roll_back()

    def end_of_training(self) -> dict[str, float]:
        """The end of training, also after a stop: last log, final checkpoint, best model. Returns the run's metrics."""
        run = self._run
        aborted, stopped = run.control.should_abort_without_save, run.sync.signum is not None
        if not (aborted or stopped):  # a run stopped by a signal is resumed later: its log interval stays open
            self._log()
        if run.outer is not None:
            run.outer.after_last_step()
        # by save_strategy, a signal, or a command or callback
        if not aborted and (stopped or run.control.should_save or run.config.save_strategy != "no"):
            self._save()
        start = time.perf_counter()
        self._checkpoints.wait()
        self._emit_on_save()
        if run.outer is not None and not (aborted or stopped):
            begun = time.perf_counter()
            run.outer.end()
            run.metrics.exchange_seconds += time.perf_counter() - begun
            start += time.perf_counter() - begun
        if run.config.load_best_model_at_end and not (aborted or stopped):
            self._checkpoints.load_best()
        if run.config.average_last is not None and run.config.save_strategy != "no" and not (aborted or stopped):
            self._checkpoints.average_last(run.config.average_last)
        run.metrics.save_seconds += time.perf_counter() - start
        metrics = self._run_metrics()
        self._emit_log(metrics, None)
        return metrics

    def _do_what_is_due(self) -> None:
        """Agree with all ranks on requests; then log, evaluate, save and roll back as ``control`` says."""
        run, control, several = self._run, self._run.control, self._run.cpu_group is not None
        start = time.perf_counter()
        self._checkpoints.wait_if_late()
        run.metrics.save_seconds += time.perf_counter() - start
        if several:
            start = time.perf_counter()
            agreed = run.sync.read()
            run.metrics.sync_seconds += time.perf_counter() - start
            if agreed is not None:
                run.sync.apply_requests(agreed.requests)
                if agreed.saves_done:  # so this does not wait for a writer; before a new save begins
                    self._emit_on_save()
        if control.should_abort_without_save:
            control.should_training_stop = True
            return
        if control.divergence is None:  # log, evaluation and save may each make a callback report a divergence
            if control.should_log:
                self._log()
            if control.should_evaluate and control.divergence is None:
                self._evaluate()
                is_best = run.state.best_global_step == run.state.global_step and control.divergence is None
                control.should_save |= run.config.save_strategy == "best" and is_best
            if control.should_save and control.divergence is None and not control.should_abort_without_save:
                self._save()
        if control.divergence is not None:
            self._roll_back()
        if not several:
            self._emit_on_save()
            run.sync.poll()

    def _roll_back(self) -> None:
        """Collective. Go back to a checkpoint if a callback asks for it. What was due at this step is dropped, except a
        save that was requested.
        """
        if not self._recovery.is_due():
            return
        self._checkpoints.wait()
        self._emit_on_save()
        counts = self._counts()
        record = self._recovery.roll_back()
        # speeds count the steps that were rolled back too
        self._before = [b + now - was for b, now, was in zip(self._before, self._counts(), counts, strict=True)]
        control = self._run.control
        control.should_log = control.should_evaluate = False
        control.should_save &= not schedule.save_due(self._run.config, record.from_step, self._run.state.save_steps)
        self._saved_step, self._evaluated_step, self._newest = record.to_step, None, None

    def _emit_on_save(self) -> None:
        """Emit on_save for each checkpoint published since the last call."""
        for path in self._checkpoints.published():
            self._recovery.published(path)
            state = self._run.state
            saved = replace(state, global_step=step_of(path) or state.global_step)
            self._run.emit("on_save", state=saved, checkpoint=path)

    # ------------------------------------------------------------------------------------------------------------ log

    def _log(self) -> None:
        run = self._run
        run.control.should_log = False
        if not run.metrics.pending:
            return
        logs, interval = run.metrics.read()
        # used_lr is None if all steps of this interval were before a resume
        logs["learning_rate"] = run.lr_scheduler.learning_rate() if run.used_lr is None else run.used_lr
        if run.scaler is not None:
            logs["loss_scale"] = run.scaler.scale
        logs["epoch"] = run.state.epoch
        passes = run.epochs.loader.data.passes(run.epochs.state_dict())
        logs |= {f"epoch/{name}": number for name, number in passes.items()}
        self._emit_log(logs, interval)

    def _emit_log(self, logs: dict[str, float], interval: Interval | None) -> None:
        run = self._run
        run.state.total_flos = run.metrics.total_flops
        run.emit("on_log_step", logs=logs, interval=interval)
        self._hooks.log(logs)

    # ----------------------------------------------------------------------------------------------- evaluate and save

    def _evaluate(self) -> None:
        run, step = self._run, self._run.state.global_step
        run.control.should_evaluate = False
        start = time.perf_counter()
        try:
            self._eval_metrics = self._hooks.evaluate()
            self._evaluated_step = step
            agree_on_best(run.config, run.state, self._eval_metrics, run.cpu_group)
        except EvaluationStopped:
            self._discarded_step = step
            log.info("the evaluation at step %d was stopped and discarded", step)
        run.metrics.evaluation_seconds += time.perf_counter() - start

    def _save(self) -> None:
        """Start a checkpoint of this step, unless it has one. Evaluates first if the checkpoint needs the metric.

        Where ranks' weights differ between averages (``trainer.outer``), it is saved at the next average.
        """
        run, step = self._run, self._run.state.global_step
        if not run.weights_are_equal:
            return
        run.control.should_save = False
        if step == self._saved_step:
            return
        needs_metric = run.config.load_best_model_at_end or run.config.eval_on_save
        done_with = step in (self._evaluated_step, self._discarded_step)
        if needs_metric and self._can_evaluate and not done_with and run.sync.signum is None:
            self._evaluate()
        start = time.perf_counter()
        metrics: dict[str, float] = {}
        if self._newest is not None:
            loss, norm = self._newest
            metrics = {"loss": float(all_sum(loss.clone(), run.world.group)), "grad_norm": float(norm)}
        if self._evaluated_step == step:
            metrics |= self._eval_metrics
        try:
            if self._checkpoints.save(metrics, rollbacks=self._recovery.behind):
                self._saved_step = step
        except NotFiniteError as error:
            self._recovery.not_finite(str(error))
        run.metrics.save_seconds += time.perf_counter() - start

    def _run_metrics(self) -> dict[str, Any]:
        """Speeds are of this process; totals of the whole run."""
        run, metrics = self._run, self._run.metrics
        seconds = time.perf_counter() - self._started
        samples, steps, tokens, flops = (
            (now - before) / seconds for now, before in zip(self._counts(), self._before, strict=True)
        )
        return {
            "train_runtime": seconds,
            "train_samples": metrics.total_samples,
            "train_samples_per_second": samples,
            "train_steps_per_second": steps,
            "train_loss": metrics.mean_loss(),
            "effective_batch_size": run.batch_plan.global_batch,
            "total_tokens": metrics.total_tokens,
            "total_targets": metrics.total_targets,
            "tokens_per_second": tokens,
            "total_flops": metrics.total_flops,
            "flops_per_second": flops,
            "epoch": run.state.epoch,
            **metrics.seconds_by_kind(seconds),
        }

    def _counts(self) -> list[float]:
        """Samples, steps, tokens and floating-point operations of the run so far."""
        metrics = self._run.metrics
        return [metrics.total_samples, self._run.state.global_step, metrics.total_tokens, metrics.total_flops]

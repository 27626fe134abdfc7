"""What happens between steps, in this order and by absolute step numbers: log, evaluate, save; and the end of a run."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forgather_cli.config import schedule
from forgather_cli.distributed import all_sum
from forgather_cli.errors import NotFiniteError
from forgather_cli.run_dir import step_of
from forgather_cli.trainer.best import check_metric
from forgather_cli.trainer.evaluate import EvaluationStopped
from forgather_cli.trainer.metrics import Interval

if TYPE_CHECKING:
    from forgather_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


class BetweenSteps:
    """Does what is due, or what a callback asked for through ``control``, while one ``Trainer.train`` runs."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._args, self._state, self._control = trainer.args, trainer.state, trainer.control
        self._can_evaluate = trainer.eval_dataset is not None
        self._evaluated_step: int | None = None
        self._discarded_step: int | None = None
        self._eval_metrics: dict[str, float] = {}
        self._saved_step: int | None = trainer.state.resumed_step or None
        self._newest: tuple[Tensor, Tensor] | None = None  # loss and gradient norm of the last update
        self._started = time.perf_counter()
        self._before = self._counts()

    def at_start(self) -> None:
        """Before the first step: a signal that came during set-up, and the first evaluation."""
        self._trainer.poll_stop()
        if self._args.eval_on_start and self._state.global_step == 0 and self._can_evaluate:
            self._evaluate()
        self._trainer.metrics.restart_clock()

    def after_step(self, loss: Tensor, norm: Tensor | None) -> None:
        """Emit on_step_end with what is due already asked for, so that callbacks may add to it or take it back.

        ``norm`` None: the step was skipped, and the weights are those of the one before.
        """
        if norm is not None:
            self._newest = (loss, norm)
        args, control, step = self._args, self._control, self._state.global_step
        control.should_log |= schedule.log_due(args, step)
        control.should_evaluate |= schedule.eval_due(args, step) and self._can_evaluate
        control.should_save |= schedule.save_due(args, step)
        self._trainer.emit("on_step_end")
        self._do()

    def after_epoch(self) -> None:
        """The same at the end of an epoch, around on_epoch_end."""
        args, control = self._args, self._control
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= schedule.eval_due_at_epoch(args, self._state.epoch) and self._can_evaluate
        control.should_save |= args.save_strategy == "epoch"
        self._trainer.emit("on_epoch_end")
        self._do()

    def last_look(self) -> None:
        """All steps are done: read what is still on the device, which may take the run back by some of them."""
        if self._control.should_abort_without_save:
            return
        self._trainer.recovery.watch_last()
        if self._looks_sound and self._trainer.stopped_by is None:
            self._log()
        self._go_back_if_asked()

    def finish(self) -> dict[str, float]:
        """The end of training: last log, final checkpoint, best model. Returns the run's metrics, logged too."""
        persistence = self._trainer.persistence
        aborted = self._control.should_abort_without_save
        stopped = self._trainer.stopped_by is not None
        if not (aborted or stopped):  # a run stopped by a signal goes on later: its interval stays open
            self._log()
        if not aborted and self._trainer.stopping.wants_save:
            if (averaging := self._trainer.strategy.averaging) is not None:
                averaging.settle()
            self._save()
        persistence.wait()
        self._deliver_saves()
        if self._args.load_best_model_at_end and not (aborted or stopped):
            persistence.load_best()
        metrics = self._run_metrics()
        self._emit_log(metrics, None)
        return metrics

    def _do(self) -> None:
        control, several = self._control, self._trainer.cpu_group is not None
        if several and self._trainer.stopping.read_ticket():  # before a new save: what all ranks know to be published
            self._deliver_saves()
        if control.should_abort_without_save:
            control.should_training_stop = True
            return
        if control.should_log and self._looks_sound:
            self._log()
        if control.should_evaluate and self._looks_sound:
            self._evaluate()
        if control.should_save and self._looks_sound and not control.should_abort_without_save:
            self._save()
        self._go_back_if_asked()
        if not several:
            self._deliver_saves()
            self._trainer.poll_stop()

    @property
    def _looks_sound(self) -> bool:
        """No callback has seen the run diverge."""
        return self._control.divergence is None

    def _go_back_if_asked(self) -> None:
        """Collective. Roll the run back. What was due at this step is not; a save that somebody asked for still is."""
        if not self._trainer.recovery.is_due():
            return
        self._trainer.persistence.wait()
        self._deliver_saves()
        counts = self._counts()
        record = self._trainer.recovery.roll_back()
        # what was trained in vain has been trained all the same
        self._before = [b + now - was for b, now, was in zip(self._before, self._counts(), counts, strict=True)]
        control = self._control
        control.should_log = control.should_evaluate = False
        control.should_save &= not schedule.save_due(self._args, record.from_step)
        self._saved_step, self._evaluated_step, self._newest = record.to_step, None, None

    def _deliver_saves(self) -> None:
        for path in self._trainer.persistence.published():
            saved = replace(self._state, global_step=step_of(path) or self._state.global_step)
            self._trainer.emit("on_save", state=saved, checkpoint=path)

    # ------------------------------------------------------------------------------------------------------------ log

    def _log(self) -> None:
        self._control.should_log = False
        trainer = self._trainer
        if not trainer.metrics.pending:
            return
        logs, interval = trainer.metrics.read()
        used = trainer.used_lr  # None: the open interval is of steps before a resume
        logs["learning_rate"] = trainer.lr_scheduler.get_last_lr()[0] if used is None else used
        if (scaler := trainer.strategy.scaler) is not None:
            logs["loss_scale"] = scaler.scale
        logs["epoch"] = self._state.epoch
        self._emit_log(logs, interval)

    def _emit_log(self, logs: dict[str, float], interval: Interval | None) -> None:
        self._state.total_flos = self._trainer.metrics.total_flops
        self._trainer.emit("on_log_step", logs=logs, interval=interval)
        self._state.log_history.append({**logs, "step": self._state.global_step})
        self._trainer.emit("on_log", logs=logs)

    # ----------------------------------------------------------------------------------------------- evaluate and save

    def _evaluate(self) -> None:
        self._control.should_evaluate = False
        start = time.perf_counter()
        try:
            self._eval_metrics = self._trainer.evaluate()
            self._evaluated_step = self._state.global_step
            check_metric(self._args, self._state.global_step, self._eval_metrics, self._trainer.cpu_group)
        except EvaluationStopped:
            self._discarded_step = self._state.global_step
            log.info("the evaluation at step %d was stopped and discarded", self._discarded_step)
        self._trainer.metrics.pause(time.perf_counter() - start)

    def _save(self) -> None:
        """Start a checkpoint of this step, unless it has one; evaluate first where the best one is to be known.

        Where ranks' weights differ between averages, it waits for the next one.
        """
        averaging = self._trainer.strategy.averaging
        if averaging is not None and not averaging.settled:
            return
        self._control.should_save = False
        step = self._state.global_step
        if step == self._saved_step:
            return
        needs_metric = self._args.load_best_model_at_end or self._args.eval_on_save
        done_with = step in (self._evaluated_step, self._discarded_step)
        if needs_metric and self._can_evaluate and not done_with and self._trainer.stopped_by is None:
            self._evaluate()
        start = time.perf_counter()
        try:
            if self._trainer.persistence.save(self._metrics_of_step(), final=step == self._state.max_steps):
                self._saved_step = step
        except NotFiniteError as error:
            self._trainer.recovery.not_finite(str(error))
        self._trainer.metrics.pause(time.perf_counter() - start)

    def _metrics_of_step(self) -> dict[str, float]:
        """Collective."""
        metrics: dict[str, float] = {}
        if self._newest is not None:
            loss = all_sum(self._newest[0].clone(), self._trainer.world.group)
            metrics = {"loss": float(loss), "grad_norm": float(self._newest[1])}
        if self._evaluated_step == self._state.global_step:
            metrics |= self._eval_metrics
        return metrics

    def _run_metrics(self) -> dict[str, Any]:
        """Speeds are of this process; totals of the whole run."""
        metrics, state = self._trainer.metrics, self._state
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
            "effective_batch_size": self._trainer.batch_plan.global_batch,
            "total_tokens": metrics.total_tokens,
            "tokens_per_second": tokens,
            "total_flops": metrics.total_flops,
            "flops_per_second": flops,
            "epoch": state.epoch,
        }

    def _counts(self) -> list[float]:
        """Samples, steps, tokens and floating-point operations of the run so far."""
        metrics = self._trainer.metrics
        return [metrics.total_samples, self._state.global_step, metrics.total_tokens, metrics.total_flops]

"""EarlyStopping: end a run whose evaluation no longer gets better."""

from __future__ import annotations

import logging
import math
from typing import Any

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.config.schema import EarlyStoppingSettings
from forgather_cli.documents.fields import COUNT, NUMBER, check_fields, optional

logger = logging.getLogger(__name__)


class EarlyStopping(BuiltIn[EarlyStoppingSettings]):
    """Stops after ``patience`` evaluations in a row that do not beat the best metric by more than ``threshold``.

    Lower is better, unless the metric is ``metric_for_best_model`` and ``greater_is_better`` says otherwise. NaN is
    never better. Best value and count are part of the checkpoint.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._best: float | None = None
        self._best_step = 0
        self._bad = 0
        self._warned = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        run = kwargs["trainer"].run.config
        each_is_saved = run.save_strategy in ("best", run.eval_strategy) or run.eval_strategy == "no"  # of eval_on_save
        if run.save_strategy == run.eval_strategy == "steps":
            each_is_saved = state.eval_steps % state.save_steps == 0
        if state.is_world_process_zero and not each_is_saved:
            why = "not each evaluation is followed by a save, so that the best model may be lost"
            logger.warning("callbacks.early_stopping: %s; set save_strategy=best", why)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        metrics = kwargs.get("metrics") or {}
        value = metrics.get(_full(self.settings.metric), metrics.get(self.settings.metric))
        if value is None:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "callbacks.early_stopping.metric: an evaluation has no %r and is not judged; it has %s",
                    self.settings.metric,
                    ", ".join(metrics),
                )
            return
        is_best_metric = _full(self.settings.metric) == _full(getattr(args, "metric_for_best_model", None) or "")
        greater = is_best_metric and bool(getattr(args, "greater_is_better", False))
        gain = math.inf if self._best is None else float(value) - self._best if greater else self._best - float(value)
        if not math.isnan(value) and gain > self.settings.threshold:
            self._best, self._best_step, self._bad = float(value), state.global_step, 0
            return
        self._bad += 1
        if self._bad >= self.settings.patience:
            control.should_training_stop = True
            if state.is_world_process_zero:
                best = "none was a number"
                if self._best is not None:
                    best = f"the best is {self._best:.6g} of step {self._best_step}"
                logger.warning(
                    "early_stopping ends the run in on_evaluate at step %d: %s %.6g, %s, no improvement by more than "
                    "%g in %d evaluations",
                    state.global_step, self.settings.metric, float(value), best, self.settings.threshold, self._bad,
                )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "bad": self._bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fields(state, {"best": optional(NUMBER), "best_step": COUNT, "bad": COUNT}, "early_stopping")
        self._best, self._best_step, self._bad = state["best"], state["best_step"], state["bad"]


def _full(metric: str) -> str:
    return metric if metric.startswith("eval_") else f"eval_{metric}"

"""DivergenceDetector: end a run whose loss rises for good, or have it rolled back."""

from __future__ import annotations

import logging
import math
from typing import Any

from forgather_cli.callbacks.base import BuiltIn, Divergence, TrainerControl, TrainerState
from forgather_cli.config.schema import DivergenceSettings
from forgather_cli.documents.fields import COUNT, NUMBER, FieldKind, check_fields, optional
from forgather_cli.errors import ConfigError

logger = logging.getLogger(__name__)


class DivergenceDetector(BuiltIn[DivergenceSettings]):
    """Judges a logged metric that falls while training goes well: ``loss``, ``eval_loss`` or ``metric_key``.

    Its running mean, in which the newest value weighs ``smoothing``, may lie above the best one by ``threshold``, or be
    ``relative_threshold`` (above 1) times the best; with both, the lower counts. After ``patience`` values in a row
    that do not, and at once at NaN or infinity, the run is stopped (a final checkpoint is saved, marked as not
    healthy), aborted (nothing is saved) or rolled back. The first ``warmup`` values are not judged. Logged values are
    equal on all ranks, and so is the verdict. Mean, best and counts are part of the checkpoint. Raises ConfigError for
    settings that judge nothing.
    """

    _STATE = ("_smoothed", "_best", "_best_step", "_seen", "_bad", "_sound_step", "_last_step")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        s = self.settings
        if s.threshold is None and s.relative_threshold is None:
            raise ConfigError("callbacks.divergence: needs threshold or relative_threshold; set one of them")
        if s.relative_threshold is not None and s.relative_threshold <= 1:
            raise ConfigError(f"callbacks.divergence.relative_threshold: must be above 1, got {s.relative_threshold:g}")
        self._key = s.metric_key or ("eval_loss" if s.use_eval_loss else "loss")
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        self._smoothed: float | None = None
        self._best = math.inf
        self._best_step = 0
        self._seen = 0
        self._bad = 0
        """Values in a row, the newest one included, at which the mean was too high."""
        self._sound_step = 0
        """The last step whose value and mean were not too high."""
        self._last_step = 0

    # --------------------------------------------------------------------------------------------------------- events

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.healthy = self._bad == 0

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if self._key not in logs:
            of_evaluations = self._key.startswith("eval_")
            if not self._warned and ("eval_loss" if of_evaluations else "learning_rate") in logs:
                self._warned = True
                logger.warning(
                    "callbacks.divergence: %s have no %r and are not judged; they have %s",
                    "evaluations" if of_evaluations else "logs", self._key, ", ".join(logs),
                )  # fmt: skip
        elif control.divergence is None:
            self._judge(float(logs[self._key]), state, control)

    def on_divergence(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.settings.action == "rollback":
            self._act(kwargs["reason"], state, control, void=True)

    def on_rollback(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._last_step > state.global_step:  # the checkpoint has no state of this callback
            self._forget()

    def state_dict(self) -> dict[str, Any]:
        return {name.removeprefix("_"): getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        lowest = FieldKind(lambda value: NUMBER.holds(value) or value == math.inf, "a number")
        counts = dict.fromkeys(("best_step", "seen", "bad", "sound_step", "last_step"), COUNT)
        check_fields(state, {"smoothed": optional(NUMBER), "best": lowest, **counts}, "divergence")
        for name in self._STATE:
            setattr(self, name, state[name.removeprefix("_")])

    # ------------------------------------------------------------------------------------------------------- judgement

    def _judge(self, value: float, state: TrainerState, control: TrainerControl) -> None:
        step = self._last_step = state.global_step
        if not math.isfinite(value):
            self._act(f"{self._key} became {value} by step {step}", state, control, void=True)
            return
        self._seen += 1
        s = self.settings
        weight = s.smoothing
        before = value if self._smoothed is None else self._smoothed
        self._smoothed = mean = weight * value + (1 - weight) * before
        if mean < self._best:
            self._best, self._best_step = mean, step
        rises = [s.threshold, None if s.relative_threshold is None else (s.relative_threshold - 1) * abs(self._best)]
        limit = self._best + min(rise for rise in rises if rise is not None)
        if max(value, mean) <= limit:
            self._sound_step = step
        self._bad = self._bad + 1 if mean > limit and self._seen > s.warmup else 0
        state.healthy = self._bad == 0
        if self._bad >= s.patience:
            given = {"threshold": s.threshold, "relative_threshold": s.relative_threshold}
            thresholds = ", ".join(f"{name}={value:g}" for name, value in given.items() if value is not None)
            reason = (
                f"{self._key} diverged by step {step}: smoothed {mean:.6g}, the best was {self._best:.6g} at step "
                f"{self._best_step}, and {self._bad} values in a row were above {limit:.6g} ({thresholds})"
            )
            self._act(reason, state, control)

    def _act(self, reason: str, state: TrainerState, control: TrainerControl, *, void: bool = False) -> None:
        """``void``: the weights are not worth keeping."""
        s = self.settings
        state.healthy = False
        control.divergence = Divergence(reason, s.action, self._sound_step, s.max_rollbacks)
        if s.action != "rollback":
            control.should_training_stop = True
            control.should_abort_without_save |= s.action == "abort" or void

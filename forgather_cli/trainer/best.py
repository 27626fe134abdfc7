"""Which evaluation was the best so far, by ``metric_for_best_model``."""

from __future__ import annotations

from typing import Any

from forgather_cli.callbacks.base import TrainerState
from forgather_cli.checkpoint.gather import gather
from forgather_cli.checkpoint.manifest import BestBy
from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import ConfigError


def track_best(args: RunSettings, state: TrainerState, metrics: dict[str, float]) -> None:
    """Note the step of an evaluation that is better than those before. What is no finite number is not the best."""
    value = BestBy(args.metric_for_best_model, args.greater_is_better).value(metrics)
    if value is None:
        return
    best = state.best_metric
    if best is None or (value > best if args.greater_is_better else value < best):
        state.best_metric, state.best_global_step = value, state.global_step


def check_metric(args: RunSettings, step: int, metrics: dict[str, float], group: Any) -> None:
    """Collective. Raise ConfigError, on all ranks, where ``load_best_model_at_end`` compares what an evaluation lacks.

    A callback may have added to the metrics of rank 0 alone: these count.
    """
    if not args.load_best_model_at_end:
        return
    metric, found = args.metric_for_best_model, gather(list(metrics), group)[0]
    if metric in found or f"eval_{metric}" in found:
        return
    if metric.removeprefix("eval_") in ("loss", "perplexity"):
        raise ConfigError(
            f"metric_for_best_model: the evaluation at step {step} has no {metric}, since it has no targets (every "
            "label is -100); mend the labels of the evaluation split, or set load_best_model_at_end=false"
        )
    names = ", ".join(name for name in found if name != "epoch")
    raise ConfigError(
        f"metric_for_best_model: the evaluation at step {step} has no {metric}; set it to one that it has ({names}), "
        "or load_best_model_at_end=false"
    )

"""What the settings of ``callbacks.divergence`` may be."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.schema import Config, DivergenceSettings

_PATH = "callbacks.divergence"


def divergence_problems(config: Config, given: frozenset[str]) -> Iterator[str]:
    """Problems of them, each with the remedy."""
    detector = config.callbacks.divergence
    if detector is None:
        return
    if detector.threshold is None and detector.relative_threshold is None:
        yield f"{_PATH}.threshold: null without relative_threshold judges nothing; set one of the two"
    if detector.action == "rollback" and config.save_strategy == "no":
        yield f"{_PATH}.action: rollback needs checkpoints, got save_strategy=no; set save_strategy=steps"
    if detector.action != "rollback" and f"{_PATH}.max_rollbacks" in given:
        yield f"{_PATH}.max_rollbacks: nothing reads it with action={detector.action}; set {_PATH}.action=rollback"
    if detector.use_eval_loss and detector.metric_key is not None:
        yield f"{_PATH}.metric_key: names another metric than use_eval_loss=true does; set one of the two"
    if _of_evaluations(detector) and config.eval_strategy == "no" and not config.eval_on_save:
        name = "use_eval_loss" if detector.use_eval_loss else "metric_key"
        yield f"{_PATH}.{name}: needs evaluations, got eval_strategy=no; set eval_strategy=steps"


def _of_evaluations(detector: DivergenceSettings) -> bool:
    return detector.use_eval_loss or (detector.metric_key or "").startswith("eval_")

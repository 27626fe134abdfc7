"""What needs evaluations, and which settings leave a run without any."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.paths import typed_value
from forgather_cli.config.schema import Config, DataOption, HfSettings, PythonStdlibSettings, SyntheticSettings, Target

_OF_EVALUATIONS = (
    "max_eval_samples", "max_eval_steps", "per_device_eval_batch_size", "metric_for_best_model", "greater_is_better",
)  # fmt: skip
"""What only an evaluation reads."""


def best_model_problems(config: Config) -> Iterator[str]:
    """Each names the settings and the remedy."""
    best, metric = "load_best_model_at_end", config.metric_for_best_model
    if config.load_best_model_at_end and config.eval_strategy == "no" and not config.eval_on_save:
        yield f"{best}: needs evaluations, got eval_strategy=no; set eval_strategy=steps or eval_on_save=true"
    elif config.load_best_model_at_end and (nothing := _nothing_held_out(config.data)):
        path, remedy = nothing
        got = f"{path.rpartition('.')[2]}={typed_value(config, path)}"
        yield f"{best}: needs evaluations, got {got}, which leaves nothing to evaluate on; {remedy}"
    if config.load_best_model_at_end and config.save_strategy == "no":
        yield f"{best}: needs checkpoints, got save_strategy=no; set save_strategy=steps"
    if config.greater_is_better and metric.endswith(("loss", "perplexity")):
        yield f"greater_is_better: true keeps the worst metric_for_best_model={metric}; set greater_is_better=false"


def void_without_evaluation(config: Config) -> Iterator[tuple[str, str, str]]:
    """(setting, or all below it; the setting that makes it void; what would make it count)."""
    if config.eval_strategy == "no":
        yield "eval_delay", "eval_strategy", "set eval_strategy=steps"
    if (cause := _without_evaluation(config)) is None:
        return
    yield from ((path, *cause) for path in _OF_EVALUATIONS)
    if cause[0] != "eval_strategy":
        yield from ((path, *cause) for path in ("eval_steps", "eval_delay"))
    if config.callbacks.early_stopping is not None:
        yield "callbacks.early_stopping", *cause
    textgen = config.callbacks.textgen
    if textgen is not None and textgen.generation_steps is None:
        path, remedy = cause
        yield "callbacks.textgen", path, f"{remedy}, set callbacks.textgen.generation_steps=100"


def _without_evaluation(config: Config) -> tuple[str, str] | None:
    """(the setting that leaves the run without evaluations, what would give it some); None if it has some."""
    on_save = config.eval_on_save and config.save_strategy != "no"
    if config.eval_strategy == "no" and not config.eval_on_start and not on_save:
        return "eval_strategy", "set eval_strategy=steps"
    return _nothing_held_out(config.data)


def _nothing_held_out(data: DataOption) -> tuple[str, str] | None:
    """(the setting that leaves nothing to evaluate on, what would hold out some); None if there is some."""
    if isinstance(data, Target):
        return None
    if isinstance(data, SyntheticSettings):
        return None if data.num_eval_samples else ("data.num_eval_samples", "set num_eval_samples=64")
    if not isinstance(data, PythonStdlibSettings) and data.eval_files:
        return None
    if isinstance(data, HfSettings) and data.eval_split:
        return None
    if isinstance(data, HfSettings) and data.streaming:
        return "data.streaming", "set data.eval_split or data.eval_files"
    return None if data.eval_fraction else ("data.eval_fraction", "set eval_fraction=0.05")

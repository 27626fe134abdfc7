"""The callbacks and their settings."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from forgather_cli.config.schema.base import Count, NonNegative, PositiveFloat, PositiveInt, TargetOption, settings


@settings
class MetricsSettings:
    peak_hardware_flops: PositiveFloat | None = None  # FLOP/s per device; null: from the table


@settings
class ProgressSettings:
    header_interval: PositiveInt = 20  # rows
    step_columns: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    final_metrics: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    output_stream: Literal["stdout", "stderr"] = "stdout"


@settings
class InfoSettings:
    verbose: bool = False


@settings
class JsonSettings:
    pass


@settings
class TensorboardSettings:
    scalars: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # tag: {source, transform}; null removes


@settings
class TextgenSettings:
    prompts: list[str] | str = field(default_factory=list)  # texts, or a YAML file that holds a list
    do_sample: bool = True
    top_k: Count = 20
    temperature: PositiveFloat = 0.7
    repetition_penalty: PositiveFloat = 1.15
    max_new_tokens: PositiveInt = 200
    generation_steps: PositiveInt | None = None  # null: at each evaluation


@settings
class EarlyStoppingSettings:
    patience: PositiveInt = 3  # evaluations
    threshold: NonNegative = 0.0
    metric: str = "eval_loss"


@settings
class CallbackSettings:
    """The active callbacks by config name; None is inactive. ``custom`` holds the user's ``_target_`` entries."""

    metrics: MetricsSettings | None = None
    info: InfoSettings | None = None
    progress: ProgressSettings | None = None
    json: JsonSettings | None = None
    tensorboard: TensorboardSettings | None = None
    textgen: TextgenSettings | None = None
    early_stopping: EarlyStoppingSettings | None = None
    custom: dict[str, TargetOption] = field(default_factory=dict)


def _split_custom(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    custom = {k: v for k, v in value.items() if isinstance(v, dict) and "_target_" in v}
    return {**{k: v for k, v in value.items() if k not in custom}, "custom": custom} if custom else value


CallbackOption = Annotated[CallbackSettings, BeforeValidator(_split_custom)]

"""The callbacks and their settings."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le, Lt
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
    prompts: list[str] | str = field(default_factory=lambda: ["def main(", "class "])  # or a YAML file with a list
    do_sample: bool = True
    top_k: Count = 20
    temperature: PositiveFloat = 0.7
    repetition_penalty: PositiveFloat = 1.15
    max_new_tokens: PositiveInt = 200
    generation_steps: PositiveInt | None = None  # null: at each evaluation


@settings
class ProfilerSettings:
    start_step: Count = 3  # steps of this process that are left out
    num_steps: PositiveInt = 5
    output_dir: str | None = None  # null: RUN/profile
    with_stack: bool = False
    with_flops: bool = False
    record_shapes: bool = False


TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""Accelerate's (1.15), by name."""


@settings
class TrackersSettings:
    names: list[str] = field(default_factory=lambda: ["wandb"])  # of TRACKERS, or module.Class of a GeneralTracker
    project: str = "forgather"
    run_name: str | None = None  # null: the run directory's name
    init_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)  # by tracker


@settings
class ControlSettings:
    enable_http: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, Gt(0), Lt(65536)] | None = None  # null: the first free one of 8900 to 8999
    auth_token: str | None = None  # null: drawn for each job
    disable_auth: bool = False


@settings
class EarlyStoppingSettings:
    patience: PositiveInt = 3  # evaluations
    threshold: NonNegative = 0.0
    metric: str = "eval_loss"


@settings
class DivergenceSettings:
    smoothing: Annotated[float, Gt(0), Le(1)] = 0.3  # weight of the newest value in the running mean; 1: no mean
    threshold: PositiveFloat | None = 1.0  # rise above the best running mean; null: relative_threshold alone
    relative_threshold: PositiveFloat | None = None  # rise as a share of the best running mean
    patience: PositiveInt = 3  # values in a row
    warmup: Count = 10  # first values, which are not judged
    action: Literal["stop", "abort", "rollback"] = "stop"
    max_rollbacks: PositiveInt = 3  # over the life of the run
    use_eval_loss: bool = False  # judge eval_loss instead of loss
    metric_key: str | None = None  # judge this metric of the logs or evaluations


@settings
class GradNormSettings:
    every: Literal["eval", "log"] | PositiveInt = "eval"  # at each evaluation, with each log, or every so many steps


@settings
class ParameterNormSettings:
    log_norms: bool = True
    log_spectral_norms: bool = True
    power_iter_steps: PositiveInt = 10  # per evaluation; twice as many at the first


@settings
class WeightNormSettings:
    pass


@settings
class PeakMemorySettings:
    show_details: bool = False
    do_log: bool = False
    enable_memory_snapshot: bool = False
    file_prefix: str = "memory"  # of the snapshots, in the run directory


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
    control: ControlSettings | None = None
    divergence: DivergenceSettings | None = None
    profiler: ProfilerSettings | None = None
    trackers: TrackersSettings | None = None
    grad_norms: GradNormSettings | None = None
    parameter_norms: ParameterNormSettings | None = None
    weight_norm: WeightNormSettings | None = None
    peak_memory: PeakMemorySettings | None = None
    custom: dict[str, TargetOption] = field(default_factory=dict)


def _split_custom(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    custom = {k: v for k, v in value.items() if isinstance(v, dict) and "_target_" in v}
    return {**{k: v for k, v in value.items() if k not in custom}, "custom": custom} if custom else value


CallbackOption = Annotated[CallbackSettings, BeforeValidator(_split_custom)]

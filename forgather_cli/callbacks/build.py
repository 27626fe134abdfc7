"""The callbacks a config asks for, in the order in which events reach them."""

from __future__ import annotations

from typing import Any

from forgather_cli.callbacks.base import BuiltIn
from forgather_cli.callbacks.control import TrainerControlCallback
from forgather_cli.callbacks.diloco import DiLoCoCallback
from forgather_cli.callbacks.divergence import DivergenceDetector
from forgather_cli.callbacks.early_stopping import EarlyStopping
from forgather_cli.callbacks.grad_norms import GradNormLogger
from forgather_cli.callbacks.info import InfoCallback
from forgather_cli.callbacks.json_logger import JsonLogger
from forgather_cli.callbacks.metrics import DefaultMetrics
from forgather_cli.callbacks.parameter_norms import ParameterNormLogger
from forgather_cli.callbacks.peak_memory import PeakMemory
from forgather_cli.callbacks.profiler import ProfilerCallback
from forgather_cli.callbacks.progress import ProgressCallback
from forgather_cli.callbacks.tensorboard import TBLogger
from forgather_cli.callbacks.textgen import TextgenCallback
from forgather_cli.callbacks.trackers import Trackers
from forgather_cli.callbacks.weight_norm import WeightNormLogger
from forgather_cli.config.schema import CallbackSettings, Target
from forgather_cli.run_dir import RunDir
from forgather_cli.targets import import_target, make

CALLBACKS: tuple[type[BuiltIn[Any]], ...] = (
    # what adds to the logs
    DefaultMetrics, WeightNormLogger, PeakMemory,
    # what shows them
    InfoCallback, ProgressCallback, JsonLogger, TBLogger, GradNormLogger, ParameterNormLogger, Trackers,
    TextgenCallback,
    # what acts
    DiLoCoCallback, TrainerControlCallback, DivergenceDetector, EarlyStopping, ProfilerCallback,
)  # fmt: skip
"""In the order in which events reach them."""


def build_callbacks(
    settings: CallbackSettings, run: RunDir, *, config_tree: dict[str, Any] | None = None
) -> list[tuple[str, Any]]:
    """(config name, callback) of every active one; the user's own come last, in their order.

    Raises ConfigError for settings a callback refuses and for targets that cannot be imported or instantiated.
    """
    stream = settings.progress.output_stream if settings.progress else "stdout"
    built: list[tuple[str, Any]] = []
    for kind in CALLBACKS:
        if (own := getattr(settings, kind.config_name)) is not None:
            built.append((kind.config_name, kind(own, run, config_tree=config_tree, stream=stream)))
    return [*built, *((name, _custom(name, target)) for name, target in settings.custom.items())]


def _custom(name: str, target: Target) -> Any:
    where = f"callbacks.{name}"
    return make(import_target(target.path, where), where, target.path, **target.kwargs)

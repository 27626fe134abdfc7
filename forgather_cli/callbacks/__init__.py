"""What watches a run: the event protocol and one file per callback.

The classes are imported when first used: ``from forgather_cli.callbacks import DivergenceDetector``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather_cli.callbacks.base import TrainerCallback, TrainerControl, TrainerState
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
    from forgather_cli.callbacks.tensorboard import ResumableSummaryWriter, TBLogger
    from forgather_cli.callbacks.textgen import TextgenCallback
    from forgather_cli.callbacks.trackers import Trackers
    from forgather_cli.callbacks.weight_norm import WeightNormLogger

_HOMES = {
    "DefaultMetrics": "metrics", "DiLoCoCallback": "diloco", "DivergenceDetector": "divergence",
    "EarlyStopping": "early_stopping", "GradNormLogger": "grad_norms", "InfoCallback": "info",
    "JsonLogger": "json_logger", "ParameterNormLogger": "parameter_norms", "PeakMemory": "peak_memory",
    "ProfilerCallback": "profiler", "ProgressCallback": "progress", "ResumableSummaryWriter": "tensorboard",
    "TBLogger": "tensorboard", "TextgenCallback": "textgen", "Trackers": "trackers", "TrainerCallback": "base",
    "TrainerControl": "base", "TrainerControlCallback": "control", "TrainerState": "base",
    "WeightNormLogger": "weight_norm",
}  # fmt: skip
"""Name -> module."""

__all__ = [
    "DefaultMetrics", "DiLoCoCallback", "DivergenceDetector", "EarlyStopping", "GradNormLogger", "InfoCallback",
    "JsonLogger", "ParameterNormLogger", "PeakMemory", "ProfilerCallback", "ProgressCallback", "ResumableSummaryWriter",
    "TBLogger", "TextgenCallback", "Trackers", "TrainerCallback", "TrainerControl", "TrainerControlCallback",
    "TrainerState", "WeightNormLogger",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

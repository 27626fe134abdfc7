"""The callbacks a config asks for, in the order in which events reach them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forgather_cli.callbacks.console import StreamName
from forgather_cli.callbacks.control import TrainerControlCallback
from forgather_cli.callbacks.diloco import DilocoCallback
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
from forgather_cli.targets import call, import_target


@dataclass(frozen=True)
class Around:
    """What a callback is made of besides its own settings."""

    run: RunDir
    config_tree: dict[str, Any] | None
    stream: StreamName
    """Where what is meant for people goes."""
    stacks: Callable[[], dict[str, Any]] | None = None
    """Where all ranks stand, for JSON; called in any thread."""
    built: dict[str, Any] = field(default_factory=dict)
    """The callbacks before it, by name."""


Factory = Callable[[Any, Around], Any]
"""(its settings, the rest) -> callback. Raises ConfigError."""


def _textgen(settings: Any, around: Around) -> Any:
    add_text = getattr(around.built.get("tensorboard"), "add_text", None)
    show_bar = getattr(around.built.get("progress"), "show_bar", None)
    return TextgenCallback(settings, around.run, add_text=add_text, show_bar=show_bar, stream=around.stream)


FACTORIES: dict[str, Factory] = {
    # what adds to the logs
    "metrics": lambda settings, around: DefaultMetrics(settings),
    "weight_norm": lambda settings, around: WeightNormLogger(),
    "peak_memory": lambda settings, around: PeakMemory(settings, around.run, stream=around.stream),
    # what shows them
    "info": lambda settings, around: InfoCallback(settings, config_tree=around.config_tree, stream=around.stream),
    "progress": lambda settings, around: ProgressCallback(settings),
    "json": lambda settings, around: JsonLogger(around.run),
    "tensorboard": lambda settings, around: TBLogger(around.run, settings, config_tree=around.config_tree),
    "grad_norms": lambda settings, around: GradNormLogger(settings, around.run),
    "parameter_norms": lambda settings, around: ParameterNormLogger(settings, around.run),
    "trackers": lambda settings, around: Trackers(settings, around.run, config_tree=around.config_tree),
    "textgen": _textgen,
    # what acts
    "diloco": lambda settings, around: DilocoCallback(settings),
    "control": lambda settings, around: TrainerControlCallback(settings, around.run, around.stacks),
    "divergence": lambda settings, around: DivergenceDetector(settings),
    "early_stopping": lambda settings, around: EarlyStopping(settings),
    "profiler": lambda settings, around: ProfilerCallback(settings, around.run, stream=around.stream),
}
"""By config name, in the order in which events reach the callbacks."""


def build_callbacks(
    settings: CallbackSettings,
    run: RunDir,
    *,
    config_tree: dict[str, Any] | None = None,
    stacks: Callable[[], dict[str, Any]] | None = None,
) -> list[tuple[str, Any]]:
    """(config name, callback) of every active one: what adds to the logs first, then what shows them, then what acts.

    The user's own come last, in their order. Raises ConfigError for settings a callback refuses and for targets that
    cannot be imported or instantiated.
    """
    around = Around(run, config_tree, settings.progress.output_stream if settings.progress else "stdout", stacks)
    for name, factory in FACTORIES.items():
        if (own := getattr(settings, name)) is not None:
            around.built[name] = factory(own, around)
    return [*around.built.items(), *((name, _custom(name, target)) for name, target in settings.custom.items())]


def _custom(name: str, target: Target) -> Any:
    where = f"callbacks.{name}"
    return call(import_target(target.path, where), where, **target.kwargs)

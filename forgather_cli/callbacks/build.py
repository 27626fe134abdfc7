"""The callbacks a config asks for, in the order in which events reach them."""

from __future__ import annotations

from typing import Any

from forgather_cli.callbacks.console import StreamName
from forgather_cli.callbacks.early_stopping import EarlyStopping
from forgather_cli.callbacks.info import InfoCallback
from forgather_cli.callbacks.json_logger import JsonLogger
from forgather_cli.callbacks.metrics import DefaultMetrics
from forgather_cli.callbacks.progress import ProgressCallback
from forgather_cli.callbacks.tensorboard import TBLogger
from forgather_cli.callbacks.textgen import TextgenCallback
from forgather_cli.config.schema import CallbackSettings, Target
from forgather_cli.run_dir import RunDir
from forgather_cli.targets import call, import_target


def build_callbacks(
    settings: CallbackSettings, run: RunDir, *, config_tree: dict[str, Any] | None = None
) -> list[tuple[str, Any]]:
    """(config name, callback) of every active one: what adds to the logs first, then what shows them, then what acts.

    The user's own come last, in their order. Raises ConfigError for settings a callback refuses and for targets that
    cannot be imported or instantiated.
    """
    stream: StreamName = settings.progress.output_stream if settings.progress else "stdout"
    built: list[tuple[str, Any]] = []
    if settings.metrics is not None:
        built.append(("metrics", DefaultMetrics(settings.metrics)))
    if settings.info is not None:
        built.append(("info", InfoCallback(settings.info, config_tree=config_tree, stream=stream)))
    if settings.progress is not None:
        built.append(("progress", ProgressCallback(settings.progress)))
    if settings.json is not None:
        built.append(("json", JsonLogger(run)))
    tensorboard = None
    if settings.tensorboard is not None:
        tensorboard = TBLogger(run, settings.tensorboard, config_tree=config_tree)
        built.append(("tensorboard", tensorboard))
    if settings.textgen is not None:
        add_text = tensorboard.add_text if tensorboard else None
        built.append(("textgen", TextgenCallback(settings.textgen, run, add_text=add_text, stream=stream)))
    if settings.early_stopping is not None:
        built.append(("early_stopping", EarlyStopping(settings.early_stopping)))
    built += [(name, _custom(name, target)) for name, target in settings.custom.items()]
    return built


def _custom(name: str, target: Target) -> Any:
    where = f"callbacks.{name}"
    return call(import_target(target.path, where), where, **target.kwargs)

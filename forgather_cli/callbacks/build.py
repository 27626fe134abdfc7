"""The callbacks a config asks for, in the order in which events reach them."""

from __future__ import annotations

from typing import Any

from forgather_cli.config.schema import CallbackSettings, Target
from forgather_cli.run_dir import RunDir
from forgather_cli.targets import import_target, make


def build_callbacks(
    settings: CallbackSettings, run: RunDir, *, config_tree: dict[str, Any] | None = None
) -> list[tuple[str, Any]]:
    """(config name, callback) of every active one; the user's own come last, in their order.

    Raises ConfigError for settings a callback refuses and for targets that cannot be imported or instantiated.
    """
    stream = settings.progress.output_stream if settings.progress else "stdout"
    built = [
        (part.type, part.load_maker()(part, run, config_tree=config_tree, stream=stream)) for part in settings.active()
    ]
    return [*built, *((name, _custom(name, target)) for name, target in settings.custom.items())]


def _custom(name: str, target: Target) -> Any:
    where = f"callbacks.{name}"
    return make(import_target(target.path, where), where, target.path, **target.kwargs)

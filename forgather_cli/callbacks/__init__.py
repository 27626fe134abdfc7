"""What watches a run: the event protocol, and one file or folder per callback.

The classes are imported when first used: ``from forgather_cli.callbacks import DivergenceDetector``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forgather_cli.config.schema import CallbackPart

    homes = dict.fromkeys(("TrainerCallback", "TrainerControl", "TrainerState"), f"{__name__}.base")
    homes["ResumableSummaryWriter"] = f"{__name__}.tensorboard"
    homes |= {kind: module for module, kind in (part.maker.split(":") for part in CallbackPart.members)}
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})

"""Forgather: config-driven training of language models on PyTorch.

The public names are imported when first used, so that ``import forgather_cli`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather_cli.callbacks.base import TrainerCallback, TrainerControl, TrainerState
    from forgather_cli.trainer import Trainer, TrainingArguments, TrainOutput

__version__ = "0.1.0"

__all__ = [
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "__version__",
]

_HOMES = {
    "TrainOutput": "forgather_cli.trainer",
    "Trainer": "forgather_cli.trainer",
    "TrainerCallback": "forgather_cli.callbacks.base",
    "TrainerControl": "forgather_cli.callbacks.base",
    "TrainerState": "forgather_cli.callbacks.base",
    "TrainingArguments": "forgather_cli.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

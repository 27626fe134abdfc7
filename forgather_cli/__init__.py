"""Forgather: config-driven training of language models on PyTorch.

The public names are imported when first used, so that ``import forgather_cli`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather_cli.api import Run, compose
    from forgather_cli.callbacks.base import TrainerCallback, TrainerControl, TrainerState
    from forgather_cli.config.schema import (
        AdafactorSettings,
        AdamWSettings,
        BF16Settings,
        BF16TrueSettings,
        ConstantSettings,
        CosineSettings,
        CrossEntropySettings,
        CutCrossEntropySettings,
        DDPSettings,
        FP8Settings,
        FP16Settings,
        FP32Settings,
        FSDP2Settings,
        GroupSettings,
        InfiniteSettings,
        InverseSqrtSettings,
        LigerSettings,
        LinearCrossEntropySettings,
        LinearSettings,
        MuonSettings,
        PipelineSettings,
        PostLocalSGD,
        QATSettings,
        SGDSettings,
        SingleSettings,
        WSDSettings,
    )
    from forgather_cli.trainer import Trainer, TrainingArguments, TrainOutput

__version__ = "0.1.0"

__all__ = [
    "AdafactorSettings",
    "AdamWSettings",
    "BF16Settings",
    "BF16TrueSettings",
    "ConstantSettings",
    "CosineSettings",
    "CrossEntropySettings",
    "CutCrossEntropySettings",
    "DDPSettings",
    "FP8Settings",
    "FP16Settings",
    "FP32Settings",
    "FSDP2Settings",
    "GroupSettings",
    "InfiniteSettings",
    "InverseSqrtSettings",
    "LigerSettings",
    "LinearCrossEntropySettings",
    "LinearSettings",
    "MuonSettings",
    "PipelineSettings",
    "PostLocalSGD",
    "QATSettings",
    "Run",
    "SGDSettings",
    "SingleSettings",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "WSDSettings",
    "__version__",
    "compose",
]  # fmt: skip

_HOMES = {
    "Run": "forgather_cli.api",
    "TrainOutput": "forgather_cli.trainer",
    "Trainer": "forgather_cli.trainer",
    "TrainerCallback": "forgather_cli.callbacks.base",
    "TrainerControl": "forgather_cli.callbacks.base",
    "TrainerState": "forgather_cli.callbacks.base",
    "TrainingArguments": "forgather_cli.trainer",
    "compose": "forgather_cli.api",
}
"""Name -> module; the others are settings."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "forgather_cli.config.schema")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

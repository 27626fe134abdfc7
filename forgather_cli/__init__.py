"""Forgather: config-driven training of language models on PyTorch.

The public names are imported when first used, so that ``import forgather_cli`` costs nothing. With it imported,
transformers' Auto classes load the encoder-decoder without code from its directory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forgather_cli.api import Run, compose
    from forgather_cli.callbacks.base import TrainerCallback, TrainerControl, TrainerState
    from forgather_cli.checkpoint.components import Sharing
    from forgather_cli.config.schema import (
        AdafactorSettings,
        AdamWSettings,
        AutoLossSettings,
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
    from forgather_cli.trainer.own_components import StateComponent

__version__ = "0.3.0.dev0"

__all__ = [
    "AdafactorSettings",
    "AdamWSettings",
    "AutoLossSettings",
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
    "Sharing",
    "SingleSettings",
    "StateComponent",
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
    "Sharing": "forgather_cli.checkpoint.components",
    "StateComponent": "forgather_cli.trainer.own_components",
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


# ------------------------------------------------------------------------------------------ transformers' Auto classes

_AUTO = "transformers.models.auto.modeling_auto"


class _AutoClassesHook:
    """In ``sys.meta_path`` until the Auto classes are imported, which then know our encoder-decoder.

    They have no entry points (transformers 5.23), and importing them here would take seconds.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _AUTO:
            return None
        sys.meta_path.remove(cls)
        spec: Any = find_spec(name)
        run = spec.loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            import_module("forgather_cli.models.auto_classes")

        spec.loader.exec_module = run_and_register
        return spec


if _AUTO in sys.modules:
    import_module("forgather_cli.models.auto_classes")
else:
    sys.meta_path.insert(0, _AutoClassesHook)

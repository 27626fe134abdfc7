"""Forgather: config-driven training of language models on PyTorch.

The public names are imported when first used, so that ``import forgather_cli`` costs nothing. With it imported,
transformers' Auto classes load the encoder-decoder without code from its directory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, which take a star and an alias of the same name for public
    from forgather_cli.api import Run as Run
    from forgather_cli.api import compose as compose
    from forgather_cli.callbacks.base import TrainerCallback as TrainerCallback
    from forgather_cli.callbacks.base import TrainerControl as TrainerControl
    from forgather_cli.callbacks.base import TrainerState as TrainerState
    from forgather_cli.checkpoint.components import Sharing as Sharing
    from forgather_cli.config.schema import *
    from forgather_cli.trainer.arguments import TrainingArguments as TrainingArguments
    from forgather_cli.trainer.own_components import StateComponent as StateComponent
    from forgather_cli.trainer.script import Trainer as Trainer
    from forgather_cli.trainer.trainer import TrainOutput as TrainOutput

__version__ = "0.3.0.dev0"

_HOMES = {
    "Run": "forgather_cli.api",
    "Sharing": "forgather_cli.checkpoint.components",
    "StateComponent": "forgather_cli.trainer.own_components",
    "TrainOutput": "forgather_cli.trainer.trainer",
    "Trainer": "forgather_cli.trainer.script",
    "TrainerCallback": "forgather_cli.callbacks.base",
    "TrainerControl": "forgather_cli.callbacks.base",
    "TrainerState": "forgather_cli.callbacks.base",
    "TrainingArguments": "forgather_cli.trainer.arguments",
    "compose": "forgather_cli.api",
}
"""Name -> module; the others are classes of settings."""


def __getattr__(name: str) -> Any:
    found: dict[str, Any] = {}
    if name in _HOMES:
        found[name] = getattr(import_module(_HOMES[name]), name)
    elif name == "__all__" or not name.startswith("__"):
        schema = vars(import_module("forgather_cli.config.schema"))
        found = {key: each for key, each in schema.items() if hasattr(each, "__pydantic_config__")}
        found["__all__"] = ["__version__", *_HOMES, *found]
    if name not in found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found[name]
    return found[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


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

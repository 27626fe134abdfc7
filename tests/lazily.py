"""What peft, bitsandbytes and transformers take seconds to import: a test does so when it first uses it, not each
process of xdist that collects its file. ``from lazily import PeftModel, bitsandbytes``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_OF_PEFT = ("LoraConfig", "PeftModel", "get_peft_model")


class _Lazily:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_") or attribute == "pytestmark":  # pytest asks each object of a module for these
            raise AttributeError(attribute)
        return getattr(self._meant(), attribute)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._meant()(*args, **kwargs)

    def _meant(self) -> Any:
        if self._name == "bitsandbytes":
            return import_module(self._name)
        return getattr(import_module("peft" if self._name in _OF_PEFT else "transformers"), self._name)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return _Lazily(name)

"""What stands for the kernel of a notebook: IPython's shell with its displays, and streams that are no terminals."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest


class Kernel:
    """Its outputs: every text that each has shown, by display id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: dict[str, list[str]] = {}
        package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        package.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
        display.display, display.update_display = self._display, self._update  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def _display(self, data: dict[str, str], *, raw: bool, display_id: str) -> Any:
        assert raw
        assert display_id not in self.outputs
        self.outputs[display_id] = [data["text/plain"]]

    def _update(self, data: dict[str, str], *, raw: bool, display_id: str) -> None:
        self.outputs[display_id].append(data["text/plain"])

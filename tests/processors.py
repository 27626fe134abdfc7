"""Another processor than this machine's, for all that asks which instructions there are."""

from __future__ import annotations

import pytest

from forgather_cli import hardware


def pretend(monkeypatch: pytest.MonkeyPatch, *instructions: str, name: str = "a processor") -> None:
    """``instructions`` by their names in ``hardware``: AVX2, AVX512-BF16, ..."""
    monkeypatch.setattr(hardware, "processor", lambda: (name, instructions))

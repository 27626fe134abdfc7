"""Parameters of a test of which some run always, and the others with ``--full`` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *always: Any) -> list[Any]:
    return [value if value in always else pytest.param(value, marks=pytest.mark.full) for value in values]

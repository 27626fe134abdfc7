"""How devices are named. torch knows other kinds too, on which nothing here was ever run."""

from __future__ import annotations

import re

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|mps")


def wrong_device(name: str) -> str | None:
    """What is wrong with a device's name; None if it is one."""
    if _DEVICE.fullmatch(name):
        return None
    return f"must be auto, cpu, cuda, cuda:N (a number) or mps, got {name!r}; set it to auto for a GPU if there is one"

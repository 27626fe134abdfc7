"""Training and evaluation mode of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(parts: list[nn.Module]) -> Iterator[None]:
    """All modules in eval mode inside, each back to what it was after: a part that was frozen by hand stays so."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode

"""Starting a process that is to import torch."""

from __future__ import annotations

import gc

_OBJECTS = 50_000


def collect_less() -> None:
    """Let Python look for cycles after 50,000 new objects instead of 700.

    torch and its compiler make 300,000 while they are imported, none of them garbage: looking at them again and again
    takes 0.2 s of torch's 1.2, and 0.5 s of 2.2 with ``torch._dynamo`` (Python 3.11, torch 2.13).
    """
    gc.set_threshold(_OBJECTS)

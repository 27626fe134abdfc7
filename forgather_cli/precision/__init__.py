"""Number formats of a run: what the strategies enter around forward and loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from forgather_cli.config.schema import BF16Settings, PrecisionOption

Autocast = Callable[[], AbstractContextManager[object]]


def autocast_for(option: PrecisionOption | None, device: torch.device) -> Autocast:
    """A maker of contexts for forward and loss: bf16 autocast, or nothing for fp32 and None.

    Enter it once per micro-batch: autocast keeps the bf16 copies of the weights until its outermost context ends, and
    one that spanned an optimizer step would go on with the old ones.
    """
    if isinstance(option, BF16Settings):
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext

"""Number formats of a run: what the strategies enter around forward and loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from forgather_cli.config.schema import PrecisionOption

Autocast = Callable[[], AbstractContextManager[object]]
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_for(option: PrecisionOption | None, device: torch.device) -> Autocast:
    """A maker of contexts for forward and loss: bf16 or fp16 autocast, or nothing for the other options and None.

    Enter it once per micro-batch: autocast keeps the half copies of the weights until its outermost context ends, and
    one that spanned an optimizer step would go on with the old ones.
    """
    dtype = half_dtype(option)
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)


def half_dtype(option: PrecisionOption | None) -> torch.dtype | None:
    """What fp32 weights are rounded to where they are multiplied; None: nothing."""
    return _HALVES[option.autocast] if option and option.autocast else None


def stream_dtype(option: PrecisionOption | None) -> torch.dtype | None:
    """What the residual stream is rounded to; None: it is what models make it."""
    return torch.bfloat16 if option and option.rounds_stream else None


def compute_dtype(option: PrecisionOption | None) -> torch.dtype:
    """What matrices are multiplied in."""
    return half_dtype(option) or parameter_dtype(option) or torch.float32


def parameter_dtype(option: PrecisionOption | None) -> torch.dtype | None:
    """What parameters, and with them gradients and moments, are made in; None: what their model says."""
    return _HALVES[option.parameters] if option and option.parameters else None

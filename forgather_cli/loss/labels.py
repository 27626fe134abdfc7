"""Labels and targets of a batch.

Legend: B sequences, T tokens, N = B * T.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of a position without a target."""


def num_targets(labels: Tensor) -> Tensor:
    """Counted targets of ``labels`` (B, T), 0-dim int64 on the same device."""
    return (labels[:, 1:] != IGNORED).sum()


def model_kwargs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch goes to the model: everything but the labels."""
    return {key: value for key, value in batch.items() if key != "labels"}


def shifted(labels: Tensor) -> Tensor:
    """The target of each position (N,): the next label; the last position of a sequence has none."""
    # shifting labels instead of logits saves a copy of N x V numbers
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()

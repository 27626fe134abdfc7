"""What an evaluation counts beside the loss.

Legend: B sequences, T tokens, N = B * T, V vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forgather_cli.loss.model_io import IGNORED, shifted
from forgather_cli.loss.sums import product_dtype


class EvalMetrics:
    """Of the targets that come by: how many the model finds likeliest, and how many bytes of text they stand for.

    ``token_bytes`` (V,) int64: bytes of each token; None where the tokenizer cannot say. The sums are this rank's
    share, as those of the loss are.
    """

    def __init__(self, device: torch.device, token_bytes: Tensor | None = None) -> None:
        self._token_bytes = None if token_bytes is None else token_bytes.to(device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.num_bytes = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Logits (B, T, V) of a batch with labels (B, T)."""
        targets = shifted(labels)
        self.correct += (logits.argmax(-1).flatten() == targets).sum()  # no token has the id of what is not counted
        self._add_bytes(targets)

    def add_hidden(self, head: Any, hidden: Tensor, labels: Tensor, *, chunk_size: int = 256) -> None:
        """What ``head`` is applied to, (B, T, E); makes logits of only ``chunk_size`` tokens at a time."""
        dtype, flat, targets = product_dtype(hidden), hidden.flatten(0, 1), shifted(labels)
        with torch.autocast(hidden.device.type, enabled=False):
            weight = head.weight.to(dtype)
            bias = None if head.bias is None else head.bias.to(dtype)
            for start in range(0, len(targets), chunk_size):
                rows = slice(start, start + chunk_size)
                best = F.linear(flat[rows].to(dtype), weight, bias).argmax(-1)
                self.correct += (best == targets[rows]).sum()
        self._add_bytes(targets)

    def _add_bytes(self, targets: Tensor) -> None:
        """Targets (N,)."""
        if self._token_bytes is not None:
            self.num_bytes += (self._token_bytes[targets.clamp(min=0)] * (targets != IGNORED)).sum()

"""What an evaluation counts beside the loss.

Legend: B sequences, T tokens, N = B * T, V vocabulary, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forgather_cli.labels import IGNORED, bytes_of, shifted
from forgather_cli.loss.sums import product_dtype


class EvalMetrics:
    """Of the targets that come by: how many the model finds likeliest, and how many bytes of text they stand for; with
    ``num_tasks`` also the sum of the loss, the targets and the bytes of each task (denoiser).

    ``token_bytes`` (V,) int64: bytes of each token; None where the tokenizer cannot say. The sums are this rank's
    share, as those of the loss are.
    """

    def __init__(self, device: torch.device, token_bytes: Tensor | None = None, num_tasks: int = 0) -> None:
        self._token_bytes = None if token_bytes is None else token_bytes.to(device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.num_bytes = torch.zeros((), dtype=torch.int64, device=device)
        self.task_ids: Tensor | None = None
        """(B, T) of the batch that comes next, -1 = none; None where the data has no tasks."""
        self.by_task = torch.zeros((3, num_tasks), dtype=torch.float64, device=device)
        """Sum of the loss in nats, targets, bytes."""

    def add(self, logits: Tensor, labels: Tensor, shift: int = 1) -> None:
        """Logits (B, T, V) of a batch with labels (B, T), which stand ``shift`` positions behind what predicts them."""
        targets, flat = shifted(labels, shift), logits.flatten(0, 1)
        self.correct += (flat.argmax(-1) == targets).sum()  # no token has the id of what is not counted
        self._add_bytes(targets)
        if self.task_ids is not None:
            self._add_to_tasks(targets, _losses(flat, targets), slice(None))

    def add_hidden(self, head: Any, hidden: Tensor, labels: Tensor, shift: int = 1, *, chunk_size: int = 256) -> None:
        """What ``head`` is applied to, (B, T, E); makes logits of only ``chunk_size`` tokens at a time."""
        dtype, flat, targets = product_dtype(hidden), hidden.flatten(0, 1), shifted(labels, shift)
        with torch.autocast(hidden.device.type, enabled=False):
            weight = head.weight.to(dtype)
            bias = None if head.bias is None else head.bias.to(dtype)
            for start in range(0, len(targets), chunk_size):
                rows = slice(start, start + chunk_size)
                logits = F.linear(flat[rows].to(dtype), weight, bias)
                self.correct += (logits.argmax(-1) == targets[rows]).sum()
                if self.task_ids is not None:
                    self._add_to_tasks(targets[rows], _losses(logits, targets[rows]), rows)
        self._add_bytes(targets)

    def _add_bytes(self, targets: Tensor) -> None:
        """Targets (N,)."""
        if self._token_bytes is not None:
            self.num_bytes += bytes_of(targets, self._token_bytes).sum()

    def _add_to_tasks(self, targets: Tensor, losses: Tensor, rows: slice) -> None:
        """Targets and losses of some positions (C,), which are ``rows`` of the batch's."""
        assert self.task_ids is not None
        counted = targets != IGNORED
        num_bytes = torch.zeros_like(targets) if self._token_bytes is None else bytes_of(targets, self._token_bytes)
        tasks = self.task_ids.flatten()[rows].long().clamp(min=0)
        values = torch.stack([losses, counted.to(losses.dtype), num_bytes.to(losses.dtype)]) * counted
        self.by_task.index_add_(1, tasks, values.to(self.by_task.dtype))


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each of the targets (C,), fp32."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")

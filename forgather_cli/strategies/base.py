"""The one seam: a strategy computes one optimizer step's gradients.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
"""``input_ids`` and ``labels`` (B, T) int64, aligned (-100 = no target), and what else the model takes."""


@dataclass(frozen=True)
class Supports:
    """What a strategy can do; the config check reads the same facts."""

    optimizer_in_backward: bool
    fp16: bool
    torch_compile: bool


class Strategy(ABC):
    """Where one model's parameters live and how one optimizer step's gradients are computed.

    Every method is collective: all ranks call it, in the same order.
    """

    name: str
    """As in ``trainer=NAME``; told in logs and checkpoints."""
    supports: Supports
    device: torch.device
    parts: list[nn.Module]
    """Modules whose parameters this rank trains; several when pipeline stages interleave."""
    data_rank: int
    data_size: int
    """Which slice of the data this rank reads, of how many."""
    data_group: Any
    """Process group of the ranks that read different data; None: only this one."""
    model_group: Any
    """Process group of the ranks that hold different parameters of one model; None: only this one."""

    @abstractmethod
    def materialize(self, build: Callable[[], nn.Module], init: Callable[[nn.Module], None] | None) -> None:
        """Build the model with this rank's share of the parameters on ``device`` and set ``parts``.

        ``build`` makes the whole model (on meta where the caller chose so); ``init`` fills the parameters of one part
        after they have memory, None if ``build`` delivers them filled.
        """

    @abstractmethod
    def forward_backward(self, microbatches: Iterable[Batch], num_tokens: Tensor) -> Tensor:
        """Accumulate the gradients of one optimizer step into ``.grad`` of all ``parts``.

        The loss is the sum over targets divided by ``num_tokens`` (0-dim, on ``device``: the targets of the whole
        step over all ranks, at least 1). Returns this rank's share of it, 0-dim fp32, detached; the shares' world
        sum is the step's loss.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss of one evaluation batch, no gradient: (sum over targets fp32, number of targets), both 0-dim."""

    @abstractmethod
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        """Logits (B, T, V), or (B, 1, V) with ``last_only``, without gradient; None where the last layer is not.

        ``cache`` is a ``models.decoder.KVCache`` that this call reads and extends.
        """


def default_strategy(args: Any, loss_fn: Any = None, fused_loss_factory: Any = None) -> Strategy:
    """The strategy of a Trainer that was given none: one device, with the settings' precision and loss."""
    from forgather_cli.strategies.single import single_device

    return single_device(args, loss_fn, fused_loss_factory)

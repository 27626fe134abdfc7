"""What is logged of training beside the loss: sums by name, each with what it is divided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class NamedSums:
    """This rank's shares since the last log, on the device; a loss adds to them, and the log sums those of all ranks.

    Legend: K names, B sequences, T tokens.
    """

    names: Sequence[str]
    table: Tensor
    """(2, K) float64: sums, and what they are divided by."""
    places: Any = None
    """(B,): which name each row of the batch that comes next belongs to; None: its rows are not told apart."""

    def add_rows(self, values: Tensor, counted: Tensor) -> None:
        """``values`` (B * T,) of a batch's positions, to be divided by the number of those that are ``counted``."""
        sums = torch.stack([values, counted.to(values.dtype)]).view(2, len(self.places), -1).sum(-1)
        self.table.index_add_(1, self.places, sums.to(self.table.dtype))

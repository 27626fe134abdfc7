"""A model's parameters as rows: shape, kind, optimizer group, and where in the model they stand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgather_cli.config.schema import Config
from forgather_cli.optim.groups import ParameterRow, describe, kind_of

if TYPE_CHECKING:
    from torch import nn

FP32, HALF = 4, 2
"""Bytes of a number."""


@dataclass(frozen=True)
class PlannedParameter(ParameterRow):
    """One parameter: how it is trained, and what it belongs to."""

    numel: int
    width: int
    """Bytes of each number of the weight and its gradient."""
    kind: str
    """See ``kind_of``."""

    @property
    def stack(self) -> str:
        """What its layer is one of: an encoder-decoder has two stacks."""
        return re.split(r"(?:^|\.)(?:layers|h|blocks)\.\d+\.", self.name)[0]

    @property
    def layer(self) -> int | None:
        """Index of its layer; None for what stands before or behind the layers."""
        found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", self.name)
        return int(found[1]) if found else None


def parameter_rows(model: nn.Module, config: Config) -> list[PlannedParameter]:
    """Every parameter, tied ones once, with its optimizer group."""
    widths = {name: parameter.element_size() for name, parameter in model.named_parameters()}
    described = describe(
        config.optimizer, model.named_parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    rows = []
    for row in described:
        numel, width = math.prod(row.shape), widths[row.name]
        rows.append(PlannedParameter(**vars(row), numel=numel, width=width, kind=kind_of(row.name)))
    return rows


def weight_bytes(rows: Sequence[PlannedParameter]) -> int:
    """Of the weights, and of their gradients."""
    return sum(row.width * row.numel for row in rows)


def optimizer_bytes(rows: Sequence[PlannedParameter]) -> int | None:
    """Of the optimizer's state; None for an optimizer that is not ours."""
    states = [row.state_bytes for row in rows]
    return None if None in states else sum(state or 0 for state in states)

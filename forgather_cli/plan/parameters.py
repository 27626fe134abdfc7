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
    weight_bytes: int
    trained: bool
    """A frozen one has neither a gradient nor an optimizer."""
    kind: str
    """See ``kind_of``; of small matrices beside frozen ones ``adapter``."""

    @property
    def gradient_bytes(self) -> int:
        return self.weight_bytes if self.trained else 0

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
    """Every parameter, tied ones once, with its optimizer group where it is trained."""
    named = dict(model.named_parameters())
    described = describe(
        config.optimizer,
        [(name, parameter) for name, parameter in named.items() if parameter.requires_grad],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    trained = {row.name: row for row in described}
    packed, adapters, rows = _packed(model, config), set[str](), []
    if config.adapter.freezes_base:
        from forgather_cli.adapters.layers import is_adapter

        adapters = set(filter(is_adapter, named))
    for name, parameter in named.items():
        shape, size = packed.get(name, (tuple(parameter.shape), parameter.nbytes))
        row = trained.get(name) or ParameterRow(name, shape, "frozen", "-", 0.0, None, 0)
        kind = "adapter" if name in adapters else kind_of(name)
        made = PlannedParameter(
            **vars(row), numel=math.prod(shape), weight_bytes=size, trained=name in trained, kind=kind
        )
        rows.append(made)
    return rows


def _packed(model: nn.Module, config: Config) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape and bytes of the weights that are in four bits once they are read."""
    if not config.adapter.in_four_bits:
        return {}
    from forgather_cli.adapters.nf4 import packed_bytes, packed_layers

    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, layer in packed_layers(model):
        shape = tuple(layer.stored_shape)
        found[f"{name}.weight"] = shape, packed_bytes(math.prod(shape), double_quant=layer.double_quant)
    return found


def weight_bytes(rows: Sequence[PlannedParameter]) -> int:
    return sum(row.weight_bytes for row in rows)


def gradient_bytes(rows: Sequence[PlannedParameter]) -> int:
    return sum(row.gradient_bytes for row in rows)


def frozen_bytes(rows: Sequence[PlannedParameter]) -> int:
    """Of the weights that are not trained."""
    return sum(row.weight_bytes for row in rows if not row.trained)


def optimizer_bytes(rows: Sequence[PlannedParameter]) -> int | None:
    """Of the optimizer's state; None for an optimizer that is not ours."""
    states = [row.state_bytes for row in rows]
    return None if None in states else sum(state or 0 for state in states)

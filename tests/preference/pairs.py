"""Pairs of preferences without a tokenizer, as batches of data=preference have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgather_cli.labels import IGNORED, UNITS
from forgather_cli.loss.build import build_loss
from forgather_cli.preference.loss import DPO
from forgather_cli.preference.rows import REFERENCE
from forgather_cli.preference.settings import DPOSettings

SIDE = 12
"""Tokens of a side at most."""


@dataclass(frozen=True)
class Pair:
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def pairs(number: int, seed: int = 0, vocab: int = 64) -> list[Pair]:
    random = torch.Generator().manual_seed(seed)

    def ids(least: int, most: int) -> list[int]:
        size = int(torch.randint(least, most + 1, (), generator=random))
        return torch.randint(1, vocab, (size,), generator=random).tolist()

    return [Pair(ids(1, 4), ids(1, SIDE - 4), ids(1, SIDE - 4)) for _ in range(number)]


def dpo(**settings: Any) -> DPO:
    loss = build_loss(DPOSettings(**settings), device=torch.device("cpu"))
    assert isinstance(loss, DPO)
    return loss


def batch_of(some: Sequence[Pair], per_row: int, reference: Tensor | None = None) -> dict[str, Tensor]:
    """Rows of ``per_row`` pairs each, but for the last; ``reference`` (pairs, 2)."""
    rows = [list(range(len(some)))[at : at + per_row] for at in range(0, len(some), per_row)]
    T = 2 * SIDE * per_row
    batch = {
        "input_ids": torch.zeros(len(rows), T, dtype=torch.int64),
        "labels": torch.full((len(rows), T), IGNORED),
        "document_ids": torch.full((len(rows), T), 2 * per_row),
        "position_ids": torch.zeros(len(rows), T, dtype=torch.int64),
        UNITS: torch.tensor([len(row) for row in rows]),
        REFERENCE: torch.full((len(rows), per_row, 2), float("nan"), dtype=torch.float64),
    }
    for r, row in enumerate(rows):
        at = 0
        for p, number in enumerate(row):
            each = some[number]
            for s, answer in enumerate((each.chosen, each.rejected)):
                size, whole = len(each.prompt) + len(answer), each.prompt + answer
                here = slice(at, at + size)
                batch["input_ids"][r, here] = torch.tensor(whole)
                batch["labels"][r, at + len(each.prompt) : at + size] = torch.tensor(answer)
                batch["document_ids"][r, here] = 2 * p + s
                batch["position_ids"][r, here] = torch.arange(size)
                at += size
            if reference is not None:
                batch[REFERENCE][r, p] = reference[number]
    return batch

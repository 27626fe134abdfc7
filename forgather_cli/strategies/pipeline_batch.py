"""Batches on their way into a pipeline.

Legend: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forgather_cli.errors import DataError
from forgather_cli.loss import IGNORED
from forgather_cli.strategies.base import Batch

MASKS = ("attention_mask", "document_ids", "position_ids")
"""What a batch may hold beside ``input_ids`` and ``labels``; each stage makes its own mask and angles of them."""


def stage_inputs(batch: Batch) -> Batch:
    """``batch`` with masks of one row, or without rows, expanded to (B, T). Raises DataError for what stages lack."""
    others = sorted(batch.keys() - {"input_ids", "labels", *MASKS})
    if others:
        raise DataError(
            f"trainer=pipeline: of a batch stages get {', '.join(MASKS)} and no other tensors, got "
            f"{', '.join(others)}; leave them out in data_collator, or choose trainer=ddp or fsdp2"
        )
    rows = len(batch["input_ids"])
    return {key: _expanded(value, rows) if key in MASKS else value for key, value in batch.items()}


def _expanded(mask: Tensor, rows: int) -> Tensor:
    return mask.reshape(-1, mask.shape[-1]).expand(rows, -1)


def labels_of(batch: Batch) -> Tensor:
    """The labels (B, T). Raises DataError."""
    labels = batch.get("labels")
    if labels is None:
        raise DataError(f"the batch has no labels, only {', '.join(batch) or 'nothing'}; add labels (B, T)")
    return labels


def padded(batch: Batch, multiple: int) -> Batch:
    """``batch`` with its last row repeated, without targets, until B is a multiple of ``multiple``."""
    rows = len(batch["input_ids"])
    extra = -rows % multiple
    if not extra:
        return batch
    filled = {key: torch.cat([value, value[-1:].expand(extra, -1)]) for key, value in batch.items()}
    filled["labels"][rows:] = IGNORED
    return filled


def chunks(batch: Batch, number: int) -> list[Batch]:
    """``batch`` cut by rows into up to ``number`` parts, none of them empty."""
    rows = len(batch["input_ids"])
    split = {key: value.tensor_split(min(number, rows)) for key, value in batch.items()}
    return [dict(zip(split, part, strict=True)) for part in zip(*split.values(), strict=True)]

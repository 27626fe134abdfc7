"""Samples to batches, and what a batch must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgather_cli.errors import DataError

Batch = dict[str, Tensor]
"""``input_ids`` and ``labels`` (B, T) int64, labels aligned with them, -100 = no target, and what else there is."""
CollateFn = Callable[[list[Any]], Any]
IGNORED = -100


@dataclass(frozen=True)
class Step:
    """This rank's share of one optimizer step."""

    microbatches: list[Batch]
    num_targets: int
    """Counted on the CPU: labels[:, 1:] != -100."""
    num_samples: int


def default_collate(samples: list[Any]) -> Batch:
    """Stack a list of dicts key by key. Text and None are left out, ``label`` is renamed to ``labels``, as in
    Hugging Face's ``default_data_collator`` (transformers 5.23). Raises DataError for lengths that differ."""
    first = samples[0]
    if not isinstance(first, Mapping):
        raise DataError(
            f"train_dataset: a sample is a {type(first).__name__}, expected a dict with input_ids and labels"
        )
    names = {"label": "labels", "label_ids": "labels"}
    kept = (key for key, value in first.items() if value is not None and not isinstance(value, str))
    return {names.get(key, key): _stack(key, [sample[key] for sample in samples]) for key in kept}


def _stack(key: str, values: list[Any]) -> Tensor:
    try:
        tensors = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"train_dataset: cannot make a tensor of {key!r} ({error}); remove it or give a data_collator"
        ) from error
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        lengths = sorted({len(tensor) if tensor.ndim else 1 for tensor in tensors})
        raise DataError(
            f"train_dataset: {key!r} has different lengths in one batch ({', '.join(map(str, lengths))}); "
            f"give a data_collator that pads, or use data.packing"
        )
    return torch.stack(tensors)


def as_batch(value: Any) -> Batch:
    """A batch from what a collate function or dataloader returned. Raises DataError for anything but named tensors."""
    if not isinstance(value, Mapping):
        raise DataError(f"batches must be dicts with input_ids and labels, got a {type(value).__name__}")
    for key, tensor in value.items():
        if not isinstance(tensor, Tensor):
            raise DataError(
                f"batch key {key!r} is a {type(tensor).__name__}, not a tensor; drop it in the data_collator"
            )
    return dict(value)


def is_batch(item: Any) -> bool:
    """True for a batch, False for one sample: a batch's tensors have two dimensions and more."""
    if not isinstance(item, Mapping):
        return False
    value = item.get("input_ids", item.get("labels"))
    return isinstance(value, Tensor) and value.ndim > 1


def num_samples(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def num_targets(batch: Batch) -> int:
    """Counted targets of a CPU batch. Raises DataError for a batch without usable labels."""
    labels = batch.get("labels")
    if labels is None:
        raise DataError(
            f"a training batch has no 'labels' (its keys: {', '.join(batch)}); add them to the data, or in the "
            "data_collator"
        )
    if labels.ndim != 2:
        raise DataError(f"labels have shape {tuple(labels.shape)}, expected (batch, tokens)")
    if labels.device.type != "cpu":
        return int((labels[:, 1:] != IGNORED).sum())
    return _count(labels)


def _count(labels: Tensor) -> int:
    array = labels.numpy()[:, 1:]  # numpy: a third of the time of the same two torch calls on a few thousand labels
    return int((array != IGNORED).sum())


def step_of(microbatches: Sequence[Batch]) -> Step:
    batches = list(microbatches)
    return Step(batches, sum(map(num_targets, batches)), sum(map(num_samples, batches)))


def rank_slice(length: int, rank: int, size: int) -> tuple[int, int]:
    """The part [start, stop) of a global batch of ``length`` that a rank trains; it may be empty."""
    return rank * length // size, (rank + 1) * length // size

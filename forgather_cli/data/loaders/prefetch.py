"""Batches to the device one ahead of the model, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from forgather_cli.data.loaders.collate import Batch, Step

_Item = TypeVar("_Item", Step, Batch)
_State = TypeVar("_State")


def to_device(
    items: Iterator[tuple[_Item, _State]], device: torch.device, pin_memory: bool | None
) -> Iterator[tuple[_Item, _State]]:
    """Steps or batches on ``device``, each with the state that belongs to it.

    On CUDA the next item is read and its copy queued before the present one is handed out, from pinned memory
    (``pin_memory``; None: yes); the model's stream waits for the copy, the host does not. Elsewhere items are moved as
    they come.
    """
    if device.type == "cpu":
        return items
    if device.type == "cuda":
        return _prefetched(items, device, pin=pin_memory is not False)
    return ((_moved(item, lambda tensor: tensor.to(device)), state) for item, state in items)


def _prefetched(
    items: Iterator[tuple[_Item, _State]], device: torch.device, *, pin: bool
) -> Iterator[tuple[_Item, _State]]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(tensor: Tensor) -> Tensor:
        if pin and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def queue() -> tuple[_Item, _State, torch.cuda.Event] | None:
        following = next(items, None)
        if following is None:
            return None
        with torch.cuda.stream(stream):
            item = _moved(following[0], copy)
            return item, following[1], stream.record_event()

    ready = queue()
    while ready is not None:
        item, state, copied = ready
        ready = queue()
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in _tensors(item):
            tensor.record_stream(current)  # the allocator must not reuse it for the next copy while the model reads
        yield item, state


def _moved(item: _Item, move: Callable[[Tensor], Tensor]) -> _Item:
    def moved(batch: Batch) -> Batch:
        return {key: move(tensor) for key, tensor in batch.items()}

    if isinstance(item, Step):
        return replace(item, microbatches=[moved(batch) for batch in item.microbatches])
    return moved(item)


def _tensors(item: Step | Batch) -> Iterator[Tensor]:
    for batch in item.microbatches if isinstance(item, Step) else [item]:
        yield from batch.values()

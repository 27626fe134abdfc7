"""Copies batches to the device, on CUDA one step ahead of the model and on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from forgather_cli.data.loaders.collate import Batch

_Rest = TypeVar("_Rest")


def to_device(
    items: Iterator[tuple[list[Batch], _Rest]], device: torch.device, pin_memory: bool | None
) -> Iterator[tuple[list[Batch], _Rest]]:
    """The same items with their batches on ``device``.

    On CUDA the next item is read and its copy queued, from pinned memory (``pin_memory``; None: yes), before the
    present one is yielded; the model's stream waits for the copy, the host does not. On other devices items are copied
    when they are due.
    """
    if device.type == "cpu":
        return items
    if device.type == "cuda":
        return _prefetched(items, device, pin=pin_memory is not False)
    return ((_moved(batches, lambda tensor: tensor.to(device)), rest) for batches, rest in items)


def _prefetched(
    items: Iterator[tuple[list[Batch], _Rest]], device: torch.device, *, pin: bool
) -> Iterator[tuple[list[Batch], _Rest]]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(tensor: Tensor) -> Tensor:
        if pin and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    def queue() -> tuple[list[Batch], _Rest, torch.cuda.Event] | None:
        following = next(items, None)
        if following is None:
            return None
        with torch.cuda.stream(stream):
            return _moved(following[0], copy), following[1], stream.record_event()

    ready = queue()
    while ready is not None:
        batches, rest, copied = ready
        ready = queue()
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for batch in batches:
            for tensor in batch.values():
                tensor.record_stream(current)  # the allocator must not reuse it for the next copy while the model reads
        yield batches, rest


def _moved(batches: list[Batch], move: Callable[[Tensor], Tensor]) -> list[Batch]:
    return [{key: move(tensor) for key, tensor in batch.items()} for batch in batches]

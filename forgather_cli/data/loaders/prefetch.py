"""Copies batches to the device, on CUDA one step ahead of the model and on a stream of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forgather_cli.data.loaders.collate import Batch
from forgather_cli.labels import STARTS

_Rest = TypeVar("_Rest")


def to_device(
    items: Iterator[tuple[list[Batch], _Rest]], device: torch.device, pin_memory: bool | None, starts: bool = False
) -> Iterator[tuple[list[Batch], _Rest]]:
    """The same items with their batches on ``device``, on CUDA as ``with_starts`` makes them where ``starts`` says so.

    On CUDA the next item is read and its copy queued, from pinned memory (``pin_memory``; None: yes), before the
    present one is yielded; the model's stream waits for the copy, the host does not. On other devices items are copied
    when they are due.
    """
    if device.type == "cpu":
        return items
    if device.type == "cuda":
        return _prefetched(items, device, pin=pin_memory is not False, starts=starts)
    return ((_moved(batches, lambda tensor: tensor.to(device)), rest) for batches, rest in items)


def _prefetched(
    items: Iterator[tuple[list[Batch], _Rest]], device: torch.device, *, pin: bool, starts: bool
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
            batches = [with_starts(batch) for batch in following[0]] if starts else following[0]
            return _moved(batches, copy), following[1], stream.record_event()

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


def with_starts(batch: Batch) -> Batch:
    """``batch`` on the CPU with ``STARTS`` (B, n) int32 beside ``document_ids`` (B, T): where documents begin in each
    row, and T from there on. n is a power of 2, so that shapes seldom change: on a device nobody could tell it without
    waiting. Of ids that may come again behind others nothing is said.
    """
    ids = batch.get("document_ids")
    if ids is None or ids.dim() != 2 or not len(ids) or bool((ids[:, 1:] < ids[:, :-1]).any()):
        return batch
    begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    places = torch.split(begins.nonzero()[:, 1].to(torch.int32), begins.sum(1).tolist())
    starts = pad_sequence(list(places), batch_first=True, padding_value=ids.shape[1])
    n = max(16, 1 << (starts.shape[1] - 1).bit_length())
    return {**batch, STARTS: F.pad(starts, (0, n - starts.shape[1]), value=ids.shape[1])}


def _moved(batches: list[Batch], move: Callable[[Tensor], Tensor]) -> list[Batch]:
    moved = [{key: move(tensor) for key, tensor in batch.items()} for batch in batches]
    for batch in moved if "torch._dynamo" in sys.modules else ():  # and is not imported to be told
        if STARTS in batch:
            torch._dynamo.maybe_mark_dynamic(batch[STARTS], 1)  # else another size compiles the model again
    return moved

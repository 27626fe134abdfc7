"""Tensors as they go over the wire: fp32, bf16, int8 or int4.

int8 and int4 have one scale for each block of ``BLOCK`` values of a row, the largest magnitude over 127 or 7, and are
rounded to the nearest, or at random by how near they are. Blocks never cross rows, so ranks that hold different rows of
a tensor encode it as one rank would. A tensor of one dimension, few bytes of a model, goes as fp32 in their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Compression = Literal["fp32", "bf16", "int8", "int4"]
BLOCK = 128
"""Values that share a scale."""
_MOST = {"int8": 127, "int4": 7}


def is_lossy(compression: Compression) -> bool:
    """Whether what is lost is kept for the next time (error feedback)."""
    return compression in _MOST


def encode(
    name: str, values: Tensor, compression: Compression, random: torch.Generator | None = None
) -> dict[str, Tensor]:
    """What is sent of a tensor, fp32, of any shape with whole rows: under ``name``, of blocks also ``name:scale``.
    ``random``: round at random by it, up or down, so that the mean is the value.

    The shapes sent begin with the rows: bf16 and fp32 (rows, ...), int8 (rows, n), int4 (rows, ceil(n / 2)), its scales
    fp32 (rows, ceil(n / BLOCK)), where n are a row's values.
    """
    if compression == "fp32" or (compression in _MOST and values.ndim < 2):
        return {name: values.contiguous()}
    if compression == "bf16":
        return {name: values.to(torch.bfloat16).contiguous()}
    blocks = _in_blocks(values)
    most = _MOST[compression]
    scale = blocks.abs().amax(-1) / most  # (rows, blocks)
    whole = blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    whole = whole.round_() if random is None else whole.add_(torch.rand(whole.shape, generator=random)).floor_()
    whole.clamp_(-most, most)
    flat = whole.to(torch.int8).flatten(1)[:, : math.prod(values.shape[1:])]
    if compression == "int4":
        flat = torch.nn.functional.pad(flat, (0, flat.shape[1] % 2)) + 8  # 1 to 15
        flat = (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)
    return {name: flat.contiguous(), f"{name}:scale": scale.contiguous()}


def decode(name: str, sent: dict[str, Tensor], shape: Sequence[int], compression: Compression) -> Tensor:
    """fp32, ``shape``: that of what was encoded."""
    data = sent[name]
    scale = sent.get(f"{name}:scale")
    if scale is None:
        return data.to(torch.float32).view(tuple(shape))
    if compression == "int4":
        halves = torch.stack([data & 15, data >> 4], -1).flatten(1)
        data = halves.to(torch.int8) - 8
    row = math.prod(shape[1:])
    blocks = _in_blocks(data[:, :row].to(torch.float32)) * scale[..., None]
    return blocks.flatten(1)[:, :row].reshape(tuple(shape))


def num_bytes(shape: Sequence[int], compression: Compression) -> int:
    """What a tensor takes on the wire, without the header of its body."""
    count, row = math.prod(shape), math.prod(shape[1:])
    if compression == "fp32" or (compression in _MOST and len(shape) < 2):
        return 4 * count
    if compression == "bf16":
        return 2 * count
    values = row if compression == "int8" else -(-row // 2)
    return shape[0] * (values + 4 * -(-row // BLOCK))


def _in_blocks(values: Tensor) -> Tensor:
    """(rows, ...) as (rows, blocks, BLOCK), filled up with zeros."""
    flat = values.flatten(1)
    padded = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK))
    return padded.view(len(padded), padded.shape[1] // BLOCK, BLOCK)

"""Frozen linear layers in four bits: NF4 by bitsandbytes (0.50), blocks of 64 numbers with a scale each, the scales in
eight bits too (``double_quant``). Source: Dettmers et al. 2023, arXiv:2305.14314.

The weight of such a layer is its packed bytes, which no other name holds; until it is read it has none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.errors import SetupError


def need_bitsandbytes() -> Any:
    """The functions of the package. Raises SetupError with the command that installs it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SetupError("adapter=qlora: needs the bitsandbytes package; pip install 'forgather[qlora]'")
    from bitsandbytes import functional

    return functional


class NF4Linear(nn.Module):
    """x W' + bias, W in four bits. ``freeze`` makes one of a linear layer that is there."""

    weight: nn.Parameter
    state: Any
    """What bitsandbytes unpacks the weight with; None before it is read."""
    double_quant: bool

    def forward(self, x: Tensor) -> Tensor:
        import bitsandbytes

        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        bias = getattr(self, "bias", None)
        out: Tensor = bitsandbytes.matmul_4bit(x, self.weight.t(), quant_state=self.state, bias=None)
        return out if bias is None else out + bias.to(out.dtype)

    def unpacked(self) -> Tensor:
        """The weight (out, in) as it is multiplied with, fp32."""
        return need_bitsandbytes().dequantize_4bit(self.weight.data, self.state).float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def pack(self, weight: Tensor) -> None:
        """Take ``weight`` (out, in)."""
        packed, self.state = need_bitsandbytes().quantize_4bit(
            weight.contiguous(), quant_type="nf4", compress_statistics=self.double_quant, blocksize=64
        )
        self.weight = nn.Parameter(packed, requires_grad=False)


def packed_bytes(count: int, *, double_quant: bool) -> int:
    """Of a weight of so many numbers with its scales."""
    blocks = -(-count // 64)
    return -(-count // 2) + (blocks + 4 * -(-blocks // 256) if double_quant else 4 * blocks)


def freeze(layer: nn.Linear, *, double_quant: bool) -> None:
    """Make ``layer``, in place, one whose weight is yet to be packed."""
    device = layer.weight.device
    layer.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=device), requires_grad=False)
    layer.__class__ = _mixed(type(layer))
    layer.state, layer.double_quant = None, double_quant  # type: ignore[assignment]


@cache
def _mixed(base: Any) -> Any:
    return type(f"NF4{base.__name__}", (NF4Linear, base), {})


def packed_layers(part: nn.Module) -> Iterator[tuple[str, NF4Linear]]:
    """The layers in four bits, by name."""
    for name, layer in part.named_modules():
        if isinstance(layer, NF4Linear):
            yield name, layer


@contextmanager
def without_packed(part: nn.Module) -> Iterator[None]:
    """Inside, weights in four bits are not there, so that what fills a model by its names fills the others."""
    taken = [(layer, layer._parameters.pop("weight")) for _, layer in packed_layers(part)]
    try:
        yield
    finally:
        for layer, weight in taken:
            layer._parameters["weight"] = weight


def read_packed(part: nn.Module, read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Pack the weight of each layer, one at a time: ``read`` gives that of a full name."""
    for name, layer in packed_layers(part):
        layer.pack(read(f"{name}.weight").to(device=device, dtype=dtype))

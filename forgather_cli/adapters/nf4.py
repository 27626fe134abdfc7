"""Frozen linear layers in four bits: NF4 by bitsandbytes (0.50), blocks of 64 numbers with a scale each, the scales in
eight bits too (``double_quant``). Source: Dettmers et al. 2023, arXiv:2305.14314.

The weight of such a layer is its packed bytes, which no other name holds; until it is read it has none. They follow
from the numbers in the base's files alone, whatever precision a run has: transformers packs the same ones.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from forgather_cli.errors import ModelError, SetupError

_BLOCK = 64
_PORTION = 1 << 20  # numbers packed at a time, in whole blocks: on a CPU that takes 20 bytes for each


@cache
def need_bitsandbytes() -> Any:
    """The package, whose import takes seconds. Raises SetupError with the command that installs it."""
    # at its import it asks for the package kernels, on CPUs with AVX512-BF16 (0.50)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise SetupError("adapter=qlora: needs the package bitsandbytes; pip install 'forgather[qlora]'") from error


class NF4Linear(nn.Module):
    """x W' + bias, W in four bits. ``freeze`` makes one of a linear layer that is there."""

    weight: nn.Parameter
    state: Any
    """What bitsandbytes unpacks the weight with; None before it is read."""
    double_quant: bool
    is_transposed: bool
    """Files have the weight as (in, out): GPT-2's Conv1D."""
    stored_shape: torch.Size
    stored_dtype: torch.dtype
    """Of the weight in files; the dtype is known once it is read."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        bias = getattr(self, "bias", None)
        out: Tensor = need_bitsandbytes().matmul_4bit(x, self.weight.t(), quant_state=self.state, bias=None)
        return out if bias is None else out + bias.to(out.dtype)

    def unpacked(self) -> Tensor:
        """The weight (out, in) as it is multiplied with, fp32."""
        exact = copy.copy(self.state)
        exact.dtype = torch.float32
        return need_bitsandbytes().functional.dequantize_4bit(self.weight.data, exact)  # type: ignore[no-any-return]

    def as_stored(self) -> Tensor:
        """The unpacked weight as files would have it, fp32."""
        return self.unpacked().T.contiguous() if self.is_transposed else self.unpacked()

    @torch.no_grad()
    def pack(self, name: str, stored: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """Take the weight as files have it; the gradient that passes the layer is computed in ``dtype``.

        Raises ModelError, with ``name``, for another shape and for numbers that are not finite.
        """
        if stored.shape != self.stored_shape or not stored.is_floating_point():
            raise ModelError(
                f"model.path: {name} has shape {tuple(stored.shape)} and dtype {stored.dtype}, expected "
                f"{tuple(self.stored_shape)} in floating point by its config.json; mend it or save the model again"
            )
        functional = need_bitsandbytes().functional
        rows = stored.T.contiguous() if self.is_transposed else stored
        # what stays is allocated before what does not: else the holes between stay too
        packed = torch.empty((rows.numel() + 1) // 2, 1, dtype=torch.uint8, device=device)
        scales = torch.empty(-(-rows.numel() // _BLOCK), device=device)
        for number, portion in enumerate(torch.split(rows.reshape(-1), _PORTION)):
            done, state = functional.quantize_4bit(
                portion.to(device=device, dtype=torch.float32), quant_type="nf4", blocksize=_BLOCK
            )
            packed[number * _PORTION // 2 :][: len(done)] = done
            scales[number * _PORTION // _BLOCK :][: len(state.absmax)] = state.absmax
        # as quantize_4bit does it of the whole (bitsandbytes 0.50, functional.py)
        state.absmax, state.shape, state.dtype = scales, rows.shape, dtype
        if not torch.isfinite(state.absmax).all():
            raise ModelError(f"model.path: {name} holds values that are not finite; give another model")
        if self.double_quant:
            state.offset = state.absmax.mean()
            state.absmax, state.state2 = functional.quantize_blockwise(state.absmax - state.offset, blocksize=256)
            state.nested = True
        self.stored_dtype = stored.dtype
        self.state, self.weight = state, nn.Parameter(packed, requires_grad=False)
        self.weight.num_packed = rows.numel()  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NF4Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state.to(self.weight.device)
        return self


def packed_bytes(count: int, *, double_quant: bool) -> int:
    """Of a weight of so many numbers with its scales."""
    blocks = -(-count // _BLOCK)
    return -(-count // 2) + (blocks + 4 * -(-blocks // 256) if double_quant else 4 * blocks)


def freeze(layer: nn.Module, *, double_quant: bool) -> int:
    """Make ``layer``, a linear one or a Conv1D, in place one whose weight is yet to be packed. Returns how many numbers
    that has."""
    weight: Any = layer.weight
    layer.is_transposed = type(layer).__name__ == "Conv1D"  # type: ignore[assignment]
    layer.stored_shape, layer.state, layer.double_quant = weight.shape, None, double_quant  # type: ignore[assignment]
    layer.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=weight.device), requires_grad=False)
    layer.weight.num_packed = weight.numel()  # type: ignore[attr-defined]
    become(layer, NF4Linear, "NF4")
    return int(weight.numel())


def become(layer: nn.Module, kind: Any, prefix: str) -> None:
    """Make ``layer``, in place, one of ``kind`` that is one of its own class too, whose name gets the prefix."""
    layer.__class__ = _mixed(kind, cast(Any, type(layer)), prefix)


@cache
def _mixed(kind: Any, base: Any, prefix: str) -> Any:
    return type(f"{prefix}{base.__name__}", (kind, base), {})


def packed_layers(part: nn.Module) -> Iterator[tuple[str, NF4Linear]]:
    """The layers in four bits, by name."""
    for name, layer in part.named_modules():
        if isinstance(layer, NF4Linear):
            yield name, layer


@contextmanager
def without(layers: Iterable[nn.Module], begins: str | tuple[str, ...]) -> Iterator[None]:
    """Inside, these layers lack the parameters and modules whose names begin so: what fills or reads a model by its
    names leaves them out."""
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for layer in layers:
        kinds: tuple[dict[str, Any], ...] = (layer._parameters, layer._modules)
        for members in kinds:
            taken.append((members, {name: members.pop(name) for name in list(members) if name.startswith(begins)}))
    try:
        yield
    finally:
        for members, own in taken:
            members.update(own)


def read_packed(part: nn.Module, read: Callable[[str], Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Pack the weight of each layer, one at a time: ``read`` gives that of a full name. Raises ModelError."""
    for name, layer in packed_layers(part):
        layer.pack(f"{name}.weight", read(f"{name}.weight"), device, dtype)

"""Layers with a low-rank product beside their matrix, under PEFT's names (peft 0.21, ``tuners/lora``).

An adapted layer is the same object with the same parameters under the same names, and two more: ``lora_A`` (r, in) and
``lora_B`` (out, r); of an embedding ``lora_embedding_A`` (r, rows) and ``lora_embedding_B`` (width, r). With DoRA
``lora_magnitude_vector`` (out,) too.

Sources: LoRA Hu et al. 2021, arXiv:2106.09685; rsLoRA Kalajdzievski 2023, arXiv:2312.03732; DoRA Liu et al. 2024,
arXiv:2402.09353.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from forgather_cli.adapters.nf4 import NF4Linear
from forgather_cli.shards import fill_local, local

AT_ONCE = 2**22
"""Numbers of a weight that are in fp32 at a time, for DoRA's norms."""


@dataclass(frozen=True)
class Shape:
    """What an adapter beside one layer is."""

    rank: int
    scaling: float
    dropout: float
    is_dora: bool
    is_gaussian: bool
    """A starts as normal(0, 1 / rank), in place of Kaiming's uniform."""


class Adapted(nn.Module):
    """A layer with an adapter. ``attach`` makes one of a layer that is there."""

    adapter: Shape
    weight: Tensor

    def delta(self) -> Tensor:
        """What the adapter adds to the weight, in fp32, without DoRA's norms."""
        raise NotImplementedError

    def merged(self) -> Tensor:
        """The weight with the adapter in it, in fp32."""
        raise NotImplementedError

    def start(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Write the initial value of the adapter's parameter ``name`` into ``tensor`` (whole, fp32, on the CPU)."""
        raise NotImplementedError


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.rpartition("lora_")[1] != ""


class AdaptedLinear(Adapted):
    """x W' + bias, with W' = W + scaling B A, or DoRA's m W' / |W'| by rows."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_magnitude_vector: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        shape, flat = self.adapter, x.flatten(0, -2)
        out: Tensor = super().forward(flat)
        # of fp32 autocast would make another copy, to round it
        given = flat if torch.is_autocast_enabled(x.device.type) else flat.to(self.lora_A.weight.dtype)
        dropped = F.dropout(given, shape.dropout, self.training) if shape.dropout else given
        low = self.lora_A(dropped) * shape.scaling
        out = self._directed(out, dropped, low) if shape.is_dora else self._plus(out, low)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _plus(self, out: Tensor, low: Tensor) -> Tensor:
        """``out`` and the product, in the memory of ``out``: nothing else needs what the layer itself gives."""
        raised = self.lora_B.weight
        if torch.is_autocast_enabled(out.device.type):  # which leaves products in place alone
            raised = raised.to(out.dtype)
        if low.dtype == raised.dtype == out.dtype:
            return out.addmm_(low, raised.t())
        return (out + F.linear(low, raised)).to(out.dtype)

    def _directed(self, out: Tensor, dropped: Tensor, low: Tensor) -> Tensor:
        """DoRA: what is beside the bias is scaled, whose part without dropout is not."""
        assert self.lora_magnitude_vector is not None
        bias = getattr(self, "bias", None)
        plain = out
        if self.adapter.dropout and self.training:
            plain = F.linear(dropped, self._weight().to(dropped.dtype))
        elif bias is not None:
            plain = out - bias
        start = self._plus(out, low)
        whole = start if plain is out else self._plus(plain, low)
        scale = self.lora_magnitude_vector / self._norms()
        return torch.addcmul(start, whole, (scale - 1).to(whole.dtype))  # of which half precision rounds the change

    @torch.no_grad()  # section 4.3 of the paper: the norm is a constant of the step
    def _norms(self) -> Tensor:
        """Of the rows of W + scaling B A, fp32, without making it: |W|^2 + 2 scaling W A' B' + |scaling B A|^2."""
        weight, scaling = self._weight(), self.adapter.scaling
        lower, raised = self.lora_A.weight.float(), self.lora_B.weight.float() * scaling
        with torch.autocast(weight.device.type, enabled=False):
            squares = ((raised @ (lower @ lower.T)) * raised).sum(1)
            # some rows at a time: a whole matrix in fp32 may be larger than a step's activations
            several = max(1, AT_ONCE // weight.shape[1])
            for rows, b, square in zip(*(torch.split(t, several) for t in (weight, raised, squares)), strict=True):
                part = rows.float()
                square += torch.linalg.vector_norm(part, dim=1).square() + 2 * ((part @ lower.T) * b).sum(1)
        return squares.sqrt_()

    def _weight(self) -> Tensor:
        """(out, in)."""
        return self.unpacked() if isinstance(self, NF4Linear) else self.weight

    def _product(self) -> Tensor:
        """(out, in), fp32."""
        shape = self.adapter
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.lora_B.weight.float() @ self.lora_A.weight.float() * shape.scaling

    def delta(self) -> Tensor:
        return self._product()

    @torch.no_grad()
    def merged(self) -> Tensor:
        whole = self._weight().float() + self._product()
        if self.adapter.is_dora:
            assert self.lora_magnitude_vector is not None
            whole *= (self.lora_magnitude_vector.float() / whole.norm(dim=1))[:, None]
        return whole

    def start(self, name: str, tensor: Tensor, generator: Generator) -> None:
        if name == "lora_B.weight":
            tensor.zero_()
        elif self.adapter.is_gaussian:
            tensor.normal_(0.0, 1 / self.adapter.rank, generator=generator)
        else:
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)


class AdaptedConv1D(AdaptedLinear):
    """The linear layer of GPT-2 in transformers, whose weight is (in, out)."""

    def _weight(self) -> Tensor:
        return self.weight.T

    def delta(self) -> Tensor:
        return self._product().T

    def merged(self) -> Tensor:
        return super().merged().T.contiguous()


class AdaptedEmbedding(Adapted):
    """Rows of W + scaling (B A)^T."""

    lora_embedding_A: nn.Parameter
    lora_embedding_B: nn.Parameter

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids)
        low = F.embedding(ids, self.lora_embedding_A.T, getattr(self, "padding_idx", None)) @ self.lora_embedding_B.T
        return out + low * self.adapter.scaling

    def delta(self) -> Tensor:
        return (self.lora_embedding_B.float() @ self.lora_embedding_A.float()).T * self.adapter.scaling

    @torch.no_grad()
    def merged(self) -> Tensor:
        return self.weight.float() + self.delta()

    def start(self, name: str, tensor: Tensor, generator: Generator) -> None:
        if name == "lora_embedding_A":
            tensor.zero_()
        else:
            tensor.normal_(generator=generator)


def sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a layer that can be adapted: a linear layer, GPT-2's Conv1D, an embedding; else None."""
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    if type(layer).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2:
        return weight.shape[0], weight.shape[1]
    return None


def attach(layer: nn.Module, shape: Shape, dtype: torch.dtype) -> None:
    """Make ``layer`` an adapted one, in place; its adapter's parameters are of ``dtype``, on meta if the weight is."""
    found = sizes(layer)
    assert found is not None
    inner, outer = found
    weight: Any = layer.weight
    options = {"dtype": dtype, "device": weight.device}
    if isinstance(layer, nn.Embedding):
        kind: type[Adapted] = AdaptedEmbedding
        layer.lora_embedding_A = nn.Parameter(torch.zeros(shape.rank, inner, **options))
        layer.lora_embedding_B = nn.Parameter(torch.zeros(outer, shape.rank, **options))
    else:
        kind = AdaptedLinear if isinstance(layer, nn.Linear) else AdaptedConv1D
        for name, width, height in (("lora_A", inner, shape.rank), ("lora_B", shape.rank, outer)):
            made = nn.utils.skip_init(nn.Linear, width, height, bias=False, **options)
            layer.add_module(name, made)
        if shape.is_dora:
            layer.lora_magnitude_vector = nn.Parameter(torch.ones(outer, **options))
    layer.__class__ = _mixed(kind, type(layer))
    layer.adapter = shape  # type: ignore[assignment]


@cache
def _mixed(kind: Any, base: Any) -> Any:
    return type(f"Adapted{base.__name__}", (kind, base), {})


@torch.no_grad()
def start_magnitudes(layer: AdaptedLinear) -> None:
    """DoRA's norms are those of the weight's rows, which this rank's rows of the weight tell: B is zero yet."""
    assert layer.lora_magnitude_vector is not None
    weight = local(layer.weight)
    rows = weight.T if isinstance(layer, AdaptedConv1D) else weight
    held = local(layer.lora_magnitude_vector)
    if rows.shape[0] == held.shape[0]:
        held.copy_(rows.float().norm(dim=1))
        return
    whole: Any = layer.weight  # columns are cut (Conv1D under fsdp2): its rows are on other ranks
    full = whole.full_tensor()
    fill_local(layer.lora_magnitude_vector, (full.T if isinstance(layer, AdaptedConv1D) else full).float().norm(dim=1))

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
        out: Tensor = super().forward(x)
        shape = self.adapter
        given = x.to(self.lora_A.weight.dtype)  # autocast rounds it again
        dropped = F.dropout(given, shape.dropout, self.training) if shape.dropout else given
        low = self.lora_B(self.lora_A(dropped))
        if not shape.is_dora:
            return (out + low * shape.scaling).to(out.dtype)
        assert self.lora_magnitude_vector is not None
        with torch.no_grad():  # section 4.3 of the paper: the norm is a constant of the step
            norms = self._weight().float().add(self._product()).norm(dim=1)
            zero = (norms == 0).float()  # rows of zeros have no direction yet: LoRA gives them one
        scale = self.lora_magnitude_vector / (norms + zero) + zero
        bias = getattr(self, "bias", None)
        if shape.dropout and self.training:
            plain = F.linear(dropped, self._weight().to(dropped.dtype))
        else:
            plain = out if bias is None else out - bias
        return (out + (scale - 1) * plain + scale * low * shape.scaling).to(out.dtype)

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
            norms = whole.norm(dim=1)
            whole *= (self.lora_magnitude_vector.float() / (norms + (norms == 0)))[:, None]
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

"""Linear, embedding and norm: torch's own, plus how each of their parameters starts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn


class Linear(nn.Linear):
    """``nn.Linear`` whose weight starts as normal(0, ``std``) and whose bias starts at 0."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, std: float) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def fill(self, name: str, tensor: Tensor, generator: Generator | None = None) -> None:
        """Write the initial value of the parameter ``name`` into ``tensor``."""
        if name == "bias":
            tensor.zero_()
        else:
            tensor.normal_(0.0, self.std, generator=generator)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # where torch 2.13 imports its compiler to draw nothing, 1.0 s
            for name, parameter in self.named_parameters(recurse=False):
                self.fill(name, parameter)


class Embedding(nn.Embedding):
    """``nn.Embedding`` whose weight starts as normal(0, ``std``)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def fill(self, name: str, tensor: Tensor, generator: Generator | None = None) -> None:
        """Write the initial value of the parameter ``name`` into ``tensor``."""
        tensor.normal_(0.0, self.std, generator=generator)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # as in Linear
            self.fill("weight", self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the weight's dtype (fp32 under autocast).

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    keeps_dtype = False
    """True: what comes out has the dtype of ``x``, the weight being rounded to it (``half_stream``)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def fill(self, name: str, tensor: Tensor, generator: Generator | None = None) -> None:
        """Write the initial value of the parameter ``name`` into ``tensor``."""
        tensor.fill_(1.0)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.fill("weight", self.weight)

    def forward(self, x: Tensor) -> Tensor:
        # one dtype for both arguments: a mixed pair falls back to an unfused kernel
        if not self.keeps_dtype:
            return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
        # which is computed in fp32; CUDA's autocast would hand it fp32, and out (torch 2.13, autocast_mode.h)
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def to_autocast(x: Tensor) -> Tensor:
    """``x`` in the autocast dtype: one cast where several linear layers would each make their own."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

"""Layers with a low-rank product beside their matrix, under PEFT's names (peft 0.21, ``tuners/lora``).

An adapted layer is the same object with the same parameters under the same names, and two more: ``lora_A`` (r, in) and
``lora_B`` (out, r); of an embedding ``lora_embedding_A`` (r, rows) and ``lora_embedding_B`` (width, r). With DoRA
``lora_magnitude_vector`` (out,) too. A module that holds its parameters itself has ``lora_A`` and ``lora_B`` for the
last adapted one; those of the one before lie in ``base_layer``, and so on inwards. Rows of tokens that are trained in
the place of the weight's lie in ``token_adapter.trainable_tokens_delta``.

Sources: LoRA Hu et al. 2021, arXiv:2106.09685; rsLoRA Kalajdzievski 2023, arXiv:2312.03732; DoRA Liu et al. 2024,
arXiv:2402.09353.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from forgather_cli.adapters.nf4 import NF4Linear, become, without
from forgather_cli.models.init import stable_seed
from forgather_cli.models.resize import rows_like
from forgather_cli.shards import fill_local, is_sharded, local

AT_ONCE = 2**22
"""Numbers of a weight that are in fp32 at a time, for DoRA's norms."""


@dataclass(frozen=True)
class LowRank:
    """What an adapter beside one layer is."""

    rank: int
    scaling: float
    dropout: float
    is_dora: bool
    is_gaussian: bool
    """A starts as normal(0, 1 / rank), in place of Kaiming's uniform."""


class Adapted(nn.Module):
    """A layer with an adapter. ``attach`` makes one of a layer that is there."""

    adapter: LowRank
    weight: Tensor

    @property
    def adapted(self) -> tuple[str, ...]:
        """Names of its own parameters that have an adapter."""
        return ("weight",)

    def merged(self, name: str = "weight") -> Tensor:
        """The parameter ``name`` with the adapter in it, in fp32."""
        raise NotImplementedError

    @torch.no_grad()
    def start(self, seed: int, path: str) -> None:
        """Fill the adapter of this layer, whose weight is there: by (seed, full name), the same in every layout."""
        for name, parameter in self.named_parameters():
            if name.startswith(MEMBERS) and name != "lora_magnitude_vector":
                drawn = torch.empty(parameter.shape)
                self._draw(name, drawn, Generator().manual_seed(stable_seed(seed, f"{path}.{name}")))
                fill_local(parameter, drawn)

    def _draw(self, name: str, tensor: Tensor, generator: Generator) -> None:
        """Write the initial value of the adapter's parameter ``name`` into ``tensor`` (whole, fp32, on the CPU)."""
        raise NotImplementedError


MEMBERS = ("lora_", "base_layer", "token_adapter")
"""How the names of what an adapted layer got begin."""


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return "lora_" in name or ".token_adapter." in name


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
        norms = self._norms()
        zero = (norms == 0).float()  # rows of zeros have no direction yet: LoRA gives them one
        scale = self.lora_magnitude_vector / (norms + zero) + zero
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
        return squares.clamp_min_(0).sqrt_()

    def _weight(self) -> Tensor:
        """(out, in)."""
        return self.unpacked() if isinstance(self, NF4Linear) else self.weight

    def _product(self) -> Tensor:
        """(out, in), fp32."""
        shape = self.adapter
        with torch.autocast(self.weight.device.type, enabled=False):
            return self.lora_B.weight.float() @ self.lora_A.weight.float() * shape.scaling

    @torch.no_grad()
    def merged(self, name: str = "weight") -> Tensor:
        whole = self._weight().float() + self._product()
        if self.adapter.is_dora:
            assert self.lora_magnitude_vector is not None
            norms = whole.norm(dim=1)
            whole *= (self.lora_magnitude_vector.float() / (norms + (norms == 0)))[:, None]
        return whole

    @torch.no_grad()
    def start(self, seed: int, path: str) -> None:
        super().start(seed, path)
        if not self.adapter.is_dora:
            return
        # DoRA's norms are those of the weight's rows, which this rank's rows of the weight tell: B is zero yet
        assert self.lora_magnitude_vector is not None
        held, own = local(self.lora_magnitude_vector), local(self.weight)
        rows = own.T if isinstance(self, AdaptedConv1D) else own
        if rows.shape[0] == held.shape[0]:
            held.copy_(rows.float().norm(dim=1))
            return
        whole: Any = self.weight  # columns are cut (Conv1D under fsdp2): its rows are on other ranks
        full = whole.full_tensor()
        norms = (full.T if isinstance(self, AdaptedConv1D) else full).float().norm(dim=1)
        fill_local(self.lora_magnitude_vector, norms)

    def _draw(self, name: str, tensor: Tensor, generator: Generator) -> None:
        _draw(name, tensor, generator, self.adapter)


class AdaptedConv1D(AdaptedLinear):
    """The linear layer of GPT-2 in transformers, whose weight is (in, out)."""

    def _weight(self) -> Tensor:
        return self.unpacked() if isinstance(self, NF4Linear) else self.weight.T

    def merged(self, name: str = "weight") -> Tensor:
        return super().merged().T.contiguous()


class AdaptedEmbedding(Adapted):
    """Rows of W + scaling (B A)^T."""

    lora_embedding_A: nn.Parameter
    lora_embedding_B: nn.Parameter

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids)
        low = F.embedding(ids, self.lora_embedding_A.T, getattr(self, "padding_idx", None)) @ self.lora_embedding_B.T
        return out + low * self.adapter.scaling * getattr(self, "embed_scale", 1.0)  # Gemma's

    @torch.no_grad()
    def merged(self, name: str = "weight") -> Tensor:
        return self.weight.float() + (self.lora_embedding_B.float() @ self.lora_embedding_A.float()).T * (
            self.adapter.scaling
        )

    def _draw(self, name: str, tensor: Tensor, generator: Generator) -> None:
        if name == "lora_embedding_A":
            tensor.zero_()
        else:
            tensor.normal_(generator=generator)


class AdaptedParameters(Adapted):
    """A module that multiplies with its own parameters: in its forward each is W + scaling B A, of experts for each of
    them (peft 0.21, ``ParamWrapper``). Legend: X experts."""

    adapters: dict[str, LowRank]
    """By parameter, in the order in which the module has them."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        # an attribute of the object hides the parameter of that name
        self.__dict__.update({name: self._whole(name) for name in self.adapters})
        try:
            return super().forward(*args, **inputs)
        finally:
            for name in self.adapters:
                del self.__dict__[name]

    @property
    def adapted(self) -> tuple[str, ...]:
        return tuple(self.adapters)

    def _factors(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two matrices, or X of them each, whose product is of the parameter's shape."""
        holder: Any = self
        for _ in range(len(self.adapters) - 1 - self.adapted.index(name)):
            holder = holder.base_layer
        a, b, weight = holder.lora_A.weight.to(dtype), holder.lora_B.weight.to(dtype), self.get_parameter(name)
        if weight.ndim == 2:
            return b, a
        a, b = a.unflatten(0, (len(weight), -1)), b.unflatten(1, (-1, len(weight))).permute(2, 0, 1)
        return (a.mT, b.mT) if _is_in_out(self) else (b, a)

    def _whole(self, name: str) -> Tensor:
        weight = self.get_parameter(name)
        add = torch.addmm if weight.ndim == 2 else torch.baddbmm
        with torch.autocast(weight.device.type, enabled=False):  # rounded once, as the sum
            return add(weight, *self._factors(name, weight.dtype), alpha=self.adapters[name].scaling)

    @torch.no_grad()
    def merged(self, name: str = "weight") -> Tensor:
        weight = self.get_parameter(name)
        left, right = self._factors(name, torch.float32)
        return weight.float() + left @ right * self.adapters[name].scaling

    def _draw(self, name: str, tensor: Tensor, generator: Generator) -> None:
        _draw(name, tensor, generator, [*reversed(self.adapters.values())][name.count("base_layer.")])


class TokenRows(Adapted):
    """An embedding or a head of which some tokens' rows are trained (peft 0.21, ``tuners/trainable_tokens``)."""

    token_ids: tuple[int, ...]
    source: tuple[TokenRows]
    """What has the rows, itself or the embedding that it is tied to; in a tuple: no submodule."""
    is_new: bool
    """They are of tokens that the base does not know."""
    _held_ids: Tensor | None = None

    @property
    def _rows(self) -> Tensor:
        rows: Tensor = self.source[0].token_adapter.trainable_tokens_delta  # type: ignore[union-attr, assignment]
        return rows

    def _ids(self, device: torch.device) -> Tensor:
        if self._held_ids is None or self._held_ids.device != device:  # else the host would wait in every forward
            self._held_ids = torch.tensor(self.token_ids, device=device)
        return self._held_ids

    @torch.no_grad()
    def merged(self, name: str = "weight") -> Tensor:
        rows = self._rows.detach().float()
        return self.weight.float().index_copy(0, self._ids(rows.device), rows)

    @torch.no_grad()
    def start(self, seed: int, path: str) -> None:
        """Take the rows of the weight; for tokens that are new the mean of those before."""
        if self.source[0] is not self:
            return
        weight: Any = self.weight
        whole = weight.full_tensor() if is_sharded(weight) else weight
        if self.is_new:
            rows = rows_like([whole[: min(self.token_ids)]], len(self.token_ids), name="", seed=0, noise=0.0)
        else:
            rows = whole[self._ids(whole.device)]
        fill_local(self._rows, rows.to(self._rows))


class EmbeddingRows(TokenRows):
    """An embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids)
        known, order = self._ids(ids.device).sort()
        place = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
        padding = getattr(self, "padding_idx", None)
        padding = self.token_ids.index(padding) if padding in self.token_ids else None  # its row has no gradient
        rows = F.embedding(order[place], self._rows, padding)
        if (scale := getattr(self, "embed_scale", None)) is not None:  # Gemma's
            rows = rows * scale
        return torch.where((known[place] == ids)[..., None], rows, out)


class HeadRows(TokenRows):
    """The layer from hidden states to logits."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        ids, bias = self._ids(x.device), getattr(self, "bias", None)
        logits = F.linear(x, self._rows.to(x.dtype), None if bias is None else bias[ids])
        return out.index_copy_(-1, ids, logits.to(out.dtype))


def _is_in_out(module: nn.Module) -> bool:
    """Whether experts are (X, in, out), as those of GPT-OSS are."""
    return bool(getattr(module, "is_transposed", False))


def _draw(name: str, tensor: Tensor, generator: Generator, shape: LowRank) -> None:
    if name.endswith("lora_B.weight"):
        tensor.zero_()
    elif shape.is_gaussian:
        tensor.normal_(0.0, 1 / shape.rank, generator=generator)
    else:
        nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)


def parameter_sizes(module: nn.Module, name: str) -> tuple[int, int, int]:
    """(X, in, out) of a module's own parameter: of a matrix, X = 1, or of experts."""
    shape = module.get_parameter(name).shape
    if len(shape) == 2:
        return 1, shape[1], shape[0]
    return (shape[0], shape[1], shape[2]) if _is_in_out(module) else (shape[0], shape[2], shape[1])


def sizes(layer: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a layer that can be adapted: a linear layer, GPT-2's Conv1D, an embedding; else None."""
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    shape: Any = layer.stored_shape if isinstance(layer, NF4Linear) else getattr(weight, "shape", ())
    return (shape[0], shape[1]) if type(layer).__name__.endswith("Conv1D") and len(shape) == 2 else None


def attach(layer: nn.Module, shape: LowRank, dtype: torch.dtype) -> None:
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
        _add_pair(layer, inner, shape.rank, outer, options)
        if shape.is_dora:
            layer.lora_magnitude_vector = nn.Parameter(torch.ones(outer, **options))
    become(layer, kind, "Adapted")
    layer.adapter = shape  # type: ignore[assignment]


def attach_to_parameters(module: nn.Module, shapes: dict[str, LowRank], dtype: torch.dtype) -> None:
    """Make ``module`` one whose parameters have adapters, in place; ``shapes`` are in the module's order."""
    holder = module
    for number, (name, shape) in enumerate(reversed(shapes.items())):
        if number:
            holder.base_layer = nn.Module()
            holder = holder.base_layer
        experts, inner, outer = parameter_sizes(module, name)
        options = {"dtype": dtype, "device": module.get_parameter(name).device}
        _add_pair(holder, inner, shape.rank * experts, outer, options)
    become(module, AdaptedParameters, "Adapted")
    module.adapters = shapes  # type: ignore[assignment]


def _add_pair(module: nn.Module, inner: int, rank: int, outer: int, options: dict[str, Any]) -> None:
    for name, width, height in (("lora_A", inner, rank), ("lora_B", rank, outer)):
        made = nn.utils.skip_init(nn.Linear, width, height, bias=False, **options)  # type: ignore[no-untyped-call]
        module.add_module(name, made)


def attach_rows(
    layer: nn.Module, token_ids: tuple[int, ...], dtype: torch.dtype, *, tied_to: nn.Module | None, is_new: bool
) -> None:
    """Make ``layer``, an embedding or a linear one, one with rows of its own for these tokens, in place; or with those
    of the embedding ``tied_to``."""
    weight: Any = layer.weight
    if tied_to is None:
        rows = torch.empty(len(token_ids), weight.shape[1], dtype=dtype, device=weight.device)
        layer.token_adapter = nn.Module()
        layer.token_adapter.trainable_tokens_delta = nn.Parameter(rows)
    become(layer, EmbeddingRows if isinstance(layer, nn.Embedding) else HeadRows, "Adapted")
    made: Any = layer
    made.token_ids, made.source, made.is_new = token_ids, (tied_to or layer,), is_new


def adapted_layers(part: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """The layers with an adapter, by name."""
    for path, layer in part.named_modules():
        if isinstance(layer, Adapted):
            yield path, layer


def without_adapters(part: nn.Module) -> AbstractContextManager[None]:
    """Inside, the adapters' parameters are not there: the base alone is filled or read."""
    return without([layer for _, layer in adapted_layers(part)], MEMBERS)

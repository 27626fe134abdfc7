"""The recipes of ``finalize --quantize`` and ``precision=qat`` in torchao's terms. One place, so that both agree.

What rounds in training and what is stored come from the same torchao functions: fake-quantized weights are those that
the stored ones stand for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.config.schema import GROUP_SIZES, QuantizeRecipe

_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
_CAPABILITIES: dict[str, tuple[int, int]] = {
    "int4-weight-only": (8, 0),  # tinygemm's kernels, torch.ops.aten._weight_int4pack_mm
    "float8-dynamic-act-float8-weight": (8, 9),  # torch._scaled_mm
}
"""The least compute capability of the CUDA kernels that a recipe is bound to."""


def group_size_of(recipe: QuantizeRecipe, given: int | None = None) -> int | None:
    """Weights of a row that share a scale; None: all of them."""
    default = GROUP_SIZES.get(recipe)
    return default if given is None or default is None else given


def needs_cuda(recipe: QuantizeRecipe) -> bool:
    """Whether the recipe's weights are laid out for kernels that only CUDA devices have; they compute in bf16."""
    return recipe in _CAPABILITIES


def why_not_here(recipe: QuantizeRecipe, device: torch.device) -> str | None:
    """Why ``device`` cannot run the recipe; None if it can."""
    least = _CAPABILITIES.get(recipe)
    if least is None:
        return None
    wanted = f"its kernels need a CUDA device of compute capability {least[0]}.{least[1]} or above"
    if device.type != "cuda":
        return f"{wanted}, got device {device.type}"
    found = torch.cuda.get_device_capability(device)
    return None if found >= least else f"{wanted}, got {torch.cuda.get_device_name(device)} with {found[0]}.{found[1]}"


def stored_as(recipe: QuantizeRecipe, group_size: int | None = None) -> Any:
    """torchao's config that turns weights into what the recipe stores."""
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        PerGroup,
        PerRow,
    )

    size = group_size_of(recipe, group_size)
    if recipe == "int8-weight-only":
        return Int8WeightOnlyConfig()
    if recipe == "int8-dynamic-act-int8-weight":
        return Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    if recipe == "int8-dynamic-act-int4-weight":
        assert size is not None
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=_INT4, weight_granularity=PerGroup(size))
    if recipe == "int4-weight-only":
        assert size is not None
        # the one layout that torch itself has kernels for; torchao's default one needs the package mslk
        return Int4WeightOnlyConfig(group_size=size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)


def rounded_by(recipe: QuantizeRecipe, group_size: int | None = None) -> tuple[nn.Module | None, nn.Module]:
    """Modules that round what enters a linear layer, and its weight, as the recipe will; gradients pass straight.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 3.
    """
    from torchao.quantization.qat import FakeQuantizerBase, IntxFakeQuantizeConfig
    from torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig

    size = group_size_of(recipe, group_size)
    if recipe == "int4-weight-only":
        assert size is not None
        int4 = Int4WeightFakeQuantizeConfig(group_size=size, activation_dtype=torch.bfloat16)
        return None, FakeQuantizerBase.from_config(int4)
    if recipe == "int8-dynamic-act-int4-weight":
        activation = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        weight = IntxFakeQuantizeConfig(_INT4, group_size=size, is_symmetric=True)
        return FakeQuantizerBase.from_config(activation), FakeQuantizerBase.from_config(weight)
    per_row = FakeQuantizerBase.from_config(IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True))
    return SymmetricPerToken() if recipe == "int8-dynamic-act-int8-weight" else None, per_row


class SymmetricPerToken(nn.Module):
    """int8 activations with one scale per token and no zero point, which torchao 0.18 stores but does not fake."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (..., features) rounded, in its dtype."""
        from torchao.quantization.quant_primitives import MappingType, _fake_quantize_affine, choose_qparams_affine

        block = (*(1 for _ in x.shape[:-1]), x.shape[-1])
        # as Int8Tensor.from_hp does
        scale, zero = choose_qparams_affine(
            x,
            MappingType.SYMMETRIC,
            block,
            torch.int8,
            eps=torch.finfo(torch.float32).eps,
            scale_dtype=torch.float32,
            zero_point_dtype=torch.int8,
        )
        rounded: Tensor = _fake_quantize_affine(x, block, scale, zero, torch.int8)
        return rounded

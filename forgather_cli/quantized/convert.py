"""Linear layers that multiply in float8, or round as a quantized model will: ``precision=fp8`` and ``precision=qat``.

A converted layer is the same object with the same parameters under the same names, and its weight is stored, moved,
sharded and initialised as before; only its forward is torchao's. A checkpoint does not know of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.config.schema import FP8Settings, QATSettings
from forgather_cli.errors import ModelError, SetupError
from forgather_cli.hardware import has_float8
from forgather_cli.quantized.package import need_torchao
from forgather_cli.quantized.recipes import group_size_of, rounded_by


@dataclass(frozen=True)
class Conversion:
    """What was converted, and what was not."""

    what: str
    """What the converted layers do now."""
    converted: tuple[str, ...]
    """Names of layers."""
    left: dict[str, str]
    """Name of a layer -> why it is as it was."""

    def __iter__(self) -> Iterator[str]:
        """The account for the log; layers whose names differ in numbers share a line."""
        total = len(self.converted) + len(self.left)
        yield f"{len(self.converted)} of {total} linear layers {self.what}: {', '.join(_grouped(self.converted))}"
        for reason in dict.fromkeys(self.left.values()):
            names = [name for name, why in self.left.items() if why == reason]
            yield f"left as they are, {reason}: {', '.join(_grouped(names))}"


def _grouped(names: Iterable[str]) -> list[str]:
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return [f"{pattern} ({len(of)})" if len(of) > 1 else of[0] for pattern, of in alike.items()]


def to_float8(model: nn.Module, option: FP8Settings, device: torch.device) -> Conversion:
    """Have linear layers of ``model`` (on meta too) multiply in float8, in place, to be run on ``device``.

    Raises SetupError where torchao or float8 is missing, ModelError if no layer can be converted.
    """
    need_torchao("precision=fp8", "torchao.float8")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = emulated(option.emulate, device)
    # inner dimensions are padded where they must be: of weight gradients they are the number of tokens
    config = replace(Float8LinearConfig.from_recipe_name(option.fp8_recipe), emulate=emulate, pad_inner_dim=True)

    def convert(layer: nn.Linear) -> None:
        like = convert_to_float8_training(nn.Sequential(_blank(layer)), config=config)[0]
        _become(layer, like, _float8_class())

    what = f"multiply in float8 ({option.fp8_recipe}{', emulated' if emulate else ''})"
    return _convert(model, option, what, lambda layer: misaligned(layer, option.fp8_dim_alignment), convert)


def to_rounded(model: nn.Module, option: QATSettings, device: torch.device) -> Conversion:
    """Have linear layers of ``model`` (on meta too) round as the recipe will, in place.

    Raises SetupError where torchao is missing, ModelError if no layer can be converted.
    """
    need_torchao("precision=qat", "torchao.quantization.qat")
    from torchao.quantization.qat import FakeQuantizedLinear

    def convert(layer: nn.Linear) -> None:
        like = FakeQuantizedLinear.from_linear(_blank(layer))
        like.activation_fake_quantizer, like.weight_fake_quantizer = rounded_by(option.qat_recipe, option.group_size)
        _become(layer, like, FakeQuantizedLinear)

    size = group_size_of(option.qat_recipe, option.group_size)
    what = f"round as {option.qat_recipe}" + (f" in groups of {size}" if size else "")
    return _convert(model, option, what, lambda layer: indivisible(layer, size), convert)


def _convert(
    model: nn.Module,
    option: FP8Settings | QATSettings,
    what: str,
    why_not: Callable[[nn.Linear], str | None],
    convert: Callable[[nn.Linear], None],
) -> Conversion:
    names, left = sorted_out(model, option.exclude, why_not)
    if not names:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3]) or "it has none"
        raise ModelError(
            f"precision={option.type}: no linear layer of {type(model).__name__} can be converted ({reasons}); "
            "choose precision=bf16 or another model"
        )
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        convert(layer)
    return Conversion(what, tuple(names), left)


def emulated(asked: bool | None, device: torch.device) -> bool:
    """Whether float8 products are computed in fp32 from rounded factors. Raises SetupError if that is ruled out."""
    if asked is not None and (asked or has_float8(device)):
        return asked
    if asked is False:
        raise SetupError(
            f"emulate: {device} does not multiply in float8 (CUDA devices of compute capability 8.9 or above do); "
            "set emulate=null or choose precision=bf16"
        )
    return not has_float8(device)


# -------------------------------------------------------------------------------------------------------------- layers


def sorted_out(
    model: nn.Module, exclude: Iterable[str], why_not: Callable[[nn.Linear], str | None]
) -> tuple[list[str], dict[str, str]]:
    """(names of the linear layers that nothing speaks against, name -> reason of the others)."""
    patterns = [re.compile(pattern) for pattern in exclude]
    names: list[str] = []
    left: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        excluded = next((p.pattern for p in patterns if p.search(name)), None)
        reason = f"exclude has {excluded}" if excluded is not None else _foreign(layer) or why_not(layer)
        if reason is None:
            names.append(name)
        else:
            left[name] = reason
    return names, left


def _foreign(layer: nn.Linear) -> str | None:
    plain = type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)
    return None if plain else f"{type(layer).__name__} has a forward of its own"


def misaligned(layer: nn.Linear, alignment: int = 16) -> str | None:
    """Why a layer is not to multiply in float8, whose kernels take multiples of 16 (bytes, ``torch._scaled_mm``)."""
    sizes = (layer.out_features, layer.in_features)
    return f"sizes are not multiples of {alignment}" if any(size % alignment for size in sizes) else None


def indivisible(layer: nn.Linear, size: int | None) -> str | None:
    """Why a layer cannot have one scale for each ``size`` weights of a row."""
    return f"groups of {size} do not divide their rows" if size and layer.in_features % size else None


def _become(layer: nn.Linear, like: nn.Linear, cls: type[nn.Linear]) -> None:
    """Turn ``layer``, in place, into what ``like`` is, with its own parameters.

    torchao puts a new module in a layer's place, and with it goes what our class knows: how the weight starts.
    """
    for key, value in vars(like).items():
        if key == "_modules":
            layer._modules.update(value)
        else:
            vars(layer).setdefault(key, value)
    kinds: tuple[Any, ...] = (cls, type(layer))
    layer.__class__ = _mixed(*kinds)


@cache
def _mixed(cls: Any, base: Any) -> Any:
    """``base`` with the forward of ``cls``."""
    return type(cls.__name__, (cls, base), {})


# -------------------------------------------------------------------------------------------------------- float8, int8


def _blank(layer: nn.Linear) -> nn.Linear:
    """A layer of the same sizes without memory."""
    return nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")


@cache
def _float8_class() -> type[nn.Linear]:
    from torchao.float8.float8_linear import Float8Linear

    class Casting(Float8Linear):  # type: ignore[misc]
        """Multiplies in float8, what enters being rounded to the autocast dtype first.

        torchao 0.18 does that for CUDA's autocast alone.
        """

        def forward(self, input: Tensor) -> Tensor:
            kind = input.device.type
            if torch.is_autocast_enabled(kind):
                input = input.to(torch.get_autocast_dtype(kind))
            out: Tensor = super().forward(input)
            return out

    Casting.__name__ = Float8Linear.__name__
    return Casting

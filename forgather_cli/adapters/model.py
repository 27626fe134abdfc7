"""A model with adapters: which layers get one, what is frozen, in which dtypes, and how it all starts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Generator, Tensor, nn

from forgather_cli.adapters.layers import Adapted, AdaptedLinear, Shape, attach, is_adapter, sizes, start_magnitudes
from forgather_cli.adapters.nf4 import freeze, need_bitsandbytes, packed_layers, read_packed, without_packed
from forgather_cli.config.schema import ALL_LINEAR, Config, DoRASettings, LoRASettings, QLoRASettings
from forgather_cli.errors import ModelError
from forgather_cli.models.build import tensor_reader
from forgather_cli.models.init import stable_seed
from forgather_cli.models.parts import train_only
from forgather_cli.precision import half_dtype, parameter_dtype
from forgather_cli.shards import fill_local


def adapt(model: nn.Module, settings: LoRASettings, config: Config) -> list[str]:
    """Give layers of ``model`` (on meta too) adapters, in place, and freeze the rest but for ``config.trainable``.

    Under half autocast the frozen matrices and embeddings get its dtype; what an embedding gives out stays fp32, as
    the residual stream does (under fsdp2 both are what its policy makes them). Returns the account for the log. Raises ModelError.
    """
    names = targets(model, settings)
    _check(model, names, settings, config)
    account = list(_account(model, settings, names))
    half, dtype = half_dtype(config.precision), parameter_dtype(config.precision) or torch.float32
    train_only(model, config.trainable or [])
    for parameter in model.parameters():
        if half is not None and parameter.ndim > 1 and not parameter.requires_grad:
            parameter.data = parameter.data.to(half)
    for layer in model.modules():
        if half is not None and isinstance(layer, nn.Embedding):
            layer.register_forward_hook(_in_fp32)
    if isinstance(settings, QLoRASettings):
        need_bitsandbytes()
        head = output_layer(model)
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and layer is not head and not layer.weight.requires_grad:
                freeze(layer, double_quant=settings.double_quant)
    for name in names:
        shape = Shape(
            settings.rank_of(name), settings.scaling_of(name), settings.lora_dropout,
            is_dora=isinstance(settings, DoRASettings), is_gaussian=settings.init_lora_weights == "gaussian",
        )  # fmt: skip
        attach(model.get_submodule(name), shape, dtype)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [f"adapter={settings.type}: {trained:,} numbers are trained, {account[0]}", *account[1:]]


def _in_fp32(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Only where autocast casts what enters matrices: FSDP2's policy does not, and computes with what comes (2.13)."""
    return out.float() if torch.is_autocast_enabled(out.device.type) else out


def targets(model: nn.Module, settings: LoRASettings) -> list[str]:
    """Names of the layers that get an adapter, in the model's order, as peft 0.21 finds them. Raises ModelError."""
    layers = {name: layer for name, layer in model.named_modules() if sizes(layer) is not None}
    wanted = settings.target_modules
    if wanted == ALL_LINEAR:
        head = output_layer(model)
        found = [n for n, layer in layers.items() if layer is not head and not isinstance(layer, nn.Embedding)]
        if not found:
            raise ModelError(
                f"adapter.target_modules: {type(model).__name__} has no linear layer; name its layers in target_modules"
            )
        return found
    if isinstance(wanted, str):
        found = [name for name in layers if re.fullmatch(wanted, name)]
        unknown = [] if found else [wanted]
    else:
        found = [name for name in layers if any(_ends_with(name, each) for each in wanted)]
        unknown = [each for each in wanted if not any(_ends_with(name, each) for name in layers)]
    if unknown:
        kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
        near = get_close_matches(unknown[0], kinds, n=1)
        raise ModelError(
            f"adapter.target_modules: no layer of {type(getattr(model, 'theirs', model)).__name__} is "
            f"{unknown[0]!r};{f' did you mean {near[0]}?' if near else ''} Its layers are {', '.join(kinds)}"
        )
    return found


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def output_layer(model: nn.Module) -> nn.Module | None:
    """The layer from hidden states to logits, where there is one."""
    theirs = getattr(model, "theirs", None)
    found: nn.Module | None = getattr(model, "lm_head", None) if theirs is None else theirs.get_output_embeddings()
    return found


def _check(model: nn.Module, names: list[str], settings: LoRASettings, config: Config) -> None:
    """Raise ModelError for an adapter that a layer cannot have."""
    for name in names:
        layer = model.get_submodule(name)
        width, rank = min(sizes(layer) or (0, 0)), settings.rank_of(name)
        if rank > width:
            raise ModelError(
                f"adapter.r: {rank} is above the width of {name}, {width}; set adapter.r={width} or less, or a smaller "
                "one for it in adapter.rank_pattern"
            )
        if isinstance(settings, DoRASettings) and isinstance(layer, nn.Embedding):
            raise ModelError(
                f"adapter.target_modules: dora adapts linear layers, got the embedding {name}; leave it out, or set "
                "adapter=lora"
            )
        if layer is output_layer(model) and getattr(config.loss, "applies_head", False):
            raise ModelError(
                f"loss: {getattr(config.loss, 'type', config.loss)} multiplies with the head's weight itself, without "
                f"the adapter of {name}; set loss=cross_entropy, or leave it out of adapter.target_modules"
            )
    for pattern in settings.rank_pattern.keys() | settings.alpha_pattern.keys():
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
            raise ModelError(f"adapter.rank_pattern: no adapted layer is {pattern!r}; leave it out, or mend it")


def _account(model: nn.Module, settings: LoRASettings, names: list[str]) -> Iterator[str]:
    """How many of the weights are adapted, and which matrices are not."""
    adapted, left = 0, Counter[str]()
    total = 0
    owners = {f"{name}.weight" for name in names}
    for name, parameter in model.named_parameters():
        if is_adapter(name) or parameter.ndim < 2:
            continue
        total += parameter.numel()
        if name in owners:
            adapted += parameter.numel()
        else:
            left[re.sub(r"(?<=\.)\d+(?=\.)", "*", name)] += 1
    yield f"beside {len(names)} matrices with {adapted / max(total, 1):.1%} of the weights"
    if left:
        yield "not adapted: " + ", ".join(f"{name} ({n})" if n > 1 else name for name, n in left.items())
    if experts := [name for name, p in model.named_parameters() if p.ndim > 2]:
        yield f"experts such as {experts[0]} are no layers: adapter.target_parameters reaches them"


# --------------------------------------------------------------------------------------------------------------- start


def starting(init: Callable[[nn.Module], None], config: Config, seed: int) -> Callable[[nn.Module], None]:
    """``init``, which fills a model or a part of one without adapters, and then the adapters: by (seed, name), the same
    in every layout, or as ``init_from`` has them. Of weights in four bits one at a time is in memory otherwise. Raises
    ModelError."""
    from forgather_cli.adapters.directory import adapter_to_go_on
    from forgather_cli.adapters.load import fill_from

    settings = config.adapter
    assert isinstance(settings, LoRASettings)
    before = None if settings.init_from is None else adapter_to_go_on(settings)

    def fill(part: nn.Module) -> None:
        with without_adapters(part), without_packed(part):
            init(part)
        if any(True for _ in packed_layers(part)):
            device = next(p.device for n, p in part.named_parameters() if is_adapter(n))
            read_packed(part, tensor_reader(config.model, part), half_dtype(config.precision) or torch.float32, device)
        if before is None:
            start(part, seed)
        else:
            fill_from(part, before)

    return fill


@torch.no_grad()
def start(part: nn.Module, seed: int) -> None:
    """Fill the adapters of ``part``, whose weights are there."""
    for path, layer in adapted_layers(part):
        for name, parameter in layer.named_parameters():
            if name.startswith("lora_") and name != "lora_magnitude_vector":
                drawn = torch.empty(parameter.shape)
                layer.start(name, drawn, Generator().manual_seed(stable_seed(seed, f"{path}.{name}")))
                fill_local(parameter, drawn)
        if layer.adapter.is_dora:
            assert isinstance(layer, AdaptedLinear)
            start_magnitudes(layer)


def adapted_layers(part: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """The layers with an adapter, by name."""
    for path, layer in part.named_modules():
        if isinstance(layer, Adapted):
            yield path, layer


@contextmanager
def without_adapters(part: nn.Module) -> Iterator[None]:
    """Inside, the adapters' parameters are not there, so that what fills a model by its names fills the base."""
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for _, layer in adapted_layers(part):
        kinds: tuple[dict[str, Any], ...] = (layer._parameters, layer._modules)  # type: ignore[assignment]
        for members in kinds:
            own = {name: members.pop(name) for name in list(members) if name.startswith("lora_")}
            taken.append((members, own))
    try:
        yield
    finally:
        for members, own in taken:
            members.update(own)

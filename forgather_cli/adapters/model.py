"""Giving a model adapters: what is frozen, in which dtypes, and what the start says of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.adapters.directory import adapter_to_go_on, bounded
from forgather_cli.adapters.layers import (
    Adapted,
    LowRank,
    TokenRows,
    attach,
    attach_rows,
    attach_to_parameters,
    parameter_sizes,
    sizes,
)
from forgather_cli.adapters.nf4 import freeze, need_bitsandbytes
from forgather_cli.adapters.targets import OF_EXPERTS, input_layer, output_layer, parameter_targets, targets, token_rows
from forgather_cli.config.schema import Config, LoRASettings, QLoRASettings, ending_in, typed, value_at
from forgather_cli.errors import ModelError
from forgather_cli.models.parts import train_only
from forgather_cli.precision.dtypes import half_dtype, parameter_dtype

_MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def adapt(model: nn.Module, settings: LoRASettings, config: Config) -> list[str]:
    """Give layers of ``model`` (on meta too) adapters, in place, and freeze the rest but for ``config.trainable``.

    Under half autocast the frozen matrices and embeddings get its dtype; what an embedding gives out stays fp32, as
    the residual stream does (under fsdp2 both are what its policy makes them). Returns the account for the log. Raises
    ModelError.
    """
    if settings.from_adapter is not None and settings.trainable_token_indices is None:
        there = adapter_to_go_on(settings).settings.trainable_token_indices
        settings = replace(settings, trainable_token_indices=there)
    if getattr(model, "is_encoder_decoder", False):
        raise ModelError(
            f"adapter: {settings.type} does not adapt encoder-decoders yet, got a {type(model).__name__}; set "
            "adapter=none"
        )
    with bounded(settings):
        layers, parameters = targets(model, settings), parameter_targets(model, settings)
        _check(model, layers, parameters, settings, config)
    adapted = [f"{name}.weight" for name in layers] + [
        f"{path}.{own}" for path in parameters for own in parameters[path]
    ]
    train_only(model, config.trainable or [])
    if both := next((name for name in adapted if model.get_parameter(name).requires_grad), None):
        raise ModelError(
            f"trainable: {both} has an adapter, and would be trained whole too; leave it out of trainable, or of "
            "adapter.target_modules and target_parameters"
        )
    trained = _kinds(model, [name for name, parameter in model.named_parameters() if parameter.requires_grad])
    if shared := next((kind for kind in trained if " = " in kind), None):
        # peft keeps the two apart
        raise ModelError(
            f"trainable: {shared} is one weight, which is not trained whole beside an adapter; leave it out, adapt "
            "both (adapter.target_modules), or train rows of it (adapter.trainable_token_indices)"
        )
    for name, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module._parameters.values() if parameter is not None):
            others = [key for key, tensor in module.state_dict(keep_vars=True).items() if not tensor.requires_grad]
            if others:
                raise ModelError(
                    f"trainable: of {name} all is trained beside an adapter or nothing, as peft's modules_to_save are, "
                    f"but {others[0]} is not; name it too, or leave the others out"
                )
    account = list(_account(model, adapted))
    half, dtype = half_dtype(config.precision), parameter_dtype(config.precision) or torch.float32
    for parameter in model.parameters():
        if half is not None and parameter.ndim > 1 and not parameter.requires_grad:
            parameter.data = parameter.data.to(half)
    for layer in model.modules():
        if half is not None and isinstance(layer, nn.Embedding):
            layer.register_forward_hook(_in_fp32)
    if isinstance(settings, QLoRASettings):
        account.append(to_four_bits(model, settings))
        if whole := _kinds(model, [name for name, p in model.named_parameters() if p.ndim > 2]):
            account.append(f"not in four bits, but in {half or dtype}: {', '.join(whole)}".replace("torch.", ""))
    taken = dict.fromkeys(kind for name in layers if (kind := name.rpartition(".")[2]) in OF_EXPERTS)
    if taken and settings.is_for_layers_alone and getattr(model, "num_experts", None):
        account.append(
            f"peft 0.21 may take {', '.join(taken)} for layers of experts; give it what finalize --merge makes"
        )
    family = getattr(getattr(getattr(model, "theirs", model), "config", None), "model_type", None)
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in layers)
    if family in _MAMBAS and "out_proj" in kinds:
        account.append(
            f"peft 0.21 refuses adapters of out_proj in {family}, whose kernels multiply with its weight alone: to "
            f"leave it out set adapter.target_modules=[{','.join(each for each in kinds if each != 'out_proj')}]"
        )
    attach_adapters(model, settings, layers, parameters, dtype)
    account += _add_rows(model, settings, config, dtype)
    account += _not_served(model, settings, config)
    number = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [f"adapter={settings.type}: {number:,} numbers are trained, {account[0]}", *account[1:]]


def attach_adapters(
    model: nn.Module, settings: LoRASettings, layers: list[str], parameters: dict[str, list[str]], dtype: torch.dtype
) -> None:
    """Give the layers and parameters that ``targets`` and ``parameter_targets`` have found adapters, in place."""

    def shape(name: str) -> LowRank:
        return LowRank(
            settings.rank_of(name), settings.scaling_of(name), settings.lora_dropout,
            is_dora=settings.is_dora, is_gaussian=settings.init_lora_weights == "gaussian",
        )  # fmt: skip

    with bounded(settings):
        shapes = {n: shape(n) for n in (*layers, *(f"{path}.{own}" for path in parameters for own in parameters[path]))}
    for name in layers:
        attach(model.get_submodule(name), shapes[name], dtype)
    for path, own in parameters.items():
        attach_to_parameters(model.get_submodule(path), {name: shapes[f"{path}.{name}"] for name in own}, dtype)


def attach_rows_of(model: nn.Module, settings: LoRASettings, dtype: torch.dtype) -> None:
    """Give embedding and head rows of their own for ``trainable_token_indices``, in place. Raises ModelError."""
    for name, ids in token_rows(model, settings).items():
        layer, source = model.get_submodule(name), input_layer(model)
        is_tied = layer is not source and layer.weight is source.weight
        attach_rows(
            layer, tuple(ids), dtype, tied_to=source if is_tied else None,
            is_new={*ids} <= {*getattr(model, "new_tokens", ())},
        )  # fmt: skip


def _add_rows(model: nn.Module, settings: LoRASettings, config: Config, dtype: torch.dtype) -> Iterator[str]:
    """``attach_rows_of``, and what is said of it. Rows that nobody has asked for are left out where they cannot be."""
    rows, asked = token_rows(model, settings), settings.trainable_token_indices is not None
    if left := {*getattr(model, "new_tokens", ())} - {id for ids in rows.values() for id in ids}:
        yield f"the rows of {len(left)} added tokens stay as the base has them: trainable_token_indices leaves them out"
    if not rows:
        return
    number, why, lost = max(map(len, rows.values())), None, ""
    source, fused = input_layer(model), config.loss_applies_head
    head: Any = output_layer(model)
    for name in rows:
        layer: Any = model.get_submodule(name)
        if isinstance(layer, Adapted) or layer.weight.requires_grad:
            why = f"{name} is trained otherwise; leave it out of adapter.target_modules and trainable"
        elif head is layer and fused:
            why = f"loss={value_at(config, 'loss')} multiplies with the head's weight itself; set loss=cross_entropy"
            ids = ",".join(f"{each}:{typed(numbers)}" for each, numbers in rows.items())
            lost = f"; the end of a turn is not learned without 'adapter.trainable_token_indices={{{ids}}}'"
        elif head is layer and layer.weight is source.weight and config.trainer.cuts_layers:
            why = f"under trainer=pipeline {name} is on another stage than the embedding that it shares them with"
    if why is not None and asked:
        raise ModelError(f"adapter.trainable_token_indices: {why}, or trainable_token_indices=[]")
    if why is not None:
        yield f"warning: the rows of {number} added tokens stay as the base has them: {why}{lost}"
        return
    attach_rows_of(model, settings, dtype)
    yield f"rows of {number} tokens are trained: {', '.join(rows)}"


def to_four_bits(model: nn.Module, settings: QLoRASettings) -> str:
    """Have the frozen linear layers of ``model`` but the head hold their weights in four bits, as transformers does.

    Returns the account for the log. Raises ModelError where there are none.
    """
    need_bitsandbytes()
    head, total = output_layer(model), sum(p.numel() for p in model.parameters())
    parameters = parameter_targets(model, settings)
    layers = [
        layer
        for name, layer in model.named_modules()
        if sizes(layer) and layer is not head and not isinstance(layer, nn.Embedding) and name not in parameters
        if not any(p.requires_grad for p in layer.parameters(recurse=False) if p.ndim > 1)
    ]
    if not layers:
        raise ModelError(
            f"adapter: qlora packs frozen linear layers, and {type(getattr(model, 'theirs', model)).__name__} has none "
            "beside its head; set adapter=lora"
        )
    packed = sum(freeze(layer, double_quant=settings.double_quant) for layer in layers)
    return f"in four bits (NF4): {len(layers)} matrices with {packed / total:.1%} of the weights"


def _not_served(model: nn.Module, settings: LoRASettings, config: Config) -> Iterator[str]:
    """What vLLM does not serve as an adapter (its ``lora/peft_helper.py``, and of rows ``lora/utils.py``)."""
    whole = "forgather finalize RUN MODEL --merge makes a whole model, which it takes"
    refused = {
        "DoRA": settings.is_dora,
        "trainable (modules_to_save)": bool(config.trainable),
        "rows of tokens": any(isinstance(layer, TokenRows) for layer in model.modules()),
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        yield f"vLLM refuses adapters with {' and '.join(names)}: {whole}"
    if settings.rank_pattern or settings.alpha_pattern:
        yield f"vLLM reads no rank_pattern or alpha_pattern and would scale by lora_alpha / r alone: {whole}"


def _in_fp32(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Only where autocast casts what enters matrices: FSDP2's policy does not, and computes with what comes (2.13)."""
    return out.float() if torch.is_autocast_enabled(out.device.type) else out


def _check(
    model: nn.Module, layers: list[str], parameters: dict[str, list[str]], settings: LoRASettings, config: Config
) -> None:
    """Raise ModelError for an adapter that a layer or a parameter cannot have."""
    widths = {name: min(sizes(model.get_submodule(name)) or (0, 0)) for name in layers}
    for path, own in parameters.items():
        module = model.get_submodule(path)
        if (
            path in layers
            or (sizes(module) is not None and not isinstance(module, nn.Linear))
            or (module is output_layer(model))
        ):
            raise ModelError(
                f"adapter.target_parameters: {path} is a layer, got its {own[0]}; name it in target_modules"
            )
        for name in own:
            widths[f"{path}.{name}"] = min(parameter_sizes(module, name)[1:])
    for name, width in widths.items():
        if (rank := settings.rank_of(name)) > width and settings.from_adapter is None:
            raise ModelError(
                f"adapter.r: {rank} is above the width of {name}, {width}; set adapter.r={width} or less, or a smaller "
                "one for it in adapter.rank_pattern"
            )
    for name in layers:
        layer = model.get_submodule(name)
        if settings.is_dora and isinstance(layer, nn.Embedding):
            raise ModelError(
                f"adapter.target_modules: dora adapts linear layers, got the embedding {name}; leave it out, or set "
                "adapter=lora"
            )
        if layer is output_layer(model) and config.loss_applies_head:
            raise ModelError(
                f"loss: {value_at(config, 'loss')} multiplies with the head's weight itself, without "
                f"the adapter of {name}; set loss=cross_entropy, or leave it out of adapter.target_modules"
            )
    for pattern in settings.rank_pattern.keys() | settings.alpha_pattern.keys():
        if settings.from_adapter is None and not any(map(ending_in(pattern).match, widths)):
            raise ModelError(f"adapter.rank_pattern: no adapted layer is {pattern!r}; leave it out, or mend it")


def _account(model: nn.Module, adapted: list[str]) -> Iterator[str]:
    """Which share of the weights gets an adapter, which matrices are trained whole, and which are left as they are."""
    owners = {id(model.get_parameter(name)) for name in adapted}
    total = sum(p.numel() for p in model.parameters())
    inside, whole, left = 0, [], []
    for name, parameter in model.named_parameters():
        if id(parameter) in owners:
            inside += parameter.numel()
        elif parameter.requires_grad:
            whole.append(name)
        elif parameter.ndim > 1 and not name.endswith("bias"):
            left.append(name)
    yield f"beside {len(owners)} matrices with {inside / total:.1%} of the weights"
    if whole:
        yield f"trained whole: {', '.join(_kinds(model, whole))}"
    if left:
        yield f"not adapted: {', '.join(_kinds(model, left))}"
    # a layer with a weight of three dimensions is a convolution
    stacks = [n for n in left if model.get_parameter(n).ndim == 3 and not n.endswith(".weight")]
    if names := dict.fromkeys(".".join(name.split(".")[-2:]) for name in stacks):
        yield f"experts are no layers: adapter.target_parameters=[{','.join(names)}] adapts them"


def _kinds(model: nn.Module, names: list[str]) -> list[str]:
    """Names that differ by the layer's number once, with how often; of each its other names where it is tied."""
    every: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    kinds = Counter(
        " = ".join(re.sub(r"(?<=\.)\d+(?=\.)", "*", each) for each in every[id(model.get_parameter(name))])
        for name in names
    )
    return [f"{kind} ({number})" if number > 1 else kind for kind, number in kinds.items()]

"""Filling a model with adapters: how a run starts, or as a directory, ours or peft's, has them."""

from __future__ import annotations

import importlib
import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from forgather_cli.adapters.directory import (
    CONFIG,
    WEIGHTS,
    AdapterDirectory,
    adapter_to_go_on,
    base_of,
    bounded,
    check_same_base,
    own_name,
)
from forgather_cli.adapters.layers import AdaptedParameters, TokenRows, adapted_layers, is_adapter, without_adapters
from forgather_cli.adapters.model import attach_adapters, attach_rows_of, to_four_bits
from forgather_cli.adapters.nf4 import packed_layers, read_packed, without
from forgather_cli.adapters.targets import parameter_targets, targets
from forgather_cli.checkpoint.load import Reader
from forgather_cli.checkpoint.tensors import TensorReader
from forgather_cli.config.schema import Config, LoRASettings, QLoRASettings
from forgather_cli.errors import ModelError
from forgather_cli.models.build import weights_of
from forgather_cli.models.parts import train_only
from forgather_cli.precision.dtypes import compute_dtype
from forgather_cli.shards import fill_local, local, not_finite
from forgather_cli.terminal.bars import doing


def check_base(adapter: AdapterDirectory, reader: Reader | None) -> None:
    """Raise ModelError where the base is not the one that a checkpoint's adapter was trained on."""
    before = None if reader is None else reader.identity().get("base")
    if before is None:
        return
    now = base_of(adapter.base)
    if before.get("sha256") != now["sha256"]:
        raise ModelError(
            f"{adapter.path}: its adapter is for the model that {before.get('path')} held (sha256 "
            f"{before.get('sha256')!s:.12}), and {adapter.base} holds another (sha256 {now['sha256']:.12}); bring that "
            "one back"
        )


def as_base(
    model: nn.Module, adapter: AdapterDirectory, option: Any, fill: Callable[[nn.Module], None]
) -> Callable[[nn.Module], None]:
    """Have ``model`` (on meta) hold its weights as they were beside the adapter's training. Returns what fills it,
    which is ``fill`` but for weights in four bits. Raises ModelError."""
    if not isinstance(adapter.settings, QLoRASettings):
        return fill
    train_only(model, adapter.trainable or [])  # what was trained as a whole is not packed
    to_four_bits(model, adapter.settings)
    return lambda part: fill_base(part, option, fill, torch.float32)


def with_adapter(model: nn.Module, adapter: AdapterDirectory, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Give ``model``, the base with its weights, the adapter, in place. Raises ModelError for one that does not fit."""
    settings = replace(adapter.settings, lora_dropout=0.0, from_adapter=str(adapter.path))
    with bounded(settings):
        layers, parameters = targets(model, settings), parameter_targets(model, settings)
    attach_adapters(model, settings, layers, parameters, dtype)
    attach_rows_of(model, settings, dtype)
    fill_from(model, adapter)
    return model


def fill_base(part: nn.Module, option: Any, init: Callable[[nn.Module], None], dtype: torch.dtype) -> None:
    """Fill what the model option says, all but adapters: by ``init``, and weights in four bits one by one, which are
    computed with in ``dtype``. Raises ModelError."""
    packed = [layer for _, layer in packed_layers(part)]
    with without_adapters(part), without(packed, "weight"):
        init(part)
        device = next(part.parameters()).device
    if packed:
        read_packed(part, weights_of(option).reader(part), dtype, device)


def starting(init: Callable[[nn.Module], None], config: Config, seed: int) -> Callable[[nn.Module], None]:
    """``init``, which fills a model or a part of one without adapters, and then the adapters: by (seed, name), the same
    in every layout, or as ``from_adapter`` has them. Of weights in four bits one at a time is in memory otherwise.
    Raises ModelError."""
    settings, option = config.adapter, cast(Any, config.model)  # one with a directory
    assert isinstance(settings, LoRASettings)
    before = None if settings.from_adapter is None else adapter_to_go_on(settings)
    if before is not None:
        check_same_base(before, Path(option.path).expanduser())

    def fill(part: nn.Module) -> None:
        if before is not None and before.is_of_peft:
            check_as_peft(part, before)
        fill_base(part, config.model, init, compute_dtype(config.precision))
        if before is not None:
            fill_from(part, before)
            return
        for path, layer in adapted_layers(part):
            layer.start(seed, path)

    return fill


@torch.no_grad()
def fill_from(part: nn.Module, adapter: AdapterDirectory) -> None:
    """Copy the tensors of an adapter's file into this rank's rows of ``part``, a model with adapters or a stage of one.

    Raises ModelError naming what is missing, too many or of another shape.
    """
    file = adapter.path / WEIGHTS
    if not file.is_file():
        raise ModelError(f"{adapter.path}: has no {WEIGHTS}; save the adapter again as safetensors")
    reader = TensorReader(file)
    stored = {own_name(name): name for name in reader.specs}
    held: dict[str, Tensor] = dict(part.named_parameters(remove_duplicate=False))
    wanted = {name for name in held if is_adapter(name)}
    for name in list(stored):
        own, shape = name.replace(".base_layer.", "."), reader.specs[stored[name]].shape
        if own not in held or is_adapter(own) or shape != tuple(held[own].shape):
            continue
        copy = held[own].detach().clone()
        fill_local(copy, reader.read(stored[name]))
        if torch.equal(local(copy), local(held[own])):  # the base's own, by peft's save_embedding_layers
            del stored[name]
        elif not held[own].requires_grad:
            raise ModelError(
                f"{file}: holds another {own} than the base; name it in trainable, or merge the adapter with peft"
            )
    problems = [f"{name} is missing" for name in sorted(wanted - stored.keys())]
    for name in sorted(stored.keys() & held.keys()):
        if reader.specs[stored[name]].shape != tuple(held[name].shape):
            problems.append(f"{name} is {list(reader.specs[stored[name]].shape)}, not {list(held[name].shape)}")
    problems += [f"{name} belongs to nothing" for name in sorted(stored.keys() - held.keys()) if _is_whole(part)]
    shared = Counter(id(tensor) for tensor in held.values())
    alone = [name for name in stored.keys() & held.keys() if shared[id(held[name])] > 1 and not is_adapter(name)]
    if alone:
        raise ModelError(
            f"{adapter.path / CONFIG}: {min(alone)} was trained apart from what shares it in the base; merge the "
            "adapter with peft"
        )
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        theirs = adapter.settings.target_modules
        raise ModelError(
            f"{file}: is not an adapter of this model: {'; '.join(problems[:3])}{more}; give the "
            "model that it was made for, to go on from it with adapter.target_modules="
            f"{theirs if isinstance(theirs, str) else '[' + ','.join(theirs) + ']'}"
        )
    for name in stored.keys() & held.keys():
        fill_local(held[name], reader.read(stored[name]))
    if void := not_finite({name: held[name] for name in stored.keys() & held.keys()}):
        raise ModelError(f"{file}: {void[0]} holds values that are not finite")


@doing("asking peft about the adapter")
def check_as_peft(part: nn.Module, adapter: AdapterDirectory) -> None:
    """Load an adapter with peft, which has written it, beside a base without weights: that costs seconds. Raises
    ModelError where it does not scale an adapter of ``part`` as that does."""
    transformers, peft = map(importlib.import_module, ("transformers", "peft"))
    try:
        with warnings.catch_warnings(action="ignore"), torch.device("meta"):
            base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(adapter.base))
            model = peft.PeftModel.from_pretrained(base, adapter.path, torch_device="cpu")
    except Exception as error:  # whatever the libraries raise
        raise ModelError(f"{adapter.path}: peft, which wrote it, cannot load it ({error}); save it again") from error
    theirs: dict[str, float] = {}
    for name, each in model.named_modules():
        if isinstance(each, peft.tuners.lora.LoraLayer):
            path = own_name(name).replace(".base_layer", "")
            theirs[f"{path}.{getattr(each, 'parameter_name', 'weight')}"] = each.scaling["default"]
    for path, layer in adapted_layers(part):
        for own in () if isinstance(layer, TokenRows) else layer.adapted:
            shape = layer.adapters[own] if isinstance(layer, AdaptedParameters) else layer.adapter
            if not math.isclose(scaling := theirs.get(f"{path}.{own}", 0.0), shape.scaling):
                raise ModelError(
                    f"{adapter.path}: peft scales its product at {path}.{own} by {scaling:g}, and here that is "
                    f"{shape.scaling:g}; merge the adapter with peft"
                )


def _is_whole(part: nn.Module) -> bool:
    """Whether it has all layers; a pipeline's stage has some."""
    theirs: Any = getattr(part, "theirs", part)
    ends = getattr(theirs, "lm_head", theirs), getattr(getattr(theirs, "model", None), "embed_tokens", theirs)
    return None not in ends


def directory_of_tokenizer(adapter: AdapterDirectory) -> Path:
    """The adapter's own directory, where its tokenizer lies with it, else the base's."""
    return adapter.path if (adapter.path / "tokenizer.json").is_file() else adapter.base

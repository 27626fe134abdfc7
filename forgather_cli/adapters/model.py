"""A model with adapters: which layers get one, what is frozen, in which dtypes, and how it all starts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from forgather_cli.adapters.layers import (
    MEMBERS,
    Adapted,
    AdaptedLinear,
    Shape,
    TokenRows,
    attach,
    attach_rows,
    attach_to_parameters,
    parameter_sizes,
    sizes,
    start_magnitudes,
)
from forgather_cli.adapters.nf4 import freeze, need_bitsandbytes, packed_layers, read_packed, without_packed
from forgather_cli.config.schema import ALL_LINEAR, Config, DoRASettings, LoRASettings, QLoRASettings
from forgather_cli.errors import ModelError
from forgather_cli.models.build import tensor_reader
from forgather_cli.models.init import stable_seed
from forgather_cli.models.parts import train_only
from forgather_cli.precision import compute_dtype, half_dtype, parameter_dtype
from forgather_cli.shards import fill_local

OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of layers by which peft 0.21 may mean experts (``adapters/directory.py: _beside_experts``)."""


def adapt(model: nn.Module, settings: LoRASettings, config: Config) -> list[str]:
    """Give layers of ``model`` (on meta too) adapters, in place, and freeze the rest but for ``config.trainable``.

    Under half autocast the frozen matrices and embeddings get its dtype; what an embedding gives out stays fp32, as
    the residual stream does (under fsdp2 both are what its policy makes them). Returns the account for the log. Raises
    ModelError.
    """
    if settings.init_from is not None and settings.trainable_token_indices is None:
        from forgather_cli.adapters.directory import adapter_to_go_on

        there = adapter_to_go_on(settings).settings.trainable_token_indices
        settings = replace(settings, trainable_token_indices=there)
    if getattr(model, "is_encoder_decoder", False):
        raise ModelError(
            f"adapter: {settings.type} does not adapt encoder-decoders yet, got a {type(model).__name__}; set "
            "adapter=none"
        )
    layers, parameters = targets(model, settings), parameter_targets(model, settings)
    adapted = [f"{name}.weight" for name in layers] + [
        f"{path}.{own}" for path in parameters for own in parameters[path]
    ]
    _check(model, layers, parameters, settings, config)
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
    attach_adapters(model, settings, layers, parameters, dtype)
    account += _add_rows(model, settings, config, dtype)
    account += _not_served(model, settings, config)
    number = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [f"adapter={settings.type}: {number:,} numbers are trained, {account[0]}", *account[1:]]


def attach_adapters(
    model: nn.Module, settings: LoRASettings, layers: list[str], parameters: dict[str, list[str]], dtype: torch.dtype
) -> None:
    """Give the layers and parameters that ``targets`` and ``parameter_targets`` have found adapters, in place."""

    def shape(name: str) -> Shape:
        return Shape(
            settings.rank_of(name), settings.scaling_of(name), settings.lora_dropout,
            is_dora=isinstance(settings, DoRASettings), is_gaussian=settings.init_lora_weights == "gaussian",
        )  # fmt: skip

    for name in layers:
        attach(model.get_submodule(name), shape(name), dtype)
    for path, own in parameters.items():
        attach_to_parameters(model.get_submodule(path), {name: shape(f"{path}.{name}") for name in own}, dtype)


def attach_rows_of(model: nn.Module, settings: LoRASettings, dtype: torch.dtype) -> None:
    """Give embedding and head rows of their own for ``trainable_token_indices``, in place. Raises ModelError."""
    for name, ids in token_rows(model, settings).items():
        layer, source = model.get_submodule(name), input_layer(model)
        is_tied = layer is not source and layer.weight is source.weight
        attach_rows(
            layer, tuple(ids), dtype, tied_to=source if is_tied else None,
            is_new=settings.trainable_token_indices is None,
        )  # fmt: skip


def _add_rows(model: nn.Module, settings: LoRASettings, config: Config, dtype: torch.dtype) -> Iterator[str]:
    """``attach_rows_of``, and what is said of it. Rows that nobody has asked for are left out where they cannot be."""
    rows, asked = token_rows(model, settings), settings.trainable_token_indices is not None
    if left := {*getattr(model, "new_tokens", ())} - {id for ids in rows.values() for id in ids}:
        yield f"the rows of {len(left)} added tokens stay as the base has them: trainable_token_indices leaves them out"
    if not rows:
        return
    number, why = max(map(len, rows.values())), None
    source, fused = input_layer(model), getattr(config.loss, "applies_head", False)
    head: Any = output_layer(model)
    for name in rows:
        layer: Any = model.get_submodule(name)
        if isinstance(layer, Adapted) or layer.weight.requires_grad:
            why = f"{name} is trained otherwise; leave it out of adapter.target_modules and trainable"
        elif head is layer and fused:
            loss = getattr(config.loss, "type", config.loss)
            why = f"loss={loss} multiplies with the head's weight itself; set loss=cross_entropy"
        elif head is layer and layer.weight is source.weight and getattr(config.trainer, "type", None) == "pipeline":
            why = f"under trainer=pipeline {name} is on another stage than the embedding that it shares them with"
    if why is not None and asked:
        raise ModelError(f"adapter.trainable_token_indices: {why}, or trainable_token_indices=[]")
    if why is not None:
        yield f"the rows of {number} added tokens stay as the base has them: {why}"
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
        "DoRA": isinstance(settings, DoRASettings),
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
            f"{unknown[0]!r}; {f'did you mean {near[0]}? Its' if near else 'its'} layers are {', '.join(kinds)}"
        )
    return found


def parameter_targets(model: nn.Module, settings: LoRASettings) -> dict[str, list[str]]:
    """Module's name -> those of its own parameters that get an adapter, both in the model's order, as peft 0.21 finds
    them. Raises ModelError."""
    wanted = settings.target_parameters
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.ndim in (2, 3) and any(_ends_with(f"{path}.{own}", each) for each in wanted):
                found.setdefault(path, []).append(own)
    names = [name for name, parameter in model.named_parameters() if parameter.ndim in (2, 3)]
    for each in wanted:
        if not any(_ends_with(name, each) for name in names):
            kinds = dict.fromkeys(".".join(name.split(".")[-2:]) for name in names)
            experts = dict.fromkeys(each.rpartition(".")[2] for each in kinds)
            near = get_close_matches(each, kinds, n=1) or get_close_matches(each, experts, n=1)
            raise ModelError(
                f"adapter.target_parameters: no matrix of {type(getattr(model, 'theirs', model)).__name__} is "
                f"{each!r};{f' did you mean {near[0]}?' if near else ''} Its matrices are {', '.join(kinds)}"
            )
    return found


def token_rows(model: nn.Module, settings: LoRASettings) -> dict[str, list[int]]:
    """Embedding and head, by name, with the tokens whose rows are trained; without a setting those that the data add.

    A head that shares the embedding's weight shares these rows too. Raises ModelError.
    """
    wanted, source, head = settings.trainable_token_indices, input_layer(model), output_layer(model)
    new = list(getattr(model, "new_tokens", ()))
    names: dict[str, Any] = {n: layer for n, layer in model.named_modules() if layer is source or layer is head}
    given: dict[str, list[int]] = {}
    if isinstance(wanted, dict):
        for key, ids in wanted.items():
            name = next((name for name in names if _ends_with(name, key)), None)
            if name is None:
                raise ModelError(
                    f"adapter.trainable_token_indices: {key} is neither embedding nor head; name {' or '.join(names)}"
                )
            given[name] = ids
    else:
        given = {name: new if wanted is None else wanted for name in names if wanted is None or names[name] is source}
    given = {name: ids for name, ids in given.items() if ids}
    tied = [name for name, layer in names.items() if layer.weight is source.weight]
    held = [given[name] for name in tied if name in given]
    if any(ids != held[0] for ids in held) or (held and next(iter(tied)) not in given):
        raise ModelError(
            f"adapter.trainable_token_indices: {' and '.join(tied)} share their weight; give both the same tokens"
        )
    if held:
        given |= dict.fromkeys(tied, held[0])
    for name, ids in given.items():
        rows = len(names[name].weight)
        if max(ids) >= rows or min(ids) < 0 or len({*ids}) < len(ids):
            raise ModelError(
                f"adapter.trainable_token_indices: must be different tokens below {rows:,}, the rows of {name}, got "
                f"{ids!s:.80}; a base gets more rows by forgather finalize BASE GROWN --add-tokens FILE"
            )
    return given


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def output_layer(model: nn.Module) -> nn.Module | None:
    """The layer from hidden states to logits, where there is one."""
    ask = getattr(getattr(model, "theirs", model), "get_output_embeddings", None)
    found: nn.Module | None = getattr(model, "lm_head", None) if ask is None else ask()
    return found


def input_layer(model: Any) -> Any:
    """The embedding of tokens."""
    ask = getattr(getattr(model, "theirs", model), "get_input_embeddings", None)
    return model.model.embed_tokens if ask is None else ask()


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
        if (rank := settings.rank_of(name)) > width and settings.init_from is None:
            raise ModelError(
                f"adapter.r: {rank} is above the width of {name}, {width}; set adapter.r={width} or less, or a smaller "
                "one for it in adapter.rank_pattern"
            )
    for name in layers:
        layer = model.get_submodule(name)
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
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in widths):
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


# --------------------------------------------------------------------------------------------------------------- start


def starting(init: Callable[[nn.Module], None], config: Config, seed: int) -> Callable[[nn.Module], None]:
    """``init``, which fills a model or a part of one without adapters, and then the adapters: by (seed, name), the same
    in every layout, or as ``init_from`` has them. Of weights in four bits one at a time is in memory otherwise. Raises
    ModelError."""
    from forgather_cli.adapters.directory import adapter_to_go_on, check_same_base
    from forgather_cli.adapters.load import fill_from

    settings, option = config.adapter, cast(Any, config.model)  # one with a directory
    assert isinstance(settings, LoRASettings)
    before = None if settings.init_from is None else adapter_to_go_on(settings)
    if before is not None:
        check_same_base(before, Path(option.path).expanduser())

    def fill(part: nn.Module) -> None:
        fill_base(part, config.model, init, compute_dtype(config.precision))
        if before is None:
            start(part, seed)
        else:
            fill_from(part, before)

    return fill


def fill_base(part: nn.Module, option: Any, init: Callable[[nn.Module], None], dtype: torch.dtype) -> None:
    """Fill what the model option says, all but adapters: by ``init``, and weights in four bits one by one, which are
    computed with in ``dtype``. Raises ModelError."""
    with without_adapters(part), without_packed(part):
        init(part)
        device = next(part.parameters()).device
    if any(True for _ in packed_layers(part)):
        read_packed(part, tensor_reader(option, part), dtype, device)


@torch.no_grad()
def start(part: nn.Module, seed: int) -> None:
    """Fill the adapters of ``part``, whose weights are there."""
    for path, layer in adapted_layers(part):
        if isinstance(layer, TokenRows):
            if layer.source[0] is layer:
                layer.start_rows()
            continue
        for name, parameter in layer.named_parameters():
            if name.startswith(MEMBERS) and name != "lora_magnitude_vector":
                drawn = torch.empty(parameter.shape)
                layer.start(name, drawn, Generator().manual_seed(stable_seed(seed, f"{path}.{name}")))
                fill_local(parameter, drawn)
        if isinstance(layer, AdaptedLinear) and layer.adapter.is_dora:
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
        kinds: tuple[dict[str, Any], ...] = (layer._parameters, layer._modules)
        for members in kinds:
            own = {name: members.pop(name) for name in list(members) if name.startswith(MEMBERS)}
            taken.append((members, own))
    try:
        yield
    finally:
        for members, own in taken:
            members.update(own)

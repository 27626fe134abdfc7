"""Which layers, parameters and rows of a model get adapters, as peft 0.21 finds them."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from torch import nn

from forgather_cli.adapters.layers import sizes
from forgather_cli.config.schema import ALL_LINEAR, LoRASettings
from forgather_cli.errors import ModelError

OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of layers by which peft 0.21 may mean experts (``adapters/directory.py: _beside_experts``)."""


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

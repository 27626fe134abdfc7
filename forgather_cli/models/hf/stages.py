"""Decoders of transformers that are shaped like Llama, as the stages of a pipeline.

Each stage runs the class's own forward: its masks, angles and caches are those of the whole model. It has all places of
the list of layers, of which those of other stages pass hidden states on as they are.

Legend: B sequences, T tokens, E hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.config.pipeline_layout import Stage
from forgather_cli.errors import ModelError
from forgather_cli.models.hf.model import CausalLM

_PARTS = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")


def what_lacks(model: nn.Module) -> list[str]:
    """Of the modules that decoders like Llama have, those that ``model`` has not."""
    return [path for path in _PARTS if _at(model, path) is None]


def _at(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def decoder_stages(model: nn.Module, stages: Sequence[Stage]) -> list[nn.Module]:
    """A splitter (``models/stages.py``) for classes of transformers that have the modules of Llama: as
    ``model=transformers`` builds them, or a script, whose stages are called as its model would be.

    Raises ModelError for a class that does more than run its layers one after the other.
    """
    number = 1 + stages[-1].last_layer
    if isinstance(model, CausalLM):
        twin = model.twin
        _check(twin(), number)
        return [CausalLM(_part(model.theirs, stage), twin) for stage in stages]
    theirs: Any = model
    with torch.device("meta"):
        empty = type(theirs)(theirs.config)
    _check(empty, number)
    return [_callable(_part(theirs, stage)) for stage in stages]


def _part(theirs: Any, stage: Stage) -> Any:
    is_tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    part = _shallow(theirs)
    part.model = _shallow(theirs.model)
    part.model.layers = _Layers(theirs.model.layers, stage.layers)
    if not stage.has_embedding and not (is_tied and stage.has_head):
        part.model.embed_tokens = None
    if not stage.has_head:
        part.model.norm = nn.Identity()
        part.lm_head = None
    return part


def _callable(part: Any) -> Any:
    """``part`` with a forward that takes and returns hidden states where it has no embedding or no head, and tells the
    arguments of the class's own.
    """
    part.forward = wraps(part.forward)(partial(_forward, part, part.forward))
    return part


def _forward(part: Any, theirs: Callable[..., Any], input_ids: Tensor, **inputs: Any) -> Any:
    # nobody takes the keys and values that a class would keep
    inputs = {
        "inputs_embeds" if input_ids.is_floating_point() else "input_ids": input_ids,
        "use_cache": False,
        **inputs,
    }
    return part.model(**inputs).last_hidden_state if part.lm_head is None else theirs(**inputs)


def _shallow(module: Any) -> Any:
    """A module with the same submodules, which can be replaced in one of the two."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


class _Layers(nn.ModuleList):
    """Some layers of a list, under their names in it; in the places of the others what passes hidden states on."""

    def __init__(self, layers: nn.ModuleList, kept: range) -> None:
        super().__init__()
        self._number = len(layers)
        for index in kept:
            self.add_module(str(index), layers[index])

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        every = [self._modules.get(str(i)) or partial(_pass_on, i) for i in range(self._number)]
        return every[index]


def _pass_on(index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In the place of a layer of another stage: ``hidden_states`` (B, T, E).

    A class asks its first layers' cache for how many positions there have been: here they get as many without a value.
    """
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the second up to transformers 5.23
    if cache is not None:
        positions = hidden_states.detach()[:, None, :, :1]
        cache.update(positions, positions, index)
    return hidden_states


def _check(empty: Any, number: int) -> None:
    """Raise ModelError for a class whose forward is more than embedding, ``number`` layers one after the other, and
    norm: each stage would do the rest too, or none. ``empty`` is a model on meta, whose modules are replaced by sums.
    """
    inner = empty.eval().model
    hidden = torch.tensor([[[97.0, -31.0], [0.5, 3.0]]], device="cpu")  # (1, T, E)
    inner.embed_tokens = _Calls(lambda ids: hidden)
    inner.layers = nn.ModuleList([_Calls(partial(torch.add, other=1 + index)) for index in range(len(inner.layers))])
    inner.norm, inner.rotary_emb = _Calls(lambda x: 3 * x), _Calls(lambda x: None)
    wanted = 3 * (hidden + number * (number + 1) / 2)
    reason = "hidden states change outside of them"
    try:
        with torch.device("cpu"), torch.no_grad():
            tokens, ids = {"inputs_embeds": hidden}, {"input_ids": torch.zeros(1, 2, dtype=torch.int64)}
            found = [inner(use_cache=False, **each).last_hidden_state for each in (tokens, ids)]
        if all(torch.equal(each, wanted) for each in found):
            return
    except Exception as error:  # whatever a class asks of its layers
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    raise ModelError(
        f"trainer=pipeline: {type(empty).__name__} does more than run its {number} layers one after the other "
        f"({reason}); set model_splitter to a function of yours that makes its stages, or choose trainer=ddp or fsdp2"
    )


class _Calls(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function
        self.weight = torch.empty(0)  # whose device a class asks for

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self._function(hidden_states)

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

    Raises ModelError for a class that does something to hidden states before its layers.
    """
    if isinstance(model, CausalLM):
        twin = model.twin
        _check_passes_on(twin())
        return [CausalLM(_part(model.theirs, stage), twin) for stage in stages]
    theirs: Any = model
    with torch.device("meta"):
        _check_passes_on(type(theirs)(theirs.config))
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


def _check_passes_on(empty: Any) -> None:
    """Raise ModelError for a class whose forward changes hidden states outside of modules: each stage would again.

    ``empty`` is such a model on meta, which is used up.
    """
    empty.model.layers, empty.model.norm = _Layers(empty.model.layers, range(0)), nn.Identity()
    empty.model.rotary_emb = _Nothing()  # angles of the layers, on meta
    hidden = torch.tensor([[[97.0, -31.0], [0.5, 3.0]]], device="cpu")
    with torch.device("cpu"), torch.no_grad():
        found = empty.eval().model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    if not torch.equal(found, hidden):
        raise ModelError(
            f"trainer=pipeline: {type(empty).__name__} changes hidden states outside of its layers (a scale), which "
            "each stage would do again; set model_splitter to a function of yours, or choose trainer=ddp or fsdp2"
        )


class _Nothing(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None

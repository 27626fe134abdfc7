"""Cutting a model into the stages of a pipeline.

A model that can be cut is ``Cuttable``; ``models/decoder.py`` is the example. Every rank builds the whole model, on
meta where that is possible, and drops what other stages hold, so that names stay those of the full model.

Legend: B sequences, T tokens, E hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from forgather_cli.errors import ModelError


@runtime_checkable
class Cuttable(Protocol):
    """What a pipeline needs of a model, besides being an ``nn.Module``.

    After ``cut``, ``forward(input_ids=x, **masks)`` takes hidden states (B, T, E) as ``x`` where the embedding is gone,
    and returns hidden states (B, T, E) where the head is gone. ``masks`` are those of ``attention_mask``,
    ``document_ids`` and ``position_ids``, (B, T) each, that the data has.
    """

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...

    def cut(self, first: int, last: int, *, is_first: bool, is_last: bool) -> None:
        """Drop, in place, all but layers ``first`` to ``last`` (counted from 0, both stay), the embedding if
        ``is_first`` and the head if ``is_last``. A weight that embedding and head share stays in both stages, under one
        name.
        """


def cuttable(model: nn.Module) -> Cuttable:
    """``model`` itself. Raises ModelError naming what it lacks."""
    lacking = [name for name in ("num_hidden_layers", "hidden_size", "cut") if not hasattr(model, name)]
    if lacking:
        raise ModelError(
            f"trainer=pipeline: {type(model).__name__} cannot be cut into stages, it has no {', no '.join(lacking)} "
            "(forgather_cli.models.stages.Cuttable says what they are); add them, or choose trainer=ddp or fsdp2"
        )
    return cast(Cuttable, model)


def fresh_models(build: Callable[[], nn.Module]) -> Iterator[nn.Module]:
    """Whole models without end, equal to each other: ``build`` meets the same random numbers each time.

    Drop one before taking the next, else there are two in memory. Raises ModelError when ``build`` returns one object
    again, which cutting it would destroy.
    """
    start = torch.get_rng_state()
    model = build()
    previous = weakref.ref(model)
    if any(p.is_meta for p in model.parameters()):
        yield model
    while True:
        del model
        torch.set_rng_state(start)
        model = build()
        if previous() is model:
            raise ModelError(
                f"trainer=pipeline: each stage is cut from a model of its own, got one {type(model).__name__}; "
                "give the Trainer a model_init, a function that makes the model, instead of model"
            )
        previous = weakref.ref(model)
        yield model


def tied_names(names: Sequence[Mapping[str, object]], whole: Sequence[str]) -> list[str]:
    """Parameters that the first and the last stage both hold. ``names`` are each stage's, ``whole`` the full model's.

    Raises ModelError for one that no stage holds, or two others, which ``cut`` must have got wrong.
    """
    for name in whole:
        holders = [index for index, stage in enumerate(names) if name in stage]
        if len(holders) != 1 and holders != [0, len(names) - 1]:
            where = f"stages {', '.join(map(str, holders))}" if holders else "no stage"
            raise ModelError(
                f"trainer=pipeline: after cut() {where} of {len(names)} holds {name}; every parameter belongs to one "
                "stage, and only one that embedding and head share to the first and the last"
            )
    return [name for name in names[0] if name in names[-1]] if len(names) > 1 else []


def replace_parameter(module: nn.Module, name: str, new: nn.Parameter) -> None:
    """Put ``new`` wherever ``module`` uses its parameter ``name``."""
    old = module.get_parameter(name)
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is old:
                child._parameters[key] = new


def hidden_states(model: nn.Module, inputs: Mapping[str, object], hidden_size: int, dtype: torch.dtype) -> Tensor:
    """What a stage without the head passes on, (B, T, E) in ``dtype``. Raises ModelError for anything else."""
    out = model(**inputs)
    x = inputs["input_ids"]
    assert isinstance(x, Tensor)
    wanted = (*x.shape[:2], hidden_size)
    if not isinstance(out, Tensor) or out.shape != wanted:
        got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ModelError(
            f"trainer=pipeline: {type(model).__name__} without its head must return hidden states of shape {wanted}, "
            f"got {got}"
        )
    return out.to(dtype)

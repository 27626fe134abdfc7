"""Cutting a model into the stages of a pipeline.

A model that can be cut is ``Cuttable``; ``models/decoder.py`` is the example. Any other needs a ``Splitter``; for
decoders of transformers that are shaped like Llama there is one. Every rank builds the whole model, on meta where that
is possible, and drops what other stages hold, so that names stay those of the full model.

Legend: B sequences, T tokens, E hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from forgather_cli.config.pipeline_layout import Stage
from forgather_cli.errors import ForgatherError, ModelError, PartError
from forgather_cli.models.transform import blocks_of
from forgather_cli.targets import raised


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


Splitter = Callable[[nn.Module, Sequence[Stage]], Sequence[nn.Module]]
"""Called with a whole model and its stages in their order; returns a module for each of them.

A module's ``forward`` is what ``Cuttable`` says, and its parameters have the names of the whole model. It may share
submodules with the model, which nobody uses any further. A weight that embedding and head share stays in the first and
the last stage, under the model's name for it.
"""


def splitter_of(model: nn.Module, own: Splitter | None) -> Splitter | None:
    """``own``, the splitter for decoders of transformers, or None for a model that cuts itself.

    Raises ModelError naming what ``model`` lacks.
    """
    if own is not None:
        return own
    lacking = [name for name in ("num_hidden_layers", "hidden_size", "cut") if not hasattr(model, name)]
    if not lacking:
        return None
    what, add = "", " (forgather_cli.models.stages.Cuttable says what they are); add them,"
    if hasattr(getattr(model, "config", None), "model_type"):
        from forgather_cli.models.hf.stages import decoder_stages, what_lacks

        if not (lacking := what_lacks(model)):
            return decoder_stages
        what, add = " as decoders like Llama are", ";"
    name = type(getattr(model, "theirs", model)).__name__
    raise ModelError(
        f"trainer=pipeline: {name} cannot be cut into stages{what}, it has no {', no '.join(lacking)}{add} set "
        "model_splitter to a function of the model and its stages that returns a module for each, or choose "
        "trainer=ddp or fsdp2"
    )


def num_layers_of(model: nn.Module, split: Sequence[int] | None = None) -> int:
    """Layers that stages are made of: as ``model`` or its config tells, else what ``split`` adds up to, else its
    repeated blocks. Raises ModelError where nothing tells.
    """
    found = _told(model, "num_hidden_layers") or sum(split or ()) or len(blocks_of(model))
    if not found:
        raise ModelError(
            f"trainer=pipeline: {type(model).__name__} does not tell how many layers it has (num_hidden_layers, or an "
            "nn.ModuleList of equal blocks); set split to layers per stage"
        )
    return found


def hidden_size_of(model: nn.Module) -> int:
    """Width of what passes from stage to stage: as ``model`` or its config tells, else that of its first embedding.

    Raises ModelError where nothing tells.
    """
    widths = (module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding))
    found = _told(model, "hidden_size") or next(widths, None)
    if found is None:
        raise ModelError(
            f"trainer=pipeline: {type(model).__name__} does not tell how wide its hidden states are; give the class "
            "hidden_size"
        )
    return found


def _told(model: nn.Module, name: str) -> int | None:
    for owner in (model, getattr(model, "config", None)):
        if isinstance(value := getattr(owner, name, None), int):
            return value
    return None


def stage_of(
    model: nn.Module,
    stages: Sequence[Stage],
    index: int,
    splitter: Splitter | None,
    check_head: Callable[[nn.Module], None] = lambda head: None,
) -> nn.Module:
    """The module of one stage, made of a whole model, which is used up. ``splitter``: as ``splitter_of`` returns it.

    ``check_head`` is called with the module that the last stage has, or will have when it is cut. Raises ModelError for
    modules that are not the stages of ``model``, PartError for what a splitter raises.
    """
    stage = stages[index]
    if splitter is None:
        check_head(model)
        cuttable = cast(Cuttable, model)
        cuttable.cut(stage.first_layer, stage.last_layer, is_first=stage.has_embedding, is_last=stage.has_head)
        return model
    whole = [name for name, _ in model.named_parameters()]
    function = getattr(splitter, "func", splitter)  # of a partial
    called = getattr(function, "__name__", type(function).__name__)
    name = f"model_splitter: {called}"
    try:
        made = splitter(model, stages)
    except ForgatherError:
        raise
    except Exception as error:  # a user's code
        raise PartError("model_splitter", called, raised(error), "as it cut the model") from error
    if not isinstance(made, list | tuple) or not all(isinstance(each, nn.Module) for each in made):
        raise ModelError(f"{name} must return a list of nn.Module, one for each stage, got {type(made).__name__}")
    if len(made) != len(stages):
        raise ModelError(f"{name} returned {len(made)} modules for {len(stages)} stages; return one for each stage")
    held = [dict(each.named_parameters()) for each in made]
    for number, names in enumerate(held):
        if others := sorted(names.keys() - set(whole)):
            raise ModelError(
                f"{name} gave stage {number} of {len(stages)} a parameter {others[0]}, which "
                f"{type(model).__name__} does not have; keep its names, which checkpoints have too"
            )
    tied_names(held, whole, f"{name} returned stages of which")
    check_head(made[-1])
    own: nn.Module = made[index]
    for name in ("config", "generation_config"):  # which checkpoints have beside the weights
        if hasattr(model, name) and not hasattr(own, name):
            setattr(own, name, getattr(model, name))
    return own


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


def tied_names(
    names: Sequence[Mapping[str, object]], whole: Sequence[str], by: str = "trainer=pipeline: after cut()"
) -> list[str]:
    """Parameters that the first and the last stage both hold. ``names`` are each stage's, ``whole`` the full model's.

    Raises ModelError for one that no stage holds, or two others, which ``by`` must have got wrong.
    """
    for name in whole:
        holders = [index for index, stage in enumerate(names) if name in stage]
        if len(holders) != 1 and holders != [0, len(names) - 1]:
            where = f"stages {', '.join(map(str, holders))}" if holders else "no stage"
            raise ModelError(
                f"{by} {where} of {len(names)} {'hold' if len(holders) > 1 else 'holds'} {name}; every parameter "
                "belongs to one stage, and only one that embedding and head share to the first and the last"
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

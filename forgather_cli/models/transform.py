"""Changes to a built model: the dtype of its parameters; block by block activation checkpointing and compilation.

Names stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import ModelError


def numbered_blocks(module: nn.Module) -> list[tuple[int, nn.Module]]:
    """The repeated blocks: children of the outermost lists (or dicts, sequences) of modules of one composite class.

    Each with its number in its stack: the name that it has there, which a stage of a pipeline keeps, else its place.
    """
    found: list[tuple[int, nn.Module]] = []
    for child in module.children():
        members = list(child.named_children())
        container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        repeated = container and len({type(m) for _, m in members}) == 1 and any(True for _ in members[0][1].children())
        if repeated:
            found += [(int(name) if name.isdecimal() else n, member) for n, (name, member) in enumerate(members)]
        else:
            found += numbered_blocks(child)
    return found


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks, without their numbers."""
    return [block for _, block in numbered_blocks(module)]


def _required_blocks(module: nn.Module, setting: str) -> list[tuple[int, nn.Module]]:
    blocks = numbered_blocks(module)
    if not blocks:
        raise ModelError(
            f"{setting}: {type(module).__name__} has no nn.ModuleList (or ModuleDict, Sequential) of equal blocks; "
            f"set {setting}=false"
        )
    return blocks


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Round floating parameters to ``dtype``, one at a time; tied ones stay tied. Buffers (rotary angles) keep theirs.

    On meta it costs nothing: values are drawn or read later, in fp32 or as they are stored, and rounded once.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def apply_activation_checkpointing(
    module: nn.Module, recomputes: Callable[[int], bool] = lambda layer: True, **options: Any
) -> None:
    """Recompute the activations of every block, or of those whose number in the full model ``recomputes`` names, in the
    backward pass instead of keeping them. ``options`` are those of torch's ``checkpoint``. Raises ModelError.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    for number, block in _required_blocks(module, "gradient_checkpointing"):
        if recomputes(number):
            # a partial over the block, not a closure: a deep copy of the model must call the copy
            block.forward = functools.partial(_recomputed, block, options)


def _recomputed(block: nn.Module, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    forward = functools.partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def recomputes(module: nn.Module) -> bool:
    """Whether blocks of ``module`` recompute activations, by the function above or torch's wrapper."""
    return any(
        getattr(m.__dict__.get("forward"), "func", None) is _recomputed or type(m).__name__ == "CheckpointWrapper"
        for m in module.modules()
    )


def compile_options(args: RunSettings) -> dict[str, Any]:
    """The arguments of ``torch.compile``; ``activation_memory_budget``, torch's own process-wide switch
    (``torch._functorch.config``), is set.
    """
    if args.activation_memory_budget is not None:
        from torch._functorch import config

        config.activation_memory_budget = args.activation_memory_budget
    return {
        "backend": args.torch_compile_backend or "inductor",
        "mode": args.torch_compile_mode,
        "dynamic": args.torch_compile_dynamic,
        "fullgraph": args.torch_compile_fullgraph,
    }


def compile_blocks(module: nn.Module, args: RunSettings) -> None:
    """Compile every block in place with the ``torch_compile_*`` settings. Raises ModelError.

    Blocks share their code, so all of them cost one compilation.
    """
    options = compile_options(args)
    for _, block in _required_blocks(module, "torch_compile"):
        block.compile(**options)

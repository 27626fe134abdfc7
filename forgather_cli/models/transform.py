"""Changes to a built model: the dtype of its parameters; block by block activation checkpointing and compilation.

Names stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import ModelError


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks: children of the outermost lists (or dicts, sequences) of modules of one composite class."""
    found: list[nn.Module] = []
    for child in module.children():
        members = list(child.children())
        container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        repeated = container and len({type(m) for m in members}) == 1 and any(True for _ in members[0].children())
        found += members if repeated else blocks_of(child)
    return found


def _required_blocks(module: nn.Module, setting: str) -> list[nn.Module]:
    blocks = blocks_of(module)
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


def apply_activation_checkpointing(module: nn.Module, *, every_n_layers: int = 1, **options: Any) -> None:
    """Recompute the activations of every block, or of each ``every_n_layers``-th from the first, in the backward pass
    instead of keeping them. ``options`` are those of torch's ``checkpoint``. Raises ModelError.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    for block in _required_blocks(module, "gradient_checkpointing")[::every_n_layers]:
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


def compile_blocks(module: nn.Module, args: RunSettings) -> None:
    """Compile every block in place with the ``torch_compile_*`` settings. Raises ModelError.

    Blocks share their code, so all of them cost one compilation. ``activation_memory_budget`` is torch's own
    process-wide switch (``torch._functorch.config``).
    """
    if args.activation_memory_budget is not None:
        from torch._functorch import config

        config.activation_memory_budget = args.activation_memory_budget
    for block in _required_blocks(module, "torch_compile"):
        block.compile(
            backend=args.torch_compile_backend or "inductor",
            mode=args.torch_compile_mode,
            dynamic=args.torch_compile_dynamic,
            fullgraph=args.torch_compile_fullgraph,
        )

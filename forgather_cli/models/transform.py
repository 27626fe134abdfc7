"""Changes to a built model: the dtype of its parameters; block by block activation checkpointing and compilation.

Names stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.layers import RMSNorm, to_autocast


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


def half_stream(module: nn.Module) -> None:
    """Round what embeddings give out to the autocast dtype, and keep it there, in place. Raises ModelError."""
    norms = [each for each in module.modules() if isinstance(each, RMSNorm)]
    if not norms:
        raise ModelError(
            f"precision.stream: bf16 is for models of Forgather's own classes, and a {type(module).__name__} makes its "
            "stream itself; set precision.stream=null"
        )
    for norm in norms:
        norm.keeps_dtype = True
    for embedding in module.modules():
        if isinstance(embedding, nn.Embedding):
            embedding.register_forward_hook(lambda embedding, args, out: to_autocast(out))


@contextmanager
def shared_halves(
    parts: Iterable[nn.Module], autocast: Callable[[], AbstractContextManager[object]], kernel: Any
) -> Iterator[None]:
    """Inside, linear layers multiply with one copy of their fp32 weights in the dtype of ``autocast``, which by itself
    rounds them again in every forward, as compiled code does. ``kernel`` of the loss, if it has one, rounds the head's.

    Gradients are those of autocast to the last bit: each forward's in its dtype, added up in the weight's own.
    """
    layers: list[nn.Linear] = []
    with autocast():
        for name, layer in (named for part in parts for named in part.named_modules()):
            if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
                continue
            weight = layer.weight.detach()
            is_large = weight.dtype == torch.float32 and weight.numel() >= _WORTH_SHARING
            if not is_large or (kernel and name.endswith("lm_head")) or (half := to_autocast(weight)) is weight:
                continue
            if "forward" not in vars(layer):  # it stays, since compiled code looks at what it is
                vars(layer)["forward"] = functools.partial(_with_half, layer)
            vars(layer)["half_weight"] = half
            layers.append(layer)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["half_weight"] = None


_WORTH_SHARING = 1 << 19
"""Numbers of a weight: to round fewer costs less than ``_Half``, 30 us forward and backward (one core, torch 2.13)."""


def _with_half(layer: nn.Linear, x: Tensor) -> Tensor:
    half = vars(layer)["half_weight"]
    return F.linear(x, layer.weight if half is None else _Half.apply(layer.weight, half), layer.bias)  # type: ignore[no-untyped-call]


class _Half(torch.autograd.Function):
    """A weight's copy in half precision. A node for each use: one cast for all of them would get its turn after the
    whole backward, for autograd takes the newest nodes first, and hold every gradient back till then.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, half: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return half.view_as(half)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return outputs[0].to(ctx.dtype), None


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

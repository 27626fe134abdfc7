"""What of a model is gathered at a time under fsdp2, and what has to be so before it is cut into rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather_cli.errors import ModelError
from forgather_cli.models.transform import blocks_of


def blocks_to_shard(model: nn.Module, classes: Sequence[str] | None) -> list[nn.Module]:
    """The blocks whose weights are gathered one after the other: the repeated ones, or all modules of some classes.

    A block that shares a parameter with another module is left to the rest of the model: what is sharded together must
    hold all of a parameter's uses. Raises ModelError for a class that no module has, and for blocks of mixed dtypes.
    """
    blocks = blocks_of(model) if classes is None else list(_of_classes(model, set(classes)))
    missing = set(classes or ()) - {type(block).__name__ for block in blocks}
    if missing:
        found = ", ".join(sorted({type(block).__name__ for block in blocks_of(model)}))
        remedy = f"name its repeated blocks, {found}, or leave it out" if found else "leave it out"
        raise ModelError(
            "trainer.block_classes (in an accelerate_config: fsdp_transformer_layer_cls_to_wrap): "
            f"{type(model).__name__} has no {', '.join(sorted(missing))}; {remedy}"
        )
    blocks = _separate(blocks, model)
    for unit in (*blocks, None):
        _check_dtypes(model, list(unit.parameters() if unit is not None else _outside(model, blocks)))
    return blocks


def _of_classes(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Outermost modules."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _of_classes(child, names)


def _separate(blocks: list[nn.Module], model: nn.Module) -> list[nn.Module]:
    inside = [{id(p) for p in block.parameters()} for block in blocks]
    seen: set[int] = set()
    shared: set[int] = set()
    for ids in [*inside, {id(p) for p in _outside(model, blocks)}]:
        shared |= seen & ids
        seen |= ids
    return [block for block, ids in zip(blocks, inside, strict=True) if ids and not ids & shared]


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    for module in _users_outside(model, blocks):
        yield from module.parameters(recurse=False)


def _users_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules with parameters of their own that are in no block: embedding, last norm, head."""
    inner = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inner and any(True for _ in module.parameters(recurse=False)):
            yield module


def _check_dtypes(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    found = sorted({str(p.dtype) for p in parameters if p.requires_grad and p.ndim})
    if len(found) > 1:
        raise ModelError(
            f"trainer=fsdp2: parameters that are gathered together must have one dtype, {type(model).__name__} mixes "
            f"{' and '.join(found)}; construct it in one of them, or choose trainer=ddp"
        )


def enter_in(dtype: torch.dtype, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Have hidden states, the first argument, enter blocks, last norm and head in the dtype of the gathered weights.

    torch's own ``cast_forward_inputs`` would round rotary angles, masks and counts too.
    """

    def cast(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not first.is_floating_point() or first.dtype == dtype:
            return None
        return first.to(dtype), *args[1:]

    for module in (*blocks, *_users_outside(model, blocks)):
        module.register_forward_pre_hook(cast)


@torch.no_grad()
def send_from_first_rank(model: nn.Module, group: Any, device: torch.device) -> None:
    """Collective. Weights that a user's constructor made become those of rank 0, one tensor at a time."""
    if group is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, 0, group=group)
        tensor.copy_(sent)

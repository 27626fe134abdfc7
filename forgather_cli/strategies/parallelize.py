"""A model, or one stage of it, of which each rank holds some rows of every parameter.

Source: ``torch.distributed.fsdp.fully_shard``, torch 2.13; Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from forgather_cli.config.schema import FSDP2Settings, PrecisionOption
from forgather_cli.distributed import all_sum
from forgather_cli.errors import ModelError
from forgather_cli.models.init import allocate
from forgather_cli.models.transform import blocks_of
from forgather_cli.precision.dtypes import half_dtype
from forgather_cli.strategies.base import Batch, ModelSpec, empty_batch, without_targets

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sharding:
    """Who shares the parameters, and how."""

    mesh: DeviceMesh
    """Rows are shared out along ``shard``; along ``replicate``, where it has that, there are copies (HSDP)."""
    group: Any
    """All ranks of the mesh; None for one rank."""
    device: torch.device
    settings: FSDP2Settings
    policy: MixedPrecisionPolicy


def precision_policy(settings: FSDP2Settings, precision: PrecisionOption | None) -> MixedPrecisionPolicy:
    """Half weights and activations and fp32 sums of gradients under ``precision=bf16`` and ``fp16``; what the settings
    say counts. Parameters that are bf16 themselves are gathered as they are, and their gradients summed in fp32 too.

    Inputs are not cast as a whole: rotary angles and the number of targets stay fp32.
    """
    param = _DTYPES[settings.param_dtype] if settings.param_dtype else half_dtype(precision)
    reduce = _DTYPES[settings.reduce_dtype or "fp32"]
    return MixedPrecisionPolicy(
        param_dtype=None if param == torch.float32 else param, reduce_dtype=reduce, cast_forward_inputs=False
    )


def parallelize(root: nn.Module, model: nn.Module, spec: ModelSpec, sharding: Sharding) -> list[FSDPModule]:
    """Collective. Shard the blocks of ``model``, and for the rest ``root``, the module that runs it; give it memory and
    weights. Returns what is gathered at a time, the root last.

    Gradients come summed over the mesh, where torch would average: losses are divided by all ranks' targets already.
    Raises ModelError.
    """
    mesh, settings, device, policy = sharding.mesh, sharding.settings, sharding.device, sharding.policy
    if spec.init is None:
        if any(p.is_meta for p in model.parameters()):
            raise AssertionError("a model built on meta needs an init")
        _send_from_first_rank(model, sharding.group, device)
    blocks = blocks_to_shard(model, settings.block_classes)
    if not blocks and mesh.get_rank() == 0:
        log.warning(
            "trainer=fsdp2: %s has no list of equal blocks that could be gathered one at a time, so all of its "
            "weights are gathered at once; name the classes of its blocks in block_classes",
            type(model).__name__,
        )
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    scalars = {p for p in model.parameters() if not p.ndim}  # which cannot be cut, and every rank holds
    # what the root holds ends the forward and begins the backward
    for module, reshard in [*((block, settings.reshard_after_forward) for block in blocks), (root, False)]:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=scalars,
        )
    if policy.param_dtype is not None:
        _enter_in(policy.param_dtype, model, blocks)
    units = [cast(FSDPModule, module) for module in (*blocks, root)]
    if mesh.size() > 1:  # alone, a pass over all gradients would divide them by 1
        for unit in units:  # not recursive (torch 2.13)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # else torch takes PREMUL_SUM, which gloo lacks
    allocate(model, "cpu" if settings.cpu_offload else device)
    # buffers and scalars go to the device, wherever the rows of the other parameters are
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    for scalar in (p for p in model.parameters() if not p.ndim):
        scalar.data = scalar.data.to(device)
        if scalar.requires_grad and sharding.group is not None:
            scalar.register_hook(lambda gradient: all_sum(gradient.clone(), sharding.group))  # type: ignore[no-untyped-call]
    if spec.init is not None:
        spec.init(model)
    for unit in units:
        # with the first gather, rows that do not divide get padding, in new memory: before others hold on to them
        unit.unshard()
        unit.reshard()
    return units


class EvenMicrobatches:
    """Gives every rank that shares parameters the same number of micro-batches in a step, since all ranks take part in
    every gather.

    At the end of the data ranks' slices may differ by a micro-batch: a rank that has run out gets batches without
    targets. The largest number of all ranks is agreed on over the CPU while the first micro-batches are computed.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """``group``: a CPU group of all ranks; None where each rank may have its own number."""
        self._group, self._device = group, device
        self._newest: Batch | None = None
        self._work: Any = None

    def of(self, microbatches: Iterable[Batch]) -> Iterator[Batch]:
        """Collective. This rank's micro-batches, then as many without targets as it takes."""
        batches = microbatches if isinstance(microbatches, Sized) else list(microbatches)
        self._highest, self._begun = torch.tensor(len(batches)), 0
        if self._group is not None:
            self._work = dist.all_reduce(self._highest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        for batch in batches:
            self._begun += 1
            yield batch
            self._newest = batch
        while not self.is_last:
            self._begun += 1
            yield self.empty()

    @property
    def is_last(self) -> bool:
        """True if no rank has another micro-batch after the present one. Waits until all ranks have begun the step."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._begun == int(self._highest)

    def empty(self) -> Batch:
        """A batch without targets, shaped like the newest one."""
        return without_targets(self._newest or empty_batch(self._device))


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
    inside = [{id(p) for p in block.parameters()} for block in blocks]
    seen: set[int] = set()
    shared: set[int] = set()
    for ids in [*inside, {id(p) for p in _outside(model, blocks)}]:
        shared |= seen & ids
        seen |= ids
    blocks = [block for block, ids in zip(blocks, inside, strict=True) if ids and not ids & shared]
    for parameters in (*(block.parameters() for block in blocks), _outside(model, blocks)):
        dtypes = sorted({str(p.dtype) for p in parameters if p.requires_grad and p.ndim})
        if len(dtypes) > 1:
            raise ModelError(
                "trainer=fsdp2: parameters that are gathered together must have one dtype, "
                f"{type(model).__name__} mixes {' and '.join(dtypes)}; construct it in one of them, or choose "
                "trainer=ddp"
            )
    return blocks


def _of_classes(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Outermost modules."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _of_classes(child, names)


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    for module in _users_outside(model, blocks):
        yield from module.parameters(recurse=False)


def _users_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Modules with parameters of their own that are in no block: embedding, last norm, head."""
    inner = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inner and any(True for _ in module.parameters(recurse=False)):
            yield module


def _enter_in(dtype: torch.dtype, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
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
def _send_from_first_rank(model: nn.Module, group: Any, device: torch.device) -> None:
    """Collective. Weights that a user's constructor made become those of rank 0, one tensor at a time."""
    if group is None:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, group=group, group_src=0)
        tensor.copy_(sent)

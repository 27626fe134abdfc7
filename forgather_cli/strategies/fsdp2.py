"""Fully sharded data parallel (FSDP2): every rank holds some rows of every parameter and reads its slice of each batch.

Source: ``torch.distributed.fsdp.fully_shard``, torch 2.13; Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable, Sized
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from forgather_cli.config.accelerate_file import ALWAYS_SO, LAUNCHED, is_launched_for_fsdp
from forgather_cli.config.schema import FSDP2Settings, PrecisionOption
from forgather_cli.distributed import all_sum, cpu_group, join_world, world
from forgather_cli.errors import SetupError
from forgather_cli.loss import IGNORED, Loss, ModelWithLoss, model_kwargs, model_logits
from forgather_cli.models.init import allocate
from forgather_cli.precision import half_dtype
from forgather_cli.strategies.base import Batch, Strategy
from forgather_cli.strategies.parallelize import blocks_to_shard, enter_in, send_from_first_rank

log = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FullyShard(Strategy):
    """PyTorch's ``fully_shard``, block by block, over all ranks of the default process group.

    With ``replicate`` the ranks form so many groups of neighbours that each hold the whole model (HSDP). Gradients are
    reduced after every micro-batch: a rank never holds more of them than its rows, for one reduce-scatter more per
    micro-batch. Evaluation and generation gather the weights too: all ranks take part in each of their calls.
    """

    name = "fsdp2"
    supports_fp16 = FSDP2Settings.supports_fp16
    supports_compile = True
    supports_optimizer_in_backward = FSDP2Settings.supports_optimizer_in_backward

    def __init__(
        self,
        device: torch.device,
        loss: Loss,
        settings: FSDP2Settings | None = None,
        precision: PrecisionOption | None = None,
    ) -> None:
        """Collective. Raises SetupError if ``replicate`` does not divide the number of ranks."""
        self._settings = settings or FSDP2Settings()
        _have_a_group(device)
        self._world = world()
        self.data_rank, self.data_size = self._world.rank, self._world.size
        self.device = device
        self._loss = loss
        self._mesh = _mesh(device, self._world.size, self._settings.replicate)
        shards = self._world.size // self._settings.replicate
        self.model_group = self._mesh.get_group("shard") if shards > 1 else None
        self._policy = _precision_policy(self._settings, precision)
        self._host_group = cpu_group()
        self._last: Batch | None = None

    @classmethod
    def from_settings(
        cls, option: FSDP2Settings, device: torch.device, loss: Loss, precision: PrecisionOption | None
    ) -> FullyShard:
        """As the config's options say."""
        source = option.accelerate_config or (LAUNCHED if is_launched_for_fsdp() else None)
        if source is not None and world().rank == 0:
            log.info("%s was read; here it is always so: %s", source, ", ".join(ALWAYS_SO))
        return cls(device, loss, option, precision)

    # ------------------------------------------------------------------------------------------------------- set-up

    def materialize(self, build: Callable[[], nn.Module], init: Callable[[nn.Module], None] | None) -> None:
        model = build()
        if init is None:
            if any(p.is_meta for p in model.parameters()):
                raise AssertionError("a model built on meta needs an init")
            send_from_first_rank(model, self._world.group, self.device)
        self.parts = [model]
        self._with_loss = ModelWithLoss(model, self._loss)
        self._root = _Root(self._with_loss)
        self._units = self._shard(model)
        allocate(model, "cpu" if self._settings.cpu_offload else self.device)
        self._move_unsharded(model)
        self._share({p for p in model.parameters() if not p.ndim})
        if init is not None:
            init(model)
        for unit in self._units:
            # with the first gather, rows that do not divide get padding, in new memory: before others hold on to them
            unit.unshard()
            unit.reshard()

    def _shard(self, model: nn.Module) -> list[FSDPModule]:
        """``fully_shard`` the blocks and what is left of the model; returns the sharded modules."""
        blocks = blocks_to_shard(model, self._settings.block_classes)
        if not blocks and self._world.rank == 0:
            log.warning(
                "trainer=fsdp2: %s has no list of equal blocks that could be gathered one at a time, so all of its "
                "weights are gathered at once; name the classes of its blocks in block_classes",
                type(model).__name__,
            )
        frees = self._settings.reshard_after_forward
        # what the root holds ends the forward and begins the backward
        for module, reshard in [*((block, frees) for block in blocks), (self._root, False)]:
            fully_shard(
                module,
                mesh=self._mesh,
                reshard_after_forward=reshard,
                mp_policy=self._policy,
                offload_policy=self._offload_policy(),
                ignored_params={p for p in model.parameters() if not p.ndim},  # which cannot be cut
            )
        if self._policy.param_dtype is not None:
            enter_in(self._policy.param_dtype, model, blocks)
        units = [cast(FSDPModule, module) for module in (*blocks, self._root)]
        for unit in units:
            _sum_gradients(unit, self._world.size)
        return units

    def _offload_policy(self) -> OffloadPolicy:
        pins = self.device.type == "cuda"
        return CPUOffloadPolicy(pin_memory=pins) if self._settings.cpu_offload else OffloadPolicy()

    def _share(self, scalars: set[nn.Parameter]) -> None:
        """0-dim parameters are held by every rank: their gradients are summed over all ranks as they come."""
        if self._world.size == 1:
            return
        for scalar in scalars:
            if scalar.requires_grad:
                scalar.register_hook(self._summed)  # type: ignore[no-untyped-call]
        if self.model_group is not None and dist.get_rank(self.model_group) > 0:
            self.duplicates = frozenset(scalars)

    def _summed(self, gradient: Tensor) -> Tensor:
        """Collective."""
        return all_sum(gradient.clone(), self._world.group)

    def _move_unsharded(self, model: nn.Module) -> None:
        """Buffers and 0-dim parameters to the device, wherever the rows of the other parameters are."""
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        for parameter in model.parameters():
            if not parameter.ndim:
                parameter.data = parameter.data.to(self.device)

    # ---------------------------------------------------------------------------------------------------- the verbs

    def forward_backward(self, microbatches: Iterable[Batch], num_tokens: Tensor) -> Tensor:
        share = torch.zeros((), device=self.device)
        batches = microbatches if isinstance(microbatches, Sized) else list(microbatches)
        rounds = _Highest(len(batches), self._host_group)
        for number, batch in enumerate(batches, 1):
            share += self._round(batch, num_tokens, number, rounds)
            self._last = batch
        for number in range(len(batches) + 1, rounds.read() + 1):
            self._round(self._empty_batch(), num_tokens, number, rounds)
        return share

    def _round(self, batch: Batch, num_tokens: Tensor, number: int, rounds: _Highest) -> Tensor:
        """Collective. Forward and backward of one micro-batch on every rank; returns this rank's share of the loss."""
        total, _ = self._root(lambda: self._with_loss(batch, num_tokens))
        loss: Tensor = total / num_tokens
        if self._settings.replicate > 1:
            # between copies of the model, which are further apart, gradients are summed once per step
            cast(FSDPModule, self._root).set_requires_all_reduce(number == rounds.read())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _empty_batch(self) -> Batch:
        """A batch without targets, for a rank that has run out while others have not."""
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        like = self._last or {"input_ids": tokens, "labels": tokens}
        return {**like, "labels": torch.full_like(like["labels"], IGNORED)}

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = self._evaluate(lambda: self._with_loss(batch))
        return total, count

    @torch.no_grad()
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        model, inputs = self.parts[0], model_kwargs(batch)
        found: Tensor = self._evaluate(lambda: model_logits(model, inputs, last_only=last_only, cache=cache))
        return found

    def _evaluate(self, run: Callable[[], Any]) -> Any:
        """Collective. ``run`` with the weights gathered, and freed again, which otherwise a backward would do."""
        found = self._root(run)
        for unit in self._units:
            unit.reshard()
        return found


class _Root(nn.Module):
    """What is sharded as a whole: anything that runs in its forward finds weights gathered, the head's among them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class _Highest:
    """The highest of all ranks' numbers, under way on the host while something else is computed.

    Slices of a step may differ by a micro-batch, at the end of the data, and every rank takes part in every gather.
    """

    def __init__(self, number: int, group: Any) -> None:
        """Collective."""
        self._number = torch.tensor(number)
        self._work = None
        if group is not None:
            self._work = dist.all_reduce(self._number, dist.ReduceOp.MAX, group=group, async_op=True)

    def read(self) -> int:
        """Waits until all ranks have begun."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._number)


def _have_a_group(device: torch.device) -> None:
    """Collective. ``fully_shard`` wants a process group, of one rank too: make one where there is none to join."""
    join_world(device)
    if dist.is_initialized():
        return
    log.info("trainer=fsdp2: this process trains alone, in a process group of one rank made for it")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _mesh(device: torch.device, size: int, replicate: int) -> DeviceMesh:
    """Collective."""
    if size % replicate:
        raise SetupError(
            f"replicate: {size} ranks cannot be divided into {replicate} copies of the model; set it to a divisor of "
            f"{size}"
        )
    if replicate == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))


def _precision_policy(settings: FSDP2Settings, precision: PrecisionOption | None) -> MixedPrecisionPolicy:
    """Half weights and activations and fp32 sums of gradients under ``precision=bf16`` and ``fp16``; what the settings
    say counts. Parameters that are bf16 themselves are gathered as they are, and their gradients summed in fp32 too.

    Inputs are not cast as a whole: rotary angles and the number of targets stay fp32.
    """
    param = _DTYPES[settings.param_dtype] if settings.param_dtype else half_dtype(precision)
    reduce = _DTYPES[settings.reduce_dtype or "fp32"]
    return MixedPrecisionPolicy(
        param_dtype=None if param == torch.float32 else param, reduce_dtype=reduce, cast_forward_inputs=False
    )


def _sum_gradients(unit: FSDPModule, ranks: int) -> None:
    """Sum gradients over ranks, where torch would average: the loss is divided by all ranks' targets already.

    Not recursive (torch 2.13). The sum is forced since torch otherwise takes PREMUL_SUM, which gloo lacks.
    """
    if ranks > 1:  # alone, a pass over all gradients would divide them by 1
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

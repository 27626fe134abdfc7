"""How gradients travel between data-parallel ranks: hooks of DDP that average one bucket of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from forgather_cli.distributed import World
from forgather_cli.errors import ConfigError
from forgather_cli.strategies.base import GradientSharing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

log = logging.getLogger(__name__)

Hook = Callable[["GradBucket"], torch.futures.Future[Tensor]]
"""Collective. The averaged gradients of one bucket."""


_ALIVE: list[Any] = []
"""Groups that torch's PowerSGD has used. Its callbacks hold the group, and a gloo thread that drops the last reference
to its own group waits for itself, which aborts the process ("Resource deadlock avoided", torch 2.13)."""


def average(tensor: Tensor, group: Any) -> torch.futures.Future[Tensor]:
    """Collective. ``tensor`` averaged over the ranks of ``group``, in place."""
    tensor.div_(group.size())  # first, so that half formats do not overflow
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def compressed(dtype: torch.dtype, group: Any) -> Hook:
    """A hook that sends gradients as ``dtype``, half the bytes of fp32; fp16 loses those below 6e-8.

    Own code, since torch's ``bf16_compress_hook`` demands NCCL (torch 2.13, DistributedDataParallel._check_comm_hook).
    """

    def hook(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        future = average(gradients.to(dtype), group)
        return future.then(lambda done: gradients.copy_(done.value()))

    return hook


class SharedAmong:
    """A hook that averages gradients with all ranks, a subgroup of them, or nobody, as ``sharing`` says at each step.

    Gradients come divided by the targets of all ranks and multiplied by the number of ranks. With fewer than all, each
    rank's becomes the mean over its own targets first.
    """

    def __init__(self, sharing: GradientSharing, world: World) -> None:
        """Collective. Raises ConfigError for a subgroup that does not divide the ranks."""
        self._sharing, self._world = sharing, world
        self._subgroup: Any = None
        size = sharing.settings.subgroup
        if size is None and sharing.settings.post_local_gradient_allreduce:
            size = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        if size is None or size == 1:
            return
        if world.size % size:
            raise ConfigError(
                f"post_local_sgd.subgroup: {world.size} ranks cannot be divided into groups of {size}; "
                f"set it to a divisor of {world.size}"
            )
        self._subgroup, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]

    def begin_step(self, step_targets: Tensor) -> None:
        """A step of ``step_targets`` targets over all ranks begins."""
        self._step_targets, self._num_own = step_targets, torch.zeros_like(step_targets)

    def add_targets(self, count: Tensor) -> None:
        """Say, before the backward of a micro-batch, how many targets it has."""
        self._num_own += count

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Collective among those who share."""
        gradients = bucket.buffer()
        if self._sharing.among == "all":
            return average(gradients, self._world.group)
        gradients.mul_(self._step_targets / (self._num_own.clamp(min=1) * self._world.size))
        if self._sharing.among == "subgroup" and self._subgroup is not None:
            return average(gradients, self._subgroup)
        alone: torch.futures.Future[Tensor] = torch.futures.Future()
        alone.set_result(gradients)
        return alone


class PowerSGD:
    """Low-rank compression with error feedback (Vogels et al. 2019, arXiv:1905.13727): torch's hook and its state.

    Gradients are exact for torch's first 1000 steps, and approximated by matrices of rank 1 afterwards. What a rank's
    compression has lost so far is added to its next gradient, and is kept in checkpoints for the same number of ranks.
    """

    _KEPT = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
    _MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")

    def __init__(self, group: Any, device: torch.device) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

        _ALIVE.append(group)
        self._size, self._device = group.size(), device
        self._state = torch_hook.PowerSGDState(group)
        self._hook = torch_hook.powerSGD_hook
        log.warning(
            "comm_hook=powersgd: gradients are approximated after %d steps, and each rank keeps what it has not sent; "
            "a resume is not exact: with another number of ranks that is dropped",
            self._state.start_powerSGD_iter,
        )

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return self._hook(self._state, bucket)

    def state_dict(self) -> dict[str, Any]:
        """This rank's counters, random state and memories by bucket."""
        counters = {name: getattr(self._state, name) for name in self._KEPT}
        memories = {name: dict(getattr(self._state, name)) for name in self._MEMORIES}
        return {"world_size": self._size, "rng": self._state.rng.get_state(), **counters, **memories}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; of another number of ranks only the counters and the random state are used."""
        for name in self._KEPT:
            setattr(self._state, name, state[name])
        self._state.rng.set_state(state["rng"])
        same = state["world_size"] == self._size
        for name in self._MEMORIES:
            memory = {bucket: tensor.to(self._device) for bucket, tensor in state[name].items()}
            setattr(self._state, name, memory if same else {})
        if not same:
            log.warning(
                "comm_hook=powersgd: the checkpoint was written by %d ranks, here are %d: "
                "what its compression had not sent yet is dropped",
                state["world_size"],
                self._size,
            )

"""Post-local SGD: ranks that train by themselves and average their weights now and then (Lin et al. 2018,
arXiv:1808.07217)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather_cli.config.schema import PostLocalSGD
from forgather_cli.distributed import World
from forgather_cli.errors import ConfigError
from forgather_cli.strategies.comm_hooks import average

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

log = logging.getLogger(__name__)


class LocalSGD:
    """Counts steps, averages gradients while they are shared, and weights when that is due.

    The first ``start_step`` steps are ordinary: gradients are averaged over all ranks. After them each rank divides its
    gradient by its own targets, averages it with its subgroup or with nobody, and every ``period`` steps all average
    their weights.
    """

    def __init__(self, settings: PostLocalSGD, world: World, parameters: Iterable[nn.Parameter]) -> None:
        self._settings = settings
        self._world = world
        self._parameters = list(parameters)
        self._subgroup = _subgroup(settings, world)
        self._steps = 0
        self._apart = False
        log.warning(
            "post_local_sgd: after %d steps the ranks' weights differ between averages, and their optimizer states for "
            "good; a resume is not exact: with another number of ranks all go on from averaged weights",
            settings.start_step,
        )

    @property
    def settled(self) -> bool:
        """True if all ranks hold equal weights."""
        return not self._apart

    @property
    def _is_local(self) -> bool:
        return self._steps >= self._settings.start_step

    def begin_step(self, num_tokens: Tensor) -> None:
        """A step of ``num_tokens`` targets over all ranks begins."""
        self._num_tokens, self._num_own = num_tokens, torch.zeros_like(num_tokens)

    def add_targets(self, count: Tensor) -> None:
        """Say, before the backward of a micro-batch, how many targets it has."""
        self._num_own += count

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Collective while gradients are shared. DDP's hook for one bucket.

        The gradients come divided by the targets of all ranks and multiplied by the number of ranks.
        """
        gradients = bucket.buffer()
        if not self._is_local:
            return average(gradients, self._world.group)
        gradients.mul_(self._num_tokens / (self._num_own.clamp(min=1) * self._world.size))
        if self._subgroup is not None:
            return average(gradients, self._subgroup)
        alone: torch.futures.Future[Tensor] = torch.futures.Future()
        alone.set_result(gradients)
        return alone

    def after_optimizer_step(self) -> None:
        """Collective. Count the step and average the weights if it ends a period."""
        self._apart = self._is_local
        self._steps += 1
        if self._apart and (self._steps - self._settings.start_step) % self._settings.period == 0:
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Collective. Give all ranks the mean of their weights, unless they are equal."""
        if not self._apart:
            return
        works = [
            dist.all_reduce(p.detach().div_(self._world.size), group=self._world.group, async_op=True)
            for p in self._parameters
        ]
        for work in works:
            work.wait()
        self._apart = False

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._apart = state["steps"], False


def _subgroup(settings: PostLocalSGD, world: World) -> Any:
    """Collective. The ranks that go on averaging gradients with this one; None: nobody."""
    size = settings.subgroup
    if size is None and settings.post_local_gradient_allreduce:
        size = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if size is None or size == 1:
        return None
    if world.size % size:
        raise ConfigError(
            f"post_local_sgd.subgroup: {world.size} ranks cannot be divided into groups of {size}; "
            f"set it to a divisor of {world.size}"
        )
    group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
    return group

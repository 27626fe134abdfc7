"""Averages weights between steps: post-local SGD, where ranks train alone and average their weights now and then
(Lin et al. 2018, arXiv:1808.07217).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from forgather_cli.distributed import World
from forgather_cli.strategies.base import GradientSharing, Strategy

log = logging.getLogger(__name__)


def outer_loop(strategy: Strategy, world: World) -> LocalSGD | None:
    """The object that averages weights between the steps of ``strategy``; None where they are equal after each step."""
    sharing = strategy.gradient_sharing
    return None if sharing is None else LocalSGD(sharing, world, strategy)


class LocalSGD:
    """Counts steps, tells the strategy how to share gradients, and averages weights when that is due.

    The first ``start_step`` steps are ordinary: gradients are averaged over all ranks. After them each rank divides its
    gradient by its own targets, averages it with its subgroup or with nobody, and every ``period`` steps all average
    their weights. Checkpoints hold its state under this class's name.
    """

    def __init__(self, sharing: GradientSharing, world: World, strategy: Strategy) -> None:
        self._sharing, self._world = sharing, world
        self._parameters = [p for part in strategy.parts for p in part.parameters() if p.requires_grad]
        self._steps = 0
        self._share_gradients()
        log.warning(
            "post_local_sgd: after %d steps the ranks' weights differ between averages, and their optimizer states for "
            "good; a resume is not exact: with another number of ranks all go on from averaged weights",
            sharing.settings.start_step,
        )

    @property
    def weights_are_equal(self) -> bool:
        """True if all ranks hold equal weights now, so that a checkpoint may be saved."""
        return self._sharing.weights_are_equal

    def after_optimizer_step(self) -> None:
        """Collective. Count the step and average the weights if it ends a period."""
        settings = self._sharing.settings
        self._sharing.weights_are_equal = self._sharing.among == "all"
        self._steps += 1
        if not self.weights_are_equal and (self._steps - settings.start_step) % settings.period == 0:
            self.average_weights()
        self._share_gradients()

    @torch.no_grad()
    def average_weights(self) -> None:
        """Collective. Give all ranks the mean of their weights; nothing if they are equal already."""
        if self.weights_are_equal:
            return
        works = [
            dist.all_reduce(p.detach().div_(self._world.size), group=self._world.group, async_op=True)
            for p in self._parameters
        ]
        for work in works:
            work.wait()
        self._sharing.weights_are_equal = True

    def _share_gradients(self) -> None:
        settings = self._sharing.settings
        in_subgroup = settings.subgroup is not None or settings.post_local_gradient_allreduce
        if self._steps < settings.start_step:
            self._sharing.among = "all"
        else:
            self._sharing.among = "subgroup" if in_subgroup else "none"

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._sharing.weights_are_equal = True
        self._share_gradients()

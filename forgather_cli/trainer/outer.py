"""Averages weights between steps: post-local SGD among the ranks of a job (Lin et al. 2018, arXiv:1808.07217), or what
a callback brings (``callbacks.diloco``: among jobs).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from forgather_cli.distributed import World
from forgather_cli.documents.fields import COUNT, check_fields
from forgather_cli.errors import ConfigError
from forgather_cli.launch.exit_status import ExitStatus
from forgather_cli.strategies.base import GradientSharing, Strategy

if TYPE_CHECKING:
    from forgather_cli.data.loaders.collate import Counts

log = logging.getLogger(__name__)


class OuterLoop(Protocol):
    """What averages weights between steps. Every method but the states is collective over the job's ranks."""

    component: str
    """Its key in checkpoints, where each rank stores its state."""
    ranks_differ: bool
    """The ranks of this job train alone between averages: each has weights, norms and moments of its own."""
    ended: ExitStatus | None
    """Why it has ended training, if it has."""

    @property
    def weights_are_equal(self) -> bool:
        """True if all ranks hold equal weights now, so that they may be written."""

    def begin(self) -> None:
        """Before the first step, with a checkpoint restored."""

    def before_step(self, wait_for_save: Callable[[], None]) -> None:
        """Before a step's data is fetched; it may end training instead. ``wait_for_save()`` returns once the checkpoint
        that is being written is published."""

    def after_optimizer_step(self) -> None:
        """Weights have been updated."""

    def after_step(self, counts: Counts) -> None:
        """A step with data of these ``counts`` is done; what is due comes next. It may ask for a save."""

    def after_last_step(self) -> None:
        """Training is over. What is written from now on are weights of all ranks."""

    def end(self) -> None:
        """The last checkpoint is published."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def outer_loop(strategy: Strategy, world: World, brought: OuterLoop | None = None) -> OuterLoop | None:
    """What averages weights between the steps of ``strategy``: what a callback has ``brought``, or the strategy's own;
    None where nothing does. Raises ConfigError for both.
    """
    sharing = strategy.gradient_sharing
    if sharing is None:
        return brought
    if brought is not None:
        raise ConfigError("trainer.ddp_comm_hook: post_local_sgd cannot be used under callbacks.diloco; leave one out")
    return LocalSGD(sharing, world, strategy)


class LocalSGD:
    """Counts steps, tells the strategy how to share gradients, and averages weights when that is due.

    The first ``start_step`` steps are ordinary: gradients are averaged over all ranks. After them each rank divides its
    gradient by its own targets, averages it with its subgroup or with nobody, and every ``period`` steps all average
    their weights. Checkpoints hold its state under this class's name.
    """

    component = "strategy"
    ranks_differ = True
    ended: ExitStatus | None = None

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
        """True if all ranks hold equal weights now, so that they may be written."""
        return self._sharing.weights_are_equal

    def begin(self) -> None: ...
    def before_step(self, wait_for_save: Callable[[], None]) -> None: ...
    def after_step(self, counts: Counts) -> None: ...
    def end(self) -> None: ...

    def after_last_step(self) -> None:
        """Collective."""
        self.average_weights()

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
        check_fields(state, {"steps": COUNT})
        self._steps = state["steps"]
        self._sharing.weights_are_equal = True
        self._share_gradients()

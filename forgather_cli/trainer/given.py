"""What the loop is given beside a config: objects that no file holds, and what its owner does its own way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from forgather_cli.checkpoint.components import Component
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.strategies.base import Strategy
from forgather_cli.trainer.optimizers import OptimizerRecipe


@dataclass(frozen=True)
class Objects:
    """What is trained and with what: built by a command, or a script's own."""

    model: nn.Module | None
    model_init: Callable[[], nn.Module] | None
    """Makes the model, possibly on meta: then ``init_weights(part, seed)`` fills it."""
    init_weights: Callable[[nn.Module, int], None] | None
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    optimizer: OptimizerRecipe
    loss_fn: Callable[..., Tensor] | None
    fused_loss_factory: Callable[[nn.Module], Callable[..., Tensor]] | None
    compute_loss: Callable[..., Any] | None
    """Minimised in the place of the settings' loss."""
    made_strategy: Strategy | None
    """Stands in the place of the config's ``trainer``."""
    enable_checkpointing: Callable[[nn.Module], Any] | None
    callbacks: list[Any]
    """Objects, and (name, object) pairs."""

    def make_model(self) -> nn.Module:
        """``model``, or what ``model_init`` makes."""
        made = self.model if self.model_init is None else self.model_init()
        assert made is not None
        return made


@dataclass(frozen=True)
class Hooks:
    """What the loop asks of its owner: in a Trainer by way of the methods that a subclass may override."""

    hold: Callable[[bool], AbstractContextManager[None]]
    """Holds the run directory while training lasts. Given True, a run that is there already may be gone on with."""
    make_train_loader: Callable[[], TrainLoader]
    """Collective. This rank's micro-batches, from the beginning."""
    make_optimizer: Callable[[int | None], None]
    """Sets the run's ``optimizer`` and ``lr_scheduler``; of how many steps, where the data tell."""
    own_components: Callable[[], list[Component]]
    """Collective. A user's own, in checkpoints."""
    prepare_evaluation: Callable[[], bool]
    """Collective. Whether there is something to evaluate on."""
    evaluate: Callable[[], dict[str, float]]
    """Collective. The metrics of the evaluation split."""
    log: Callable[[dict[str, float]], None]

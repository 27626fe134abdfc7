"""The loss that settings select."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from forgather_cli.config.schema import CrossEntropySettings, LossOption, Target
from forgather_cli.loss.base import Loss
from forgather_cli.loss.losses import LossFn, UserFusedLoss, UserLoss
from forgather_cli.targets import import_target, make


def build_loss(
    option: LossOption | None = None,
    *,
    loss_fn: LossFn | None = None,
    fused_loss_factory: Callable[[nn.Module], LossFn] | None = None,
    device: torch.device | None = None,
) -> Loss:
    """The loss of a config option, or of the user's function, which takes precedence; cross entropy by default.

    A ``_target_`` is a function (its arguments are bound) or a class whose instances are called. Raises ModelError, and
    SetupError for kernels whose package is missing or that do not run on ``device``.
    """
    if fused_loss_factory is not None:
        return UserFusedLoss(fused_loss_factory)
    if loss_fn is not None:
        return UserLoss(loss_fn)
    if isinstance(option, Target):
        found = import_target(option.path, "loss")
        if isinstance(found, type):
            return UserLoss(make(found, "loss", option.path, **option.kwargs))
        return UserLoss(partial(found, **option.kwargs))
    option = option or CrossEntropySettings()
    maker, where = option.load_maker(), {"device": device} if option.takes_device else {}
    made = partial(maker, **option.arguments(), **where)
    return made() if isinstance(maker, type) else UserLoss(made)

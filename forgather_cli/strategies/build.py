"""The strategy that settings select. A new one of ours needs a line in ``_MODULES``; a user's is a ``_target_``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from forgather_cli.config.schema import PrecisionOption, RunSettings, SingleSettings, Target
from forgather_cli.distributed import join_world, pick_device
from forgather_cli.loss import Loss, build_loss
from forgather_cli.precision import autocast_for
from forgather_cli.precision.scaling import LossScaler, ScaledLoss
from forgather_cli.strategies.base import Strategy
from forgather_cli.targets import call, import_target

_STRATEGIES = {"single": "SingleDevice", "ddp": "DataParallel", "pipeline": "Pipeline", "fsdp2": "FullyShard"}
"""Option of the group ``trainer``, which is its module's name too -> class."""


def build_strategy(
    args: RunSettings, loss_fn: Any = None, fused_loss_factory: Any = None, *, loss: Loss | None = None
) -> Strategy:
    """Collective. The strategy of ``args.trainer`` with the settings' device, precision and loss, or a user's loss.

    ``loss``: one that is built already.

    A user's ``_target_`` is called as ``(device, loss, autocast, **arguments)``. Raises SetupError.
    """
    device = pick_device(args.device)
    if loss is None:
        option = getattr(args, "loss", None)
        loss = build_loss(option, loss_fn=loss_fn, fused_loss_factory=fused_loss_factory, device=device)
    precision = getattr(args, "precision", None)
    scaler = LossScaler.of(precision)
    if scaler is not None:
        loss = ScaledLoss(loss, scaler)
    strategy = _built(args, device, loss, precision)
    strategy.scaler = scaler
    return strategy


def _built(args: RunSettings, device: torch.device, loss: Loss, precision: PrecisionOption | None) -> Strategy:
    """Collective."""
    option = getattr(args, "trainer", None) or SingleSettings()
    if not isinstance(option, SingleSettings):
        join_world(device, args.hang_timeout)
    if isinstance(option, Target):
        factory = import_target(option.path, "trainer")
        made: Strategy = call(factory, "trainer", device, loss, autocast_for(precision, device), **option.kwargs)
        return made
    module = import_module(f"forgather_cli.strategies.{option.type}")  # one strategy's imports, not those of all
    built: Strategy = getattr(module, _STRATEGIES[option.type]).from_settings(option, device, loss, precision)
    return built

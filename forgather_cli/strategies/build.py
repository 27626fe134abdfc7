"""Makes the strategy that settings select: one of ``_STRATEGIES``, or a user's by ``_target_``."""

from __future__ import annotations

from importlib import import_module

from forgather_cli.config.schema import RunSettings, SingleSettings, Target
from forgather_cli.distributed import join_world, pick_device
from forgather_cli.loss.base import Loss
from forgather_cli.loss.build import build_loss
from forgather_cli.precision.dtypes import autocast_for
from forgather_cli.strategies.base import Strategy
from forgather_cli.targets import import_target, make

_STRATEGIES = {"single": "SingleDevice", "ddp": "DataParallel", "pipeline": "Pipeline", "fsdp2": "FullyShard"}
"""Option of the group ``trainer``, also the name of its module -> class. A new strategy needs a line here."""


def build_strategy(args: RunSettings, loss: Loss | None = None) -> Strategy:
    """Collective. The strategy of ``args.trainer`` with the settings' device and precision.

    ``loss`` replaces the one that the settings select. A user's ``_target_`` is called as
    ``(device, loss, autocast, **arguments)``. Raises SetupError.
    """
    device = pick_device(args.device)
    precision = getattr(args, "precision", None)
    loss = loss or build_loss(getattr(args, "loss", None), device=device)
    option = getattr(args, "trainer", None) or SingleSettings()
    if not isinstance(option, SingleSettings):
        join_world(device, args.hang_timeout)
    if isinstance(option, Target):
        factory = import_target(option.path, "trainer")
        autocast = autocast_for(precision, device)
        made: Strategy = make(factory, "trainer", option.path, device, loss, autocast, **option.kwargs)
        return made
    module = import_module(f"forgather_cli.strategies.{option.type}")  # imports this strategy only
    built: Strategy = getattr(module, _STRATEGIES[option.type]).from_settings(option, device, loss, precision)
    return built

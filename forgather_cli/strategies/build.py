"""Makes the strategy that settings select."""

from __future__ import annotations

from forgather_cli.config.schema import RunSettings, SingleSettings, Target
from forgather_cli.distributed import join_world, pick_device
from forgather_cli.loss.base import Loss
from forgather_cli.loss.build import build_loss
from forgather_cli.precision.dtypes import autocast_for
from forgather_cli.strategies.base import Strategy, check_supported
from forgather_cli.targets import import_target, make


def build_strategy(args: RunSettings, loss: Loss | None = None) -> Strategy:
    """Collective. The strategy of ``args.trainer`` with the settings' device and precision.

    ``loss`` replaces the one that the settings select. A user's ``_target_`` is called as
    ``(device, loss, autocast, **arguments)``. Raises SetupError.
    """
    device = pick_device(args.device)
    precision = getattr(args, "precision", None)
    loss = loss or build_loss(getattr(args, "loss", None), device=device)
    option = getattr(args, "trainer", None) or SingleSettings()
    if not option.is_one_process:
        join_world(device, args.hang_timeout)
    if isinstance(option, Target):
        factory, autocast = import_target(option.path, "trainer"), autocast_for(precision, device)
        made: Strategy = make(factory, "trainer", option.path, device, loss, autocast, **option.kwargs)
        check_supported(args, made)
    else:
        made = option.load_maker()(option, device, loss, precision)
    return made

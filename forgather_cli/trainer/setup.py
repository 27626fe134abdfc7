"""How a Trainer's model comes about, and how many parameters it has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from forgather_cli.config.schema import Config
from forgather_cli.distributed import gather, world
from forgather_cli.models.parts import named_tensors
from forgather_cli.precision import parameter_dtype
from forgather_cli.precision.convert import converted, converts
from forgather_cli.strategies.base import ModelSpec, Strategy, check_supported
from forgather_cli.trainer.arguments import TrainingArguments, script_settings

_log = logging.getLogger(__name__)


def model_spec(
    build: Callable[[], nn.Module],
    args: Config | TrainingArguments,
    strategy: Strategy,
    *,
    init: Callable[[nn.Module], None] | None = None,
    enable_checkpointing: Callable[[nn.Module], Any] | None = None,
) -> ModelSpec:
    """What ``build`` makes, with dtype and layers of ``precision``, ``gradient_checkpointing`` (by the user's function
    where one is given, which changes the model or returns another one) and ``torch_compile``. Raises ConfigError.
    """
    from forgather_cli.models.transform import apply_activation_checkpointing, cast_parameters, compile_blocks

    check_supported(args, strategy)
    dtype = parameter_dtype(args.precision)
    told = world().rank > 0  # by rank 0, once: a pipeline builds the model once per stage

    def adapt(model: nn.Module) -> nn.Module:
        nonlocal told
        if dtype is not None:
            cast_parameters(model, dtype)
        done = converted(model, args.precision, strategy.device)
        if done and not told:
            for line in done.lines():
                _log.info("%s", line)
            told = True
        return model

    def checkpoint(part: nn.Module) -> nn.Module:
        if enable_checkpointing is None:
            apply_activation_checkpointing(part, **(script_settings(args).gradient_checkpointing_kwargs or {}))
            return part
        changed = enable_checkpointing(part)
        return changed if isinstance(changed, nn.Module) else part

    def compiled(part: nn.Module) -> nn.Module:
        compile_blocks(part, args)
        return part

    return ModelSpec(
        build,
        adapt=adapt if dtype is not None or converts(args.precision) else None,
        checkpoint=checkpoint if args.gradient_checkpointing else None,
        compile=compiled if args.torch_compile else None,
        init=init,
    )


def num_parameters(parts: list[nn.Module], group: Any) -> tuple[int, int]:
    """Collective. (all, trainable) parameters of the model that the ranks of ``group`` (CPU) hold, tied ones once."""
    own = {n: (t.numel(), t.requires_grad) for n, t in named_tensors(parts).items() if isinstance(t, nn.Parameter)}
    sizes: dict[str, tuple[int, bool]] = {}
    for held in gather(own, group):
        sizes |= held
    return sum(n for n, _ in sizes.values()), sum(n for n, trained in sizes.values() if trained)

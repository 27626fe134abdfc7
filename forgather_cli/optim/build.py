"""Torch optimizers from the config's option, and several of them behind one surface."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from forgather_cli.config.schema import DEFAULT_GROUP, OptimizerOption, Target, groups_of, label, shipped_groups
from forgather_cli.errors import ConfigError, PartError, SetupError
from forgather_cli.optim.eager import unguard_step, unguarded_construction
from forgather_cli.optim.groups import Assignment, assign
from forgather_cli.optim.state import ParameterOptimizer
from forgather_cli.shards import is_sharded, row_group
from forgather_cli.targets import call, import_target, make

log = logging.getLogger(__name__)

NamedParameters = Iterable[tuple[str, nn.Parameter]]
_FUSED_DEVICES = ("cpu", "cuda")


class Optimizers(ParameterOptimizer):
    """One or several torch optimizers stepped together."""

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @classmethod
    def wrap(cls, optimizer: Optimizer | Sequence[Optimizer], named_parameters: NamedParameters) -> Self:
        """Optimizers made elsewhere. Groups without a ``name`` get one.

        Raises SetupError for a parameter that ``named_parameters`` lacks, ConfigError for what is no torch optimizer.
        """
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        if not isinstance(optimizers, Sequence) or not all(isinstance(o, Optimizer) for o in optimizers):
            raise ConfigError(f"optimizers: got a {type(optimizer).__name__}; give a torch.optim.Optimizer")
        known: dict[nn.Parameter, str] = {}  # the first name of each
        for name, parameter in named_parameters:
            known.setdefault(parameter, name)
        check_rates(optimizers)
        groups = [group for o in optimizers for group in o.param_groups]
        given = [group["name"] for group in groups if "name" in group]
        if len(set(given)) < len(given):
            raise ConfigError("optimizers: two parameter groups have the same name; checkpoints need different ones")
        names: dict[nn.Parameter, str] = {}
        for n, group in enumerate(groups):
            default = "default" if len(groups) == 1 else f"group_{n}"
            group.setdefault("name", f"{default}_unnamed" if default in given else default)
            for parameter in group["params"]:
                if parameter not in known:
                    raise SetupError(
                        f"optimizers: group {group['name']} holds a parameter of shape {tuple(parameter.shape)} that "
                        "the model does not train; build the optimizer from the parameters of the model that is trained"
                    )
                names[parameter] = known[parameter]
        return cls(optimizers, names)


def build_optimizer(
    option: OptimizerOption, named_parameters: NamedParameters, *, lr: float, weight_decay: float
) -> Optimizers:
    """The optimizers of a config option over ``named_parameters``; ``lr`` is the peak of the schedule.

    Groups of one kind share one torch optimizer. Raises ConfigError for settings that are refused, SetupError where
    there is nothing to train.
    """
    assignments = assign(option, named_parameters, lr=lr, weight_decay=weight_decay)
    if not assignments:
        raise SetupError("optimizer: the model has no trainable parameter; unfreeze some")
    used = {assignment.group for assignment in assignments}
    shipped = shipped_groups(getattr(option, "type", None))  # of the user's own a warning; the shipped ones may
    for name, group in groups_of(option).items():
        if name not in used and shipped.get(name) != group:
            log.warning("optimizer.groups.%s.regex: %r matches no free parameter", name, group.regex)
    together: list[tuple[Any, list[Assignment]]] = []  # a torch optimizer for each kind or _target_ with arguments
    for assignment in assignments:
        key = assignment.option if isinstance(assignment.option, Target) else assignment.kind
        members = next((members for known, members in together if known == key), None)
        if members is None:
            together.append((key, members := []))
        members.append(assignment)
    with unguarded_construction():
        optimizers = [_build(members) for _, members in together]
    return Optimizers(optimizers, {p: name for a in assignments for name, p in a.parameters})


def _build(assignments: list[Assignment]) -> Optimizer:
    """The torch optimizer of assignments that one can serve."""
    option = assignments[0].trained_by
    factory = import_target(option.path, "optimizer") if isinstance(option, Target) else option.load_maker()
    groups = []
    # torch checks values of arguments, not of groups: let it see every group's settings as arguments
    for assignment in reversed(assignments):  # the default group first: what is wrong there is wrong for all
        if not isinstance(option, Target):
            where = "optimizer" if assignment.group == DEFAULT_GROUP else f"optimizer (group {assignment.name})"
            call(factory, where, [nn.Parameter(torch.zeros(1, 1))], **assignment.settings)
    for assignment in assignments:
        settings = assignment.settings | _fused(assignment)
        groups.append({"params": [p for _, p in assignment.parameters], "name": assignment.name, **settings})
    defaults = {key: value for key, value in groups[0].items() if key not in ("params", "name")}
    if isinstance(option, Target):
        optimizer = make(factory, "optimizer", option.path, groups, **defaults)
    else:
        for name, parameter in (each for assignment in assignments for each in assignment.parameters):
            if option.needs_rows and is_sharded(parameter) and row_group(parameter) is None:
                raise SetupError(
                    f"optimizer={option.type}: {name} must be sharded by rows along one dimension of the mesh, got "
                    f"{getattr(parameter, 'placements', None)}; choose optimizer=adamw, or name another optimizer for "
                    "it in optimizer.groups"
                )
        optimizer = call(factory, "optimizer", groups, **defaults)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer._target_: made a {type(optimizer).__name__}; it must make a torch.optim.Optimizer"
        )
    check_rates([optimizer])
    unguard_step(optimizer)
    return optimizer


def check_rates(optimizers: Sequence[Optimizer]) -> None:
    """Raise PartError for an optimizer with groups that have no learning rate, which a schedule sets."""
    for optimizer in optimizers:
        if lacking := [n for n, group in enumerate(optimizer.param_groups) if "lr" not in group]:
            raise PartError(
                "optimizer",
                type(optimizer).__name__,
                f"its parameter group {lacking[0]} has no lr, which the schedule sets; take lr as an argument, and "
                'hand it to Optimizer.__init__: super().__init__(params, {"lr": lr})',
                "when it was made",
            )


def _fused(assignment: Assignment) -> dict[str, Any]:
    """AdamW's ``fused``: True where the kernel exists, else None, which lets torch choose foreach.

    Source: torch.optim.AdamW, note on foreach and fused (torch 2.13).
    """
    option = assignment.trained_by
    if isinstance(option, Target) or "fused" not in (arguments := option.arguments()):
        return {}
    misfits = [p for _, p in assignment.parameters if not (p.is_floating_point() and p.device.type in _FUSED_DEVICES)]
    if arguments["fused"] and misfits:
        misfit = f"{misfits[0].dtype} on {misfits[0].device}"
        raise ConfigError(
            f"optimizer.fused: {label(assignment.option)} has no fused kernel for {misfit}; set optimizer.fused=null"
        )
    return {"fused": True if arguments["fused"] is not False and not misfits else None}

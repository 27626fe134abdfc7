"""The optimizer and learning-rate scheduler of a Trainer, whichever of the ways it was told."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from forgather_cli.config.decode import decode_settings, to_tree
from forgather_cli.config.schema import DEFAULT_GROUP, Config, GroupSettings, Target, groups_of, regex_problems
from forgather_cli.distributed import gather, world
from forgather_cli.errors import ConfigError
from forgather_cli.optim.build import Optimizers, build_optimizer
from forgather_cli.optim.groups import kind_of, members_of
from forgather_cli.optim.in_backward import FusedBackward
from forgather_cli.optim.schedules import Schedule, TorchSchedule, build_schedule
from forgather_cli.optim.state import ParameterOptimizer, merge_group_states
from forgather_cli.targets import accepts, call, import_target, make

Named = list[tuple[str, nn.Parameter]]
GroupsGiven = dict[str, GroupSettings] | Callable[[Named], list[dict[str, Any]]] | None


@dataclass(frozen=True)
class OptimizerRecipe:
    """How the optimizer and the scheduler are made.

    ``groups``: by name, the first whose regex matches a parameter's name; or a function of [(name, parameter), ...]
    that returns torch's parameter groups and leaves no parameter out.
    """

    config: Config
    optimizers: tuple[Any, Any] = (None, None)
    factory: Callable[..., Any] | None = None
    cls_and_kwargs: tuple[Callable[..., Any], dict[str, Any]] | None = None
    scheduler_factory: Callable[..., Any] | None = None
    groups: GroupsGiven = None

    @property
    def way(self) -> str | None:
        """The argument that brings an optimizer of the user's; None: the settings choose one."""
        ways = {"optimizers": self.optimizers[0], "optimizer_factory": self.factory}
        return next((name for name, given in (ways | {"optimizer_cls_and_kwargs": self.cls_and_kwargs}).items()
                     if given is not None), None)  # fmt: skip

    def problems(self) -> Iterator[str]:
        """What the arguments ask of each other."""
        ways = (self.optimizers[0], self.factory, self.cls_and_kwargs)
        optimizer, scheduler = self.optimizers
        if sum(given is not None for given in ways) > 1:
            yield "optimizers: excludes optimizer_factory and optimizer_cls_and_kwargs, and these each other; give one"
        if self.way is not None and self.config.fuse_optim_with_backward:
            yield (
                f"{self.way}: an optimizer of your own cannot run in the backward pass; set "
                "fuse_optim_with_backward=false"
            )
        if scheduler is not None and optimizer is None:
            yield (
                "optimizers: got a scheduler without its optimizer, so it would schedule another one; give both, or "
                "lr_scheduler_factory"
            )
        if scheduler is not None and self.scheduler_factory is not None:
            yield "lr_scheduler_factory: optimizers has a scheduler too; give one of the two"
        if scheduler is not None and self.groups is not None:
            yield (
                "optimizer_groups: the scheduler in optimizers was made for other groups; give lr_scheduler_factory in "
                "its place"
            )
        # groups of an optimizer that the settings choose are checked with these
        if self.way is None or not isinstance(self.groups, dict):
            return
        for name, group in self.groups.items():
            where = f"optimizer_groups.{name}"
            yield from regex_problems(where, group.regex)
            if group.optimizer is not None:
                yield f"{where}.optimizer: {self.way} brings the only optimizer; leave one of the two out"
            if "lr_scale" in group.settings and self.factory is not None:
                yield f"{where}.settings.lr_scale: the learning rate is optimizer_factory's; give lr"

    def optimizer(self, parameters: Named) -> Any:
        """One or several torch optimizers: torch's own, a list of them, or a ParameterOptimizer."""
        config, option, own = self.config, self.config.optimizer, self.cls_and_kwargs
        if self.groups is not None and isinstance(option, Target):
            own = own or (import_target(option.path, "optimizer"), option.kwargs)
        groups = _by_name(self.groups, parameters) if callable(self.groups) else self.groups
        if self.optimizers[0] is not None:
            made = self.optimizers[0]
            for optimizer in made if isinstance(made, (list, tuple)) else [made]:
                if groups is not None:
                    _regroup(optimizer, groups, parameters)
        elif self.factory is not None:
            made = _made(
                self.factory, "optimizer_factory", parameters if groups is None else _split(groups, parameters)
            )
        elif own is not None:
            cls, kwargs = own
            settings = {"lr": config.learning_rate, **kwargs}
            if accepts(cls, "weight_decay"):
                settings = {"weight_decay": config.weight_decay, **settings}
            split = _split(groups_of(option) if groups is None else groups, parameters, settings)
            made = _made(cls, "optimizer_cls_and_kwargs", split, **settings)
        else:
            if groups is not None and not isinstance(option, Target):
                option = replace(option, groups=groups)
            build = FusedBackward if config.fuse_optim_with_backward else build_optimizer
            return build(option, parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        if groups is not None:
            _check_read(groups, made)
        return made

    def scheduler(self, optimizer: ParameterOptimizer, total_steps: int | None) -> Any:
        """One or several schedulers of torch's, or ours."""
        if self.optimizers[1] is not None:
            return self.optimizers[1]
        if self.scheduler_factory is not None:
            return [_made(self.scheduler_factory, "lr_scheduler_factory", each) for each in optimizer.optimizers]
        return build_schedule(self.config.lr_scheduler, optimizer, total_steps=total_steps)


def _made(factory: Callable[..., Any], argument: str, *args: Any, **kwargs: Any) -> Any:
    """What a script's factory makes. Raises ConfigError, and PartError for what it raises."""
    return make(factory, argument, getattr(factory, "__qualname__", type(factory).__qualname__), *args, **kwargs)


def as_optimizers(made: Any, parameters: Named) -> ParameterOptimizer:
    """What ``create_optimizer`` made, as one. Raises ConfigError, and SetupError for parameters of no model."""
    if made is None:
        raise ConfigError("create_optimizer: made no optimizer, got None; set self.optimizer, and return it")
    return made if isinstance(made, ParameterOptimizer) else Optimizers.wrap(made, parameters)


def as_schedule(made: Any, optimizer: ParameterOptimizer) -> Schedule | TorchSchedule:
    """What ``create_scheduler`` made, as one. Raises ConfigError."""
    if made is None:
        raise ConfigError("create_scheduler: made no scheduler, got None; set self.lr_scheduler, and return it")
    if isinstance(made, Schedule | TorchSchedule):
        return made
    schedule = Schedule.wrap(made)
    scheduled = [getattr(scheduler, "optimizer", None) for scheduler in schedule.schedulers]
    if None not in scheduled and any(each not in scheduled for each in optimizer.optimizers):
        raise ConfigError(
            f"lr_scheduler: {len(optimizer.optimizers)} optimizers are trained with, and some have no scheduler; "
            "give a list with one for each, or lr_scheduler_factory"
        )
    return schedule


def print_groups(optimizer: ParameterOptimizer, parameters: Named, group: Any) -> None:
    """Collective. Print on rank 0 what is trained and by what, as ``forgather plan --params`` does."""
    shapes: dict[str, tuple[int, ...]] = {}
    for held in gather({name: tuple(parameter.shape) for name, parameter in parameters}, group):
        shapes |= held
    groups = merge_group_states(gather(optimizer.group_state(), group))["groups"]
    if world().rank != 0:
        return
    rows = [("parameter", "shape", "numbers", "kind", "group", "optimizer", "decay")]
    for name, shape in shapes.items():
        key, found = next(item for item in groups.items() if name in item[1]["parameters"])
        decay = {**found["settings"], **found["changed"]}.get("weight_decay")
        sizes = (" x ".join(map(str, shape)), f"{math.prod(shape):,}", kind_of(name))
        rows.append((name, *sizes, key, found["optimizer"].lower(), "-" if decay is None else f"{decay:g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def as_group_settings(given: Any) -> GroupsGiven:
    """``optimizer_groups`` as a Trainer takes it: a function, or by name GroupSettings or dicts of these.

    Raises ConfigError.
    """
    if given is None:
        return None
    if callable(given):
        make: Callable[[Named], list[dict[str, Any]]] = given
        return make
    if not isinstance(given, dict):
        raise ConfigError(
            f"optimizer_groups: got a {type(given).__name__}; give {{name: {{'regex': ..., 'settings': {{...}}}}}}, or "
            "a function of [(name, parameter), ...] that returns torch's parameter groups"
        )
    groups: dict[str, GroupSettings] = {}
    for name, group in given.items():
        if name == DEFAULT_GROUP:
            raise ConfigError(
                f"optimizer_groups.{name}: this name stands for the parameters that no regex matches; choose another"
            )
        if isinstance(group, GroupSettings):
            groups[name] = group
            continue
        try:
            plain = {key: to_tree(each) if is_dataclass(each) else each for key, each in group.items()}
            groups[name] = decode_settings(GroupSettings, plain)
        except ConfigError as error:
            raise ConfigError([f"optimizer_groups.{name}.{problem}" for problem in error.problems]) from error
    return groups


def _by_name(make: Callable[[Named], list[dict[str, Any]]], parameters: Named) -> dict[str, GroupSettings]:
    """A user's torch parameter groups, by the names of their parameters. Raises ConfigError for one left out."""
    where = "optimizer_groups"
    names = {parameter: name for name, parameter in reversed(parameters)}
    groups: dict[str, GroupSettings] = {}
    for n, group in enumerate(call(make, where, parameters)):
        members = [each[1] if isinstance(each, tuple) else each for each in group["params"]]
        if foreign := [each for each in members if each not in names]:
            raise ConfigError(
                f"{where}: group {n} has a parameter of shape {tuple(foreign[0].shape)} that an earlier group has, or "
                "that was not among those it was called with; put each of them into one group"
            )
        settings = {key: value for key, value in group.items() if key not in ("params", "name")}
        regex = f"^(?:{'|'.join(re.escape(names.pop(each)) for each in members)})$" if members else "(?!)"
        groups[group.get("name", f"group_{n}")] = GroupSettings(regex=regex, settings=settings)
    if names:
        raise ConfigError(
            f"{where}: no group has {min(names.values())}, which the model trains; put it into one, or freeze it by "
            "requires_grad_(False)"
        )
    return groups


def _split(
    groups: dict[str, GroupSettings], parameters: Named, common: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Torch's parameter groups, empty ones left out. ``common``: what holds in those that do not say otherwise."""
    found = []
    for name, members in members_of(groups, parameters).items():
        settings = dict(groups[name].settings) if name in groups else {}
        if (scale := settings.pop("lr_scale", None)) is not None:
            settings["lr"] = scale * (common or {})["lr"]
        if members:
            found.append({"params": [p for _, p in members], "name": name, **settings})
    return found


def _regroup(optimizer: Optimizer, groups: dict[str, GroupSettings], parameters: Named) -> None:
    """Split the groups of an optimizer that is there already; what it remembers of a parameter stays."""
    names = {parameter: name for name, parameter in reversed(parameters)}
    split = []
    for n, old in enumerate(optimizer.param_groups):
        held = [(names.get(p, ""), p) for p in old["params"]]
        for new in _split(groups, held, old):
            if len(optimizer.param_groups) > 1:
                new["name"] = f"{n}.{new['name']}"
            kept = {key: value for key, value in old.items() if key != "initial_lr" or "lr" not in new}
            split.append({**kept, **new})
    optimizer.param_groups = split


def _check_read(groups: dict[str, GroupSettings], made: Any) -> None:
    """Raise ConfigError for settings that none of the optimizers knows: torch keeps them and nothing reads them."""
    optimizers = (
        made.optimizers if isinstance(made, Optimizers) else made if isinstance(made, (list, tuple)) else [made]
    )
    known = {key for each in optimizers if isinstance(each, Optimizer) for key in each.defaults}
    for name, group in groups.items():
        for key in group.settings.keys() - known - {"lr_scale"}:
            raise ConfigError(
                f"optimizer_groups.{name}.settings.{key}: {type(optimizers[0]).__name__} has no such setting; it has "
                f"{', '.join(sorted(known))}"
            )

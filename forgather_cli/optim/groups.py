"""Which parameter belongs to which optimizer group, and with which settings. Needs no torch.

``optimizer.groups`` maps a name to a regex on the full parameter name (and ``vectors``: what has one dimension); the
first match wins, what no group takes forms the group ``default``. A group of ``muon``, which brings another optimizer,
is served by two and named ``<group>.muon`` (hidden matrices) and ``<group>.adamw`` (the rest).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgather_cli.config.schema import (
    DEFAULT_GROUP,
    EVERYWHERE,
    GroupSettings,
    OptimizerOption,
    OptimizerSettings,
    Target,
    groups_of,
    label,
)
from forgather_cli.errors import ConfigError
from forgather_cli.targets import accepts, import_target

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Assignment:
    """The parameters of one config group that one kind of optimizer trains."""

    name: str
    group: str
    """The config group, which has two names where its option brings another."""
    kind: str
    """adamw, adafactor, muon, ..., or the last part of a ``_target_``."""
    option: OptimizerOption
    """The group's."""
    trained_by: OptimizerOption
    """The option, or the one that it brings."""
    settings: dict[str, Any]
    """What the torch optimizer takes for this group: lr, weight_decay, betas, ..."""
    parameters: list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class ParameterRow:
    """How one parameter is trained."""

    name: str
    shape: tuple[int, ...]
    group: str
    optimizer: str
    lr: float
    weight_decay: float | None
    """None where the optimizer knows none."""
    state_bytes: int | None
    """Bytes of its optimizer state in the parameter's dtype; None for an optimizer that is not ours."""


def kind_of(name: str) -> str:
    """What a parameter of this name is: embedding, attention, mlp, norm, head or other."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "other")


_KINDS = (
    ("norm", r"norm|(^|\.)ln_"),
    ("embedding", r"embed|(^|\.)w[tp]e\."),
    ("head", r"(^|\.)(lm_)?head\."),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|feed_forward|ffn"),
)

# ------------------------------------------------------------------------------------------------------- assignment


def assign(
    option: OptimizerOption,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    weight_decay: float,
) -> list[Assignment]:
    """Sort parameters into groups: those of the config in their order, then ``default``; empty ones are left out.

    ``lr`` and ``weight_decay`` hold where a group's settings do not say otherwise. A parameter that comes under
    several names (tied) counts once, under the first. Raises ConfigError with every mistake in the groups.
    """
    groups = groups_of(option)
    made: list[Assignment] = []
    for group_name, parameters in members_of(groups, named_parameters).items():
        if parameters:
            made += _assign_group(group_name, groups, option, parameters, lr, weight_decay)
    return made


def members_of(
    groups: dict[str, GroupSettings], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """The parameters of each group and of ``default``, in their order; tied ones once."""
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in (*groups, DEFAULT_GROUP)}
    patterns = {name: re.compile(group.regex) for name, group in groups.items()}
    for name, parameter in _unique(named_parameters):
        is_vector = len(parameter.shape) < 2
        fits = (key for key, group in groups.items() if patterns[key].search(name) or (group.vectors and is_vector))
        members[next(fits, DEFAULT_GROUP)].append((name, parameter))
    return members


def _unique(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def _assign_group(
    name: str,
    groups: dict[str, GroupSettings],
    option: OptimizerOption,
    parameters: list[tuple[str, nn.Parameter]],
    lr: float,
    weight_decay: float,
) -> Iterator[Assignment]:
    group = groups.get(name, GroupSettings(regex=""))
    option = group.optimizer or option
    has_vectors = any(each.vectors for each in groups.values())
    own = {key: value for key, value in group.settings.items() if key not in EVERYWHERE}
    if isinstance(option, Target):  # its own arguments stand for all groups, as the run's settings do otherwise
        lr, weight_decay = option.kwargs.get("lr", lr), option.kwargs.get("weight_decay", weight_decay)
    common = {
        "lr": group.settings.get("lr", lr * group.settings.get("lr_scale", 1.0)),
        "weight_decay": group.settings.get("weight_decay", weight_decay),
    }
    if isinstance(option, Target):  # the user's arguments, and what their optimizer accepts of ours
        factory = import_target(option.path, "optimizer")
        for key in own:
            if not accepts(factory, key):
                where = f"optimizer.groups.{name}.settings.{key}"
                raise ConfigError(f"{where}: {label(option)} has no such setting; see its signature")
        settings = {**option.kwargs, **{key: value for key, value in common.items() if accepts(factory, key)}, **own}
        yield Assignment(name, name, label(option), option, option, settings, parameters)
        return
    lists = {key: tuple(value) for key, value in own.items() if isinstance(value, list)}
    option = dataclasses.replace(option, **own | lists)
    served: dict[str, tuple[OptimizerSettings, list[tuple[str, nn.Parameter]]]] = {}
    for parameter_name, parameter in parameters:
        trained_by = option.for_parameter(parameter_name, parameter.shape, has_vectors=has_vectors)
        served.setdefault(trained_by.type, (trained_by, []))[1].append((parameter_name, parameter))
    for kind, (trained_by, members) in sorted(served.items(), key=lambda item: item[0] != option.type):
        full_name = f"{name}.{kind}" if option.brings_another else name
        # fused is chosen where the parameters are, and no setting of a group
        settings = common | {key: value for key, value in trained_by.arguments().items() if key != "fused"}
        yield Assignment(full_name, name, kind, option, trained_by, settings, members)


# ------------------------------------------------------------------------------------------------------ description


def describe(
    option: OptimizerOption,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    weight_decay: float,
) -> list[ParameterRow]:
    """How every parameter would be trained, in the model's order, tied ones once; they may be on meta."""
    parameters = list(_unique(named_parameters))
    rows: dict[str, ParameterRow] = {}
    for assignment in assign(option, parameters, lr=lr, weight_decay=weight_decay):
        for name, parameter in assignment.parameters:
            size, trained_by = None, assignment.trained_by
            if not isinstance(trained_by, Target):
                numbers = trained_by.state_numbers(parameter.shape)
                size = numbers * parameter.element_size() + 4 * trained_by.counts_steps
            rows[name] = ParameterRow(
                name=name,
                shape=tuple(parameter.shape),
                group=assignment.name,
                optimizer=assignment.kind,
                lr=float(assignment.settings.get("lr", 0.0)),
                weight_decay=assignment.settings.get("weight_decay"),
                state_bytes=size,
            )
    return [rows[name] for name, _ in parameters]

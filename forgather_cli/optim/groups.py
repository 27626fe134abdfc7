"""Which parameter belongs to which optimizer group, and with which settings. Needs no torch.

``optimizer.groups`` maps a name to a regex on the full parameter name (and ``vectors``: what has one dimension); the
first match wins, what no group takes forms the group ``default``. A group of ``muon`` is served by two optimizers and
named ``<group>.muon`` (hidden matrices) and ``<group>.adamw`` (the rest).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgather_cli.config.schema import (
    DEFAULT_GROUP,
    EVERYWHERE,
    AdafactorSettings,
    AdamWSettings,
    GroupSettings,
    MuonSettings,
    OptimizerOption,
    SGDSettings,
    Target,
    groups_of,
    label,
)
from forgather_cli.errors import ConfigError
from forgather_cli.targets import accepts, import_target

if TYPE_CHECKING:
    from torch import nn

_NOT_HIDDEN = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|(lm_)?head|score|classifier)(\.|$)")
_ADAFACTOR_EPS = (2.0**-23, 1e-3)
"""Adafactor's defaults for fp32 parameters. For bf16 ones torch 2.13 takes 2^-7, more than most gradients, which it
then does not normalise any more (``torch/optim/_adafactor.py: eps1 = torch.finfo(param.dtype).eps``)."""


@dataclass(frozen=True)
class Assignment:
    """The parameters of one config group that one kind of optimizer trains."""

    name: str
    kind: str
    """adamw, adafactor, muon, sgd, or the last part of a ``_target_``."""
    option: OptimizerOption
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
    kinds: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for parameter_name, parameter in parameters:
        kind = _kind(option, parameter_name, parameter, has_vectors=has_vectors)
        kinds.setdefault(kind, []).append((parameter_name, parameter))
    if isinstance(option, Target):  # its own arguments stand for all groups, as the run's settings do otherwise
        lr, weight_decay = option.kwargs.get("lr", lr), option.kwargs.get("weight_decay", weight_decay)
    common = {
        "lr": group.settings.get("lr", lr * group.settings.get("lr_scale", 1.0)),
        "weight_decay": group.settings.get("weight_decay", weight_decay),
    }
    own = {key: value for key, value in group.settings.items() if key not in EVERYWHERE}
    for kind in sorted(kinds, reverse=True):  # muon before adamw
        full_name = f"{name}.{kind}" if isinstance(option, MuonSettings) else name
        settings = _torch_settings(option, kind, common, own, f"optimizer.groups.{name}.settings")
        yield Assignment(full_name, kind, option, settings, kinds[kind])


def _kind(option: OptimizerOption, name: str, parameter: nn.Parameter, *, has_vectors: bool) -> str:
    """Which optimizer of ``option``; Muon is for hidden matrices only (https://kellerjordan.github.io/posts/muon/).

    ``has_vectors``: biases, one of each expert, are none; a run begun before goes on with what Muon has of them.
    """
    if isinstance(option, MuonSettings):
        is_hidden = len(parameter.shape) == 2 and not _NOT_HIDDEN.search(name)
        return "muon" if is_hidden and not (has_vectors and name.endswith("bias")) else "adamw"
    return label(option)


def _torch_settings(
    option: OptimizerOption, kind: str, common: dict[str, Any], own: dict[str, Any], where: str
) -> dict[str, Any]:
    """The group's keyword arguments of the torch optimizer, in its names."""
    if isinstance(option, Target):  # the user's arguments, and what their optimizer accepts of ours
        factory = import_target(option.path, "optimizer")
        for key in own:
            if not accepts(factory, key):
                raise ConfigError(f"{where}.{key}: {label(option)} has no such setting; see its signature")
        return {**option.kwargs, **{key: value for key, value in common.items() if accepts(factory, key)}, **own}
    merged = dataclasses.replace(option, **own)
    if isinstance(merged, AdafactorSettings):
        return {**common, "beta2_decay": merged.beta2_decay, "d": merged.clipping_threshold, "eps": _ADAFACTOR_EPS}
    if kind == "adamw":
        assert isinstance(merged, (AdamWSettings, MuonSettings))
        return {**common, "betas": tuple(merged.betas), "eps": merged.eps}
    if isinstance(merged, MuonSettings):
        names = ("momentum", "momentum_warmup_steps", "nesterov", "cautious_weight_decay", "ns_steps")
        return {**common, **{name: getattr(merged, name) for name in names}, "adjust_lr_fn": merged.adjust_lr}
    assert isinstance(merged, SGDSettings)
    return {**common, "momentum": merged.momentum, "nesterov": merged.nesterov}


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
            numbers = _state_numbers(assignment, parameter.shape)
            step = 4 if assignment.kind in ("adamw", "adafactor") else 0  # its counter, of each parameter
            rows[name] = ParameterRow(
                name=name,
                shape=tuple(parameter.shape),
                group=assignment.name,
                optimizer=assignment.kind,
                lr=float(assignment.settings.get("lr", 0.0)),
                weight_decay=assignment.settings.get("weight_decay"),
                state_bytes=None if numbers is None else numbers * parameter.element_size() + step,
            )
    return [rows[name] for name, _ in parameters]


def empty_groups(option: OptimizerOption, assignments: list[Assignment]) -> list[str]:
    """Names of the config groups whose regex matched no parameter that was still free."""
    used = {assignment.name for assignment in assignments}
    return [name for name in groups_of(option) if not used & {name, f"{name}.muon", f"{name}.adamw"}]


def _state_numbers(assignment: Assignment, shape: Sequence[int]) -> int | None:
    """Numbers that the optimizer remembers for a parameter, its step counter aside."""
    numel = math.prod(shape)
    if isinstance(assignment.option, Target):
        return None
    if assignment.kind == "adafactor" and len(shape) >= 2:
        return numel // shape[-1] + numel // shape[-2]
    if assignment.kind == "sgd":
        return numel if assignment.settings["momentum"] else 0
    return {"adamw": 2, "adafactor": 1}.get(assignment.kind, assignment.option.moments) * numel

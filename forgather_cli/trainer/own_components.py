"""Components of a user's own in checkpoints: those of a subclass of Trainer, and those that a script has added."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from forgather_cli.checkpoint.components import Component, Sharing
from forgather_cli.config.schema import either
from forgather_cli.distributed import gather
from forgather_cli.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class StateComponent:
    """An object with ``state_dict()`` and ``load_state_dict(state)`` whose state lies in checkpoints under ``key``.

    States hold what JSON has, tuples, bytes, tensors and arrays.
    """

    key: str
    object: Any
    sharing: Sharing | str = Sharing.GLOBAL
    """How states differ between ranks: global (that of rank 0), replicated (equal on all, which each save checks),
    per_rank, auto (replicated or per_rank, as each save finds), per_group, per_node; all ranks restore what is global
    or replicated."""
    required: bool = False
    """A checkpoint without it is not resumed from; else it starts fresh, which is a warning."""
    process_group: str | None = None
    """Of per_group: the name of its group among ``Trainer.get_process_groups()``; the group is known by its ranks."""
    group_id: str | int | None = None
    """Of per_group, or per_node: the name of this rank's group, in the place of ``process_group``. A later run restores
    the state of the group of the same name."""


def own_components(
    given: Iterable[Any], groups: Mapping[str, Any], reserved: Collection[str], cpu_group: Any
) -> list[Component]:
    """Collective. A user's components as those of checkpoints, the same on all ranks, without Forgather's own, which
    are ``Component`` already; ``groups``: process groups by name. Raises ConfigError with all that is wrong on this
    rank, or where ranks differ.
    """
    problems: list[str] = []
    found: dict[str, Component] = {}
    for each in (each for each in given if not isinstance(each, Component)):
        if not isinstance(each, StateComponent):
            problems.append(f"get_state_components: got a {type(each).__name__}; return a list of StateComponent")
        elif each.key in found:
            problems.append(f"{_named(each)}: another component has this key; choose another one")
        else:
            own = list(_problems(each, groups, reserved))
            problems += own
            if not own:
                group = each.group_id
                if each.process_group is not None:
                    group = "ranks " + ",".join(map(str, dist.get_process_group_ranks(groups[each.process_group])))
                found[each.key] = Component(each.key, each.object, Sharing(each.sharing), each.required, group)
    kinds = gather(([(key, c.sharing.value, c.required) for key, c in found.items()], problems), cpu_group)
    if wrong := list(dict.fromkeys(problem for _, of_rank in kinds for problem in of_rank)):
        raise ConfigError(wrong)
    for rank, (kind, _) in enumerate(kinds):
        if kind != kinds[0][0]:
            raise ConfigError(
                f"state components: all ranks must have the same in the same order, got {kinds[0][0]} on rank 0 and "
                f"{kind} on rank {rank}; add them on every rank"
            )
    return [*found.values()]


def _named(each: StateComponent) -> str:
    return f"state component {each.key!r}"


def _problems(each: StateComponent, groups: Mapping[str, Any], reserved: Collection[str]) -> Iterable[str]:
    if not isinstance(each.key, str) or not re.fullmatch(r"[A-Za-z_][\w.-]*", each.key):
        yield f"{_named(each)}: a key is letters, digits, dots, dashes and underscores; choose another one"
    elif each.key in reserved or each.key.startswith("callbacks."):
        yield f"{_named(each)}: Forgather's own component has this key; choose another one"
    lacking = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(each.object, name, None))]
    if lacking:
        yield f"{_named(each)}: a {type(each.object).__name__} has no {' and no '.join(lacking)}; give it such methods"
    try:
        sharing = Sharing(each.sharing)
    except ValueError:
        kinds = [kind.value for kind in Sharing]
        near = did_you_mean(str(each.sharing), kinds)
        yield f"{_named(each)}: sharing must be {either(kinds)}, got {each.sharing!r};{near} give one of them"
        return
    if sharing is Sharing.PER_GROUP:
        if (each.process_group is None) == (each.group_id is None):
            yield f"{_named(each)}: per_group needs to know this rank's group; give process_group or group_id"
        elif each.process_group is not None and each.process_group not in groups:
            known = ", ".join(groups) or "none"
            yield (
                f"{_named(each)}: get_process_groups() has no {each.process_group!r}, it has {known}; add it there, or "
                "give group_id"
            )
    elif each.process_group is not None or (each.group_id is not None and sharing is not Sharing.PER_NODE):
        yield f"{_named(each)}: only sharing=per_group has a group, got {sharing.value}; leave the group out"

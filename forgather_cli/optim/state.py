"""What optimizers remember, by parameter and group name: taken out for a checkpoint, put back bit for bit.

Tensors are named ``<parameter>.<state key>``. The rest is JSON: per group the settings it was built with, what has
changed since, and its parameters' names; per parameter its tensors' keys, its values that are not tensors, and at which
step it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgather_cli.documents.fields import (
    AMOUNT,
    ANYTHING,
    NUMBER,
    TEXT,
    FieldError,
    check_fields,
    list_of,
    object_of,
    optional,
)
from forgather_cli.errors import CheckpointError, SetupError
from forgather_cli.shards import local

Winner = Literal["config", "checkpoint"]

# how a step is computed, not what: another device may need other values
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
_NOT_SETTINGS = frozenset({"params", "param_names", "name", "lr"})
_LISTED = 8  # names in one error line
_KNOWN = ("torch.optim", "forgather_cli.optim")
"""Where optimizers are from whose tensors but 0-dim ones have the dtype of their parameter."""
_SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum", "row_var", "col_var",
            "variance"}  # fmt: skip
"""What they keep (torch 2.13) of the squares, or sizes, of gradients and steps."""


class ParameterOptimizer(ABC):
    """One or several torch optimizers that together train a set of named parameters.

    Every parameter group has a unique ``name``, and ``initial_lr`` for the scheduler. Subclasses say when a step is
    done.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> None:
        self.optimizers = list(optimizers)
        self.names = dict(names)
        """Full name of each parameter."""
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._built = {group["name"]: _settings(group) for group in self.param_groups}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers in one list, the dictionaries themselves."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @abstractmethod
    def step(self) -> None:
        """End an optimizer step."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""

    # ----------------------------------------------------------------------------------------------------- taking out

    def state_tensors(self) -> dict[str, Tensor]:
        """All tensor state by ``<parameter>.<key>``, the tensors themselves; empty before the first step.

        Of a sharded parameter those of its shape are DTensors.
        """
        return {f"{name}.{key}": value for name, key, value in self._entries() if isinstance(value, Tensor)}

    def group_state(self) -> dict[str, Any]:
        """Everything that is not a tensor, JSON-able. Raises SetupError naming what cannot be saved."""
        tensors: dict[str, list[str]] = {}
        values: dict[str, dict[str, Any]] = {}
        steps: dict[str, float] = {}
        for name, key, value in self._entries():
            if key == "step" and AMOUNT.holds(step := _number(value)):
                steps[name] = step
            if isinstance(value, Tensor):
                tensors.setdefault(name, []).append(key)
            else:
                values.setdefault(name, {})[key] = plain(value, f"optimizer state of {name}.{key}")
        groups: dict[str, Any] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                built, now = self._built[group["name"]], _settings(group)
                groups[group["name"]] = {
                    "optimizer": type(optimizer).__name__,
                    "parameters": [self.names[p] for p in group["params"]],
                    "settings": built,
                    "changed": {key: value for key, value in now.items() if key not in built or built[key] != value},
                    "lr": plain(group["lr"], f"optimizer group {group['name']}: lr"),
                }
        return {"groups": groups, "tensors": tensors, "values": values, "steps": steps}

    def state_dict(self) -> dict[str, Any]:
        """Both, of what this rank holds."""
        return {"groups": self.group_state(), "tensors": self.state_tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load(state["tensors"], state["groups"])

    def _entries(self) -> Iterator[tuple[str, str, Any]]:
        """(parameter name, state key, value) in the order of the groups."""
        for optimizer in self.optimizers:
            foreign = [key for key in optimizer.state if key not in self.names]
            if foreign:
                raise SetupError(
                    f"optimizer: {type(optimizer).__name__} keeps state that belongs to no parameter of the model "
                    f"({foreign[0]!r:.80}), which cannot be saved; keep it in param_groups or per parameter"
                )
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key, value in optimizer.state.get(parameter, {}).items():
                        yield self.names[parameter], str(key), value

    # ---------------------------------------------------------------------------------------------------- putting back

    def forget_changes(self) -> None:
        """Give every group the settings it was built with; ``lr`` is the scheduler's."""
        for group in self.param_groups:
            for key, value in self._built[group["name"]].items():
                _assign(group, key, value)

    def load(
        self,
        tensors: Mapping[str, Tensor],
        groups: Mapping[str, Any],
        *,
        hyperparameters: Winner = "config",
        all_names: Collection[str] | None = None,
    ) -> list[str]:
        """Restore ``state_tensors()`` and ``group_state()``, also into an optimizer that has not stepped yet.

        Tensors are copied to where the optimizer wants them; dtypes and bits stay. Of a sharded parameter's moments
        they are this rank's rows, as plain tensors or DTensors. ``all_names`` are the parameters trained on all ranks
        together where ``groups`` are merged (default: those trained here). Returns one line for every setting
        that differs between the checkpoint and this optimizer's groups; with ``hyperparameters="config"`` the groups
        keep theirs (lr keeps its place in the schedule: saved lr x new initial_lr / saved initial_lr), with
        ``"checkpoint"`` they take the saved ones. Raises CheckpointError listing every name that does not fit, before
        anything is changed.
        """
        self._check(tensors, groups, set(self.names.values()) if all_names is None else set(all_names))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.names[parameter]
                    keys = groups["tensors"].get(name, ())
                    state = {key: _placed(key, tensors[f"{name}.{key}"], parameter, group) for key in keys}
                    state |= groups["values"].get(name, {})
                    if state:
                        optimizer.state[parameter] = state
                    else:
                        optimizer.state.pop(parameter, None)
        return self._load_groups(groups["groups"], hyperparameters)

    def _check(self, tensors: Mapping[str, Tensor], saved: Mapping[str, Any], trained: set[str]) -> None:
        kinds = {name: group["optimizer"] for group in saved["groups"].values() for name in group["parameters"]}
        own = set(self.names.values())
        listed = {f"{name}.{key}" for name, keys in saved["tensors"].items() if name in own for key in keys}
        problems = [
            *_listing("missing in the checkpoint", sorted(own - kinds.keys())),
            *_listing("not trained by this run's optimizer", sorted(kinds.keys() - trained)),
            *_listing("tensors missing in the checkpoint", sorted(listed - tensors.keys())),
            *_listing("tensors that belong to no parameter", sorted(tensors.keys() - listed)),
        ]
        if not problems:
            problems = list(self._mismatches(tensors, saved, kinds))
        if problems:
            more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
            raise CheckpointError(
                "the optimizer's state does not fit this run; leave optimizer out of resume_components:\n"
                + "\n".join(f"  {line}" for line in [*problems[:5], *more])
            )

    def impossible(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        """Names with why neither torch's optimizers nor ours have made this tensor for a parameter trained here."""
        known = [each for each in self.optimizers if type(each).__module__.startswith(_KNOWN)]
        dtypes = {self.names[p]: p.dtype for each in known for group in each.param_groups for p in group["params"]}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition(".")
            if parameter in dtypes and value.ndim and value.dtype != dtypes[parameter] and key != "step":
                yield name, f"is {value.dtype}, its parameter {dtypes[parameter]}".replace("torch.", "")
            elif parameter in dtypes and key in _SQUARES and value.numel() and value.min() < 0:
                yield name, "holds numbers below 0, which none of squares is"

    def _mismatches(
        self, tensors: Mapping[str, Tensor], saved: Mapping[str, Any], kinds: Mapping[str, str]
    ) -> Iterator[str]:
        changed: dict[tuple[str, str], list[str]] = {}
        for group in self.param_groups:
            for key, value in saved["groups"].get(group["name"], {"changed": {}})["changed"].items():
                if key in _NOT_SETTINGS or not _is_like(group.get(key), value):
                    yield f"group {group['name']}: {key} cannot be {value!r:.80}"
        for optimizer in self.optimizers:
            kind = type(optimizer).__name__
            ours = type(optimizer).__module__.startswith(_KNOWN)
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = self.names[parameter]
                if kinds[name] != kind:
                    changed.setdefault((kinds[name], kind), []).append(name)
                for key in saved["tensors"].get(name, ()) if ours else ():
                    value = local(tensors[f"{name}.{key}"])
                    shape, held = value.shape, local(parameter).shape
                    if key == "step" and not (value.numel() == 1 and value.item() >= 0):
                        yield f"{name}.{key}: it must be a number from 0 on"
                    elif not _fits(shape, held):
                        yield f"{name}.{key}: its shape is {tuple(shape)}, the parameter's {tuple(held)}"
        for (before, now), names in changed.items():
            yield from _listing(f"trained by {before} in the checkpoint, by {now} now", names)

    def _load_groups(self, saved: Mapping[str, Any], winner: Winner) -> list[str]:
        own = set(self.names.values())
        lines = [
            f"group {name} is only in the checkpoint"
            for name, group in saved.items()
            if name not in self._built and not own.isdisjoint(group["parameters"])
        ]
        for group in self.param_groups:
            name, built = group["name"], self._built[group["name"]]
            if name not in saved:
                lines.append(f"group {name} is new")
                continue
            settings, take = saved[name]["settings"], dict(saved[name]["changed"])
            differing = {key: settings[key] for key in built if key in settings and settings[key] != built[key]}
            for key in _IMPLEMENTATION & differing.keys():
                del differing[key]
            for key, before in differing.items():
                what = f"group {name}: {'learning rate' if key == 'initial_lr' else key}"
                if winner == "config":
                    take.pop(key, None)
                    lines.append(f"{what} was {before} in the checkpoint, is {built[key]} now")
                else:
                    take.setdefault(key, before)
                    lines.append(f"{what} is {before}, as in the checkpoint")
            if winner == "checkpoint":
                built.update(differing)
            for key, value in take.items():
                if key not in _IMPLEMENTATION:
                    _assign(group, key, value)
            lr = in_schedule(float(saved[name]["lr"]), settings.get("initial_lr"), float(group["initial_lr"]))
            _assign(group, "lr", lr)
        return lines


def in_schedule(lr: float, before: float | None, now: float) -> float:
    """A saved learning rate, which keeps its place in the schedule where the initial one was ``before``, is ``now``."""
    if before == now:
        return lr
    return lr * now / before if before else now


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    where = f"optimizer group {group['name']}"
    return {key: plain(value, f"{where}: {key}") for key, value in group.items() if key not in _NOT_SETTINGS}


def plain(value: Any, where: str) -> Any:
    """``value`` as JSON holds it, tuples as lists. Raises SetupError naming ``where``."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, where) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item, where) for key, item in value.items()}
    raise SetupError(f"{where} holds a {type(value).__name__}, which cannot be saved; use numbers, strings or lists")


def _is_like(now: Any, value: Any) -> bool:
    """Whether a saved value can take the place of a group's present one."""
    if isinstance(now, list | tuple):
        return isinstance(value, list) and len(value) == len(now) and all(map(_is_like, now, value))
    if isinstance(now, int | float | Tensor):
        return type(value) is bool if isinstance(now, bool) else NUMBER.holds(value)
    return now is None or isinstance(value, type(now))


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a group's entry, keeping its kind: a tensor (capturable optimizers) is filled, a tuple stays a tuple."""
    now = group.get(key)
    if isinstance(now, Tensor):
        now.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(now, tuple) else value


def _placed(key: str, value: Tensor, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
    """A copy on the right device, laid out like the parameter: the rows this rank holds, where it is sharded.

    Step counters live on the CPU unless the optimizer is fused or capturable (torch 2.13, ``optimizer.py``,
    ``_process_value_according_to_param_policy``). Unlike torch's ``load_state_dict`` the dtype is kept, so that fp32
    moments of bf16 parameters survive.
    """
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return value.detach().to(parameter.device if on_device else "cpu", copy=True)
    value = local(value)
    if value.shape == local(parameter).shape:
        placed = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        local(placed).copy_(value.detach())
        return placed
    return value.detach().to(parameter.device, copy=True)


def _fits(shape: torch.Size, parameter: torch.Size) -> bool:
    """Torch's own optimizers keep scalars, tensors of the parameter's shape, and row or column sums of it."""
    return not shape or (
        len(shape) == len(parameter) and all(a in (1, b) for a, b in zip(shape, parameter, strict=True))
    )


def _listing(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"{what}: {', '.join(names[:_LISTED])}{more}"]


_GROUP = {
    "optimizer": TEXT,
    "parameters": list_of(TEXT),
    "settings": object_of(ANYTHING),
    "changed": object_of(ANYTHING),
    "lr": AMOUNT,
}


def check_group_states(state: Any) -> None:
    """Raise FieldError for what ``group_state`` never returns."""
    names = object_of(list_of(TEXT))
    check_fields(
        state, {"groups": object_of(object_of(ANYTHING)), "tensors": names, "values": object_of(object_of(ANYTHING))}
    )
    for name, group in state["groups"].items():
        check_fields(group, _GROUP, f"groups.{name}")
        check_fields(
            {"initial_lr": None, **group["settings"]}, {"initial_lr": optional(AMOUNT)}, f"groups.{name}.settings"
        )
    for name, values in state["values"].items():
        check_fields({"step": 0, **values}, {"step": AMOUNT}, f"values.{name}")
    check_fields({"steps": {}, **state}, {"steps": object_of(AMOUNT)})


def check_steps(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise FieldError where a parameter's count of steps is not what ``group_state`` (from 0.3 on) says of it."""
    for name, step in state.get("steps", {}).items():
        there = tensors.get(f"{name}.step", state["values"].get(name, {}).get("step"))
        if there is not None and (number := _number(there)) != step:  # None: of a parameter on another rank
            raise FieldError(f"{name} was saved at step {step:g}, and its state is at {number!r:.20}")


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def merge_group_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``group_state`` of the whole model from those of ranks that hold parts of it."""
    merged: dict[str, Any] = {"groups": {}, "tensors": {}, "values": {}, "steps": {}}
    for state in states:
        merged["steps"] |= state["steps"]
        merged["tensors"] |= state["tensors"]
        merged["values"] |= state["values"]
        for name, group in state["groups"].items():
            known = merged["groups"].setdefault(name, {**group, "parameters": []})
            known["parameters"] += [p for p in group["parameters"] if p not in set(known["parameters"])]
    return merged

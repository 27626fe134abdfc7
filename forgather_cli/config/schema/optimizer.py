"""Options of the group ``optimizer`` and its parameter groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import field, fields
from typing import Annotated, Any, ClassVar, Literal, get_args

from forgather_cli.config.schema.base import (
    Count,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
    Target,
    by_type,
    settings,
)
from forgather_cli.errors import did_you_mean

DEFAULT_GROUP = "default"
EVERYWHERE = {"lr": 0.0, "lr_scale": 0.0, "weight_decay": 0.0}
"""Settings of a group that every optimizer has, the first two besides its own."""


@settings
class GroupSettings:
    """Parameters whose full name matches ``regex`` (re.search) form a group; the first match wins, and one's own
    groups come before the shipped one, ``no_decay``."""

    regex: str
    # where a saved run has none it goes on without
    vectors: bool = False  # true: and parameters of one dimension, whatever their names
    # lr, lr_scale (times learning_rate), weight_decay, betas, ...
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerOption | None = None  # null: the main one

    def problems_in(self, name: str, main: _Optimizer) -> Iterator[str]:
        """As the group ``name`` of the optimizer ``main``."""
        where, own = f"optimizer.groups.{name}", self.optimizer
        if name == DEFAULT_GROUP:
            yield f"{where}: this name stands for the parameters that no regex matches; choose another"
        yield from regex_problems(where, self.regex)
        if "lr" in self.settings and "lr_scale" in self.settings:
            yield f"{where}.settings: lr and lr_scale exclude each other; leave one out"
        shipped = shipped_groups(getattr(own, "type", None))
        if isinstance(own, _Optimizer) and own.groups not in (shipped, shipped | OF_OLDER_RUNS, OF_OLDER_RUNS):
            yield f"{where}.optimizer.groups: nothing reads it; groups are set in optimizer.groups only"
        option = own or main
        if isinstance(option, Target):
            return
        for key, value in self.settings.items():
            if problem := _value_problem(key, value, option):
                yield f"{where}.settings.{key}: {problem}"
        if isinstance(option, SGDSettings) and (own or {"nesterov", "momentum"} & self.settings.keys()):
            nesterov, momentum = (self.settings.get(key, getattr(option, key)) for key in ("nesterov", "momentum"))
            yield from _nesterov_problems(f"{where}.settings.nesterov", nesterov, momentum)


_EMBEDDING = r"(embed|wte|wpe)\w*\.weight$"
_NO_DECAY = r"(norm|embed|wte|wpe)\w*\.weight$|bias$"
_NO_DECAY_BEFORE = r"(norm|embed|wte|wpe)\w*\.weight$|(^|\.)ln_\w+\.weight$|\.bias$"
OF_OLDER_RUNS = {"no_decay": GroupSettings(regex=_NO_DECAY_BEFORE, settings={"weight_decay": 0.0})}
"""What was shipped before ``vectors``."""


def _no_decay() -> dict[str, GroupSettings]:
    return {"no_decay": GroupSettings(regex=_NO_DECAY, vectors=True, settings={"weight_decay": 0.0})}


def _muon_groups() -> dict[str, GroupSettings]:
    """Embedding and head learn best at rates above that of the matrices, which all follow ``learning_rate``."""
    return {
        "embedding": GroupSettings(regex=_EMBEDDING, settings={"lr_scale": 4.0, "weight_decay": 0.0}),
        "head": GroupSettings(regex=r"(^|\.)lm_head\.weight$", settings={"lr_scale": 3.0}),
        **_no_decay(),
    }


@settings
class _Optimizer(Settings):
    trains_shards: ClassVar[bool] = True
    """It can train parameters of which each rank holds some rows."""
    brings_another: ClassVar[bool] = False
    """Some parameters are trained by an optimizer of another kind."""
    moments: ClassVar[int] = 0
    """Numbers that it keeps for each parameter, at least."""

    type: str = ""
    # name: {regex: of parameter names, settings, optimizer}; first match wins, yours first
    groups: dict[str, GroupSettings] = field(default_factory=_no_decay)

    def group_problems(self) -> Iterator[str]:
        """What can be seen of the groups without parameters."""
        for name, group in self.groups.items():
            yield from group.problems_in(name, self)

    def problems(self, config: Any) -> Iterator[str]:
        yield from self.group_problems()
        if getattr(config.trainer, "shards_parameters", False):
            owns = {f"optimizer.groups.{name}.optimizer": group.optimizer for name, group in self.groups.items()}
            for where, option in {"optimizer": self, **owns}.items():
                if isinstance(option, _Optimizer) and not option.trains_shards:
                    yield (
                        f"{where}: {option.type} cannot train parameters of which each rank holds some rows "
                        f"(trainer={config.trainer.type}); choose adamw, or trainer=ddp"
                    )


Betas = tuple[Probability, Probability]


@settings
class AdamWSettings(_Optimizer):
    """AdamW, fused where PyTorch has it."""

    moments: ClassVar[int] = 2

    type: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.95)  # decay of the first and second moment per step
    eps: PositiveFloat = 1e-8  # added to the root of the second moment
    fused: bool | None = None  # null: where it exists


@settings
class AdafactorSettings(_Optimizer):
    """Adafactor: factored second moments, next to no optimizer memory."""

    trains_shards: ClassVar[bool] = False  # its row and column means would have to be summed; torch 2.13 raises

    type: Literal["adafactor"] = "adafactor"
    beta2_decay: float = -0.8  # exponent of the second moment's decay
    clipping_threshold: PositiveFloat = 1.0  # root mean square an update is clipped to


@settings
class MuonSettings(_Optimizer):
    """Muon for the hidden matrices, AdamW for embeddings, head, norms and biases."""

    brings_another: ClassVar[bool] = True
    moments: ClassVar[int] = 1  # of the matrices

    type: Literal["muon"] = "muon"
    momentum: Probability = 0.95  # of Muon, per step
    momentum_warmup_steps: Count = 200  # of Muon: steps in which the momentum rises from 0.85
    nesterov: bool = True  # of Muon
    cautious_weight_decay: bool = False  # of Muon: decay only weights that the step moves towards zero
    ns_steps: PositiveInt = 5  # Newton-Schulz iterations
    # match_rms_adamw (AdamW's learning rates fit), original
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    betas: Betas = (0.9, 0.95)  # of AdamW: decay of the first and second moment per step
    eps: PositiveFloat = 1e-8  # of AdamW: added to the root of the second moment
    fused: bool | None = None  # of AdamW; null: where it exists
    groups: dict[str, GroupSettings] = field(default_factory=_muon_groups)


@settings
class SGDSettings(_Optimizer):
    """Stochastic gradient descent with optional momentum."""

    type: Literal["sgd"] = "sgd"
    momentum: Probability = 0.0  # per step
    nesterov: bool = False  # needs momentum

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        yield from _nesterov_problems("nesterov", self.nesterov, self.momentum)


OptimizerOption = Annotated[AdamWSettings | AdafactorSettings | MuonSettings | SGDSettings | Target, by_type]


def groups_of(option: OptimizerOption) -> dict[str, GroupSettings]:
    """The option's groups; a ``_target_``, which saves none, gets those that its older runs had."""
    return shipped_groups(None) if isinstance(option, Target) else option.groups


def moments_each(option: OptimizerOption) -> int:
    """Numbers that are kept for each parameter, at least, whatever group it is in."""
    options = [option, *(group.optimizer for group in groups_of(option).values() if group.optimizer is not None)]
    return min(0 if isinstance(each, Target) else each.moments for each in options)


def shipped_groups(kind: object) -> dict[str, GroupSettings]:
    """The groups that an optimizer begins with; ``kind`` is its option's ``type``, None of a ``_target_``."""
    options = [option for option in get_args(get_args(OptimizerOption)[0]) if option is not Target]
    return next((option().groups for option in options if option.type == kind), OF_OLDER_RUNS)


def label(option: OptimizerOption) -> str:
    """The option's name as typed, or the last part of its ``_target_``."""
    return option.path.rpartition(".")[2] if isinstance(option, Target) else option.type


def regex_problems(where: str, regex: str) -> Iterator[str]:
    """What is wrong with the regular expression of a group."""
    try:
        re.compile(regex)
    except re.error as error:
        remedy = "mend it, with a backslash before a sign that means itself"
        yield f"{where}.regex: not a regular expression ({error}), got {regex!r}; {remedy}"


def _nesterov_problems(name: str, nesterov: bool, momentum: float) -> Iterator[str]:
    if nesterov and not momentum:
        yield f"{name}: looks ahead along the momentum, got momentum=0; set momentum=0.9 or nesterov=false"


def _value_problem(key: str, value: Any, option: _Optimizer) -> str | None:
    """What is wrong with a setting of one group, which may be one of its optimizer's."""
    own = {f.name: getattr(option, f.name) for f in fields(option) if f.name not in ("type", "groups", "fused")}
    known = EVERYWHERE | own
    if key not in known:
        return f"{option.type} has no such setting;{did_you_mean(key, known)} it has {', '.join(sorted(known))}"
    if key == "adjust_lr":
        good, wanted = value in ("original", "match_rms_adamw"), "one of original, match_rms_adamw"
    elif isinstance(known[key], bool):
        good, wanted = isinstance(value, bool), "true or false"
    elif isinstance(known[key], tuple):
        good = isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(v) and 0 <= v < 1 for v in value)
        wanted = "two numbers from 0 up to below 1"
    elif key == "momentum_warmup_steps":
        good, wanted = isinstance(value, int) and value >= 0, "a whole number, at least 0"
    elif isinstance(known[key], int):
        good, wanted = isinstance(value, int) and value > 0, "a positive whole number"
    elif key == "beta2_decay":
        good, wanted = _is_number(value) and value <= 0, "a number, at most 0"
    else:
        good, wanted = _is_number(value) and 0 <= value < math.inf, "a number, at least 0"
    return None if good else f"must be {wanted}, got {value!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

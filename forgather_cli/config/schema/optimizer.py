"""Options of the group ``optimizer`` and its parameter groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from forgather_cli.config.schema.base import (
    Count,
    Option,
    PositiveFloat,
    PositiveInt,
    Probability,
    Target,
    by_type,
    options,
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

    def problems_in(self, name: str, main: OptimizerSettings) -> Iterator[str]:
        """As the group ``name`` of the optimizer ``main``."""
        where, own = f"optimizer.groups.{name}", self.optimizer
        if name == DEFAULT_GROUP:
            yield f"{where}: this name stands for the parameters that no regex matches; choose another"
        yield from regex_problems(where, self.regex)
        if "lr" in self.settings and "lr_scale" in self.settings:
            yield f"{where}.settings: lr and lr_scale exclude each other; leave one out"
        shipped = shipped_groups(getattr(own, "type", None))
        if isinstance(own, OptimizerSettings) and own.groups not in (shipped, shipped | OF_OLDER_RUNS, OF_OLDER_RUNS):
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
class OptimizerSettings(Option):
    """An optimizer. Every field has a default; parameter groups may set it otherwise.

    ``maker`` is a ``torch.optim.Optimizer``, or a function that makes one. It is called with param groups, dicts of
    ``params``, ``name``, ``lr``, ``weight_decay`` and ``arguments()``, and with those of the first group by keyword;
    before that with one parameter and each group's, so that what it refuses (ValueError, TypeError) is told. An
    argument ``fused`` that is None becomes True where torch's fused kernels run. Tensors and numbers that it keeps for
    a parameter in ``state`` are saved under the parameter's name and the key there, and resume in any layout.
    """

    trains_shards: ClassVar[bool] = True
    """It can train parameters of which each rank holds some rows (DTensors)."""
    needs_rows: ClassVar[bool] = False
    """Of sharded parameters it trains only those that are sharded by rows along one dimension of the mesh."""
    brings_another: ClassVar[bool] = False
    """Some parameters are trained by an optimizer of another kind: ``for_parameter`` says which."""
    moments: ClassVar[int] = 0
    """Numbers that it keeps for each parameter, at least."""
    counts_steps: ClassVar[bool] = False
    """It keeps a counter for each parameter too, a tensor of four bytes; a Python number is not counted."""

    type: str = ""
    # name: {regex: of parameter names, settings, optimizer}; first match wins, yours first
    groups: dict[str, GroupSettings] = field(default_factory=_no_decay)

    def state_numbers(self, shape: Sequence[int]) -> int:
        """Numbers that it keeps for a parameter of this shape, its counter aside."""
        return self.moments * math.prod(shape)

    def for_parameter(self, name: str, shape: Sequence[int], *, has_vectors: bool) -> OptimizerSettings:
        """What trains this parameter; ``has_vectors``: as some group does, which runs begun before have not."""
        return self

    def group_problems(self) -> Iterator[str]:
        """What can be seen of the groups without parameters."""
        for name, group in self.groups.items():
            yield from group.problems_in(name, self)

    def problems(self, config: Any) -> Iterator[str]:
        yield from self.group_problems()
        if config.trainer.shards_parameters:
            owns = {f"optimizer.groups.{name}.optimizer": group.optimizer for name, group in self.groups.items()}
            for where, option in {"optimizer": self, **owns}.items():
                if isinstance(option, OptimizerSettings) and not option.trains_shards:
                    yield (
                        f"{where}: {option.type} cannot train parameters of which each rank holds some rows "
                        f"(trainer={config.trainer.type}); choose adamw, or trainer=ddp"
                    )


Betas = tuple[Probability, Probability]


@settings
class AdamWSettings(OptimizerSettings):
    """AdamW, fused where PyTorch has it."""

    maker: ClassVar[str] = "torch.optim:AdamW"
    moments: ClassVar[int] = 2
    counts_steps: ClassVar[bool] = True

    type: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.95)  # decay of the first and second moment per step
    eps: PositiveFloat = 1e-8  # added to the root of the second moment
    fused: bool | None = None  # null: where it exists


_ADAFACTOR_EPS = (2.0**-23, 1e-3)
"""Adafactor's defaults for fp32 parameters. For bf16 ones torch 2.13 takes 2^-7, more than most gradients, which it
then does not normalise any more (``torch/optim/_adafactor.py: eps1 = torch.finfo(param.dtype).eps``)."""


@settings
class AdafactorSettings(OptimizerSettings):
    """Adafactor: factored second moments, next to no optimizer memory."""

    maker: ClassVar[str] = "torch.optim:Adafactor"
    counts_steps: ClassVar[bool] = True
    trains_shards: ClassVar[bool] = False  # its row and column means would have to be summed; torch 2.13 raises

    type: Literal["adafactor"] = "adafactor"
    beta2_decay: float = -0.8  # exponent of the second moment's decay
    clipping_threshold: PositiveFloat = 1.0  # root mean square an update is clipped to

    def arguments(self) -> dict[str, Any]:
        return {"beta2_decay": self.beta2_decay, "d": self.clipping_threshold, "eps": _ADAFACTOR_EPS}

    def state_numbers(self, shape: Sequence[int]) -> int:
        numel = math.prod(shape)
        return numel // shape[-1] + numel // shape[-2] if len(shape) >= 2 else numel


_NOT_HIDDEN = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|(lm_)?head|score|classifier)(\.|$)")


@settings
class MuonSettings(OptimizerSettings):
    """Muon for the hidden matrices, AdamW for embeddings, head, norms and biases."""

    maker: ClassVar[str] = "forgather_cli.optim.muon:Muon"
    needs_rows: ClassVar[bool] = True
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

    def arguments(self) -> dict[str, Any]:
        names = ("momentum", "momentum_warmup_steps", "nesterov", "cautious_weight_decay", "ns_steps")
        return {**{name: getattr(self, name) for name in names}, "adjust_lr_fn": self.adjust_lr}

    def for_parameter(self, name: str, shape: Sequence[int], *, has_vectors: bool) -> OptimizerSettings:
        """Muon is for hidden matrices only (https://kellerjordan.github.io/posts/muon/).

        ``has_vectors``: biases, one of each expert, are none; a run begun before goes on with what Muon has of them.
        """
        is_hidden = len(shape) == 2 and not _NOT_HIDDEN.search(name)
        if is_hidden and not (has_vectors and name.endswith("bias")):
            return self
        return AdamWSettings(betas=self.betas, eps=self.eps, fused=self.fused)


@settings
class SGDSettings(OptimizerSettings):
    """Stochastic gradient descent with optional momentum."""

    maker: ClassVar[str] = "torch.optim:SGD"

    type: Literal["sgd"] = "sgd"
    momentum: Probability = 0.0  # per step
    nesterov: bool = False  # needs momentum

    def state_numbers(self, shape: Sequence[int]) -> int:
        return math.prod(shape) if self.momentum else 0

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        yield from _nesterov_problems("nesterov", self.nesterov, self.momentum)


OptimizerOption = Annotated[OptimizerSettings | Target, by_type]


def groups_of(option: OptimizerOption) -> dict[str, GroupSettings]:
    """The option's groups; a ``_target_``, which saves none, gets those that its older runs had."""
    return shipped_groups(None) if isinstance(option, Target) else option.groups


def moments_each(option: OptimizerOption) -> int:
    """Numbers that are kept for each parameter, at least, whatever group it is in."""
    every = [option, *(group.optimizer for group in groups_of(option).values() if group.optimizer is not None)]
    return min(0 if isinstance(each, Target) else each.moments for each in every)


def shipped_groups(kind: object) -> dict[str, GroupSettings]:
    """The groups that an optimizer begins with; ``kind`` is its option's ``type``, None of a ``_target_``."""
    return next((option().groups for option in options(OptimizerSettings) if option.type == kind), OF_OLDER_RUNS)


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


def _value_problem(key: str, value: Any, option: OptimizerSettings) -> str | None:
    """What is wrong with a setting of one group, which may be one of its optimizer's."""
    kind = type(option)
    own = {name: default for name, default in vars(kind()).items() if name not in ("type", "groups", "fused")}
    known = EVERYWHERE | own
    if key not in known:
        return f"{option.type} has no such setting;{did_you_mean(key, known)} it has {', '.join(sorted(known))}"
    if isinstance(known[key], str):
        words = get_args(get_type_hints(kind)[key])
        good, wanted = value in words, f"one of {', '.join(words)}"
    elif isinstance(known[key], bool):
        good, wanted = isinstance(value, bool), "true or false"
    elif isinstance(known[key], tuple):
        numbers, n = value if isinstance(value, (list, tuple)) else (), len(known[key])
        good = len(numbers) == n and all(_is_number(v) and 0 <= v < 1 for v in numbers)
        wanted = f"{'two' if n == 2 else n} numbers from 0 up to below 1"
    elif isinstance(known[key], int) and get_type_hints(kind, include_extras=True)[key] == Count:
        good, wanted = isinstance(value, int) and value >= 0, "a whole number, at least 0"
    elif isinstance(known[key], int):
        good, wanted = isinstance(value, int) and value > 0, "a positive whole number"
    elif _is_number(known[key]) and known[key] < 0:
        good, wanted = _is_number(value) and value <= 0, "a number, at most 0"
    else:
        good, wanted = _is_number(value) and 0 <= value < math.inf, "a number, at least 0"
    return None if good else f"must be {wanted}, got {value!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""Options of the groups ``optimizer``, ``lr_scheduler`` and ``loss``."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Tag

from forgather_cli.config.schema.base import (
    Count,
    Fraction,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Probability,
    TargetOption,
    by_type,
    settings,
)


@settings
class GroupSettings:
    """Parameters whose full name matches ``regex`` (re.search) form a group; the first match wins, and one's own
    groups come before the shipped one, ``no_decay``."""

    regex: str
    settings: dict[str, Any] = field(default_factory=dict)  # param-group settings: lr, weight_decay, betas, ...
    optimizer: OptimizerOption | None = None  # an optimizer of its own; null: the main one


def _no_decay() -> dict[str, GroupSettings]:
    pattern = r"(norm|embed|wte|wpe)\w*\.weight$|(^|\.)ln_\w+\.weight$|\.bias$"
    return {"no_decay": GroupSettings(regex=pattern, settings={"weight_decay": 0.0})}


@settings
class _OptimizerBase:
    groups: dict[str, GroupSettings] = field(default_factory=_no_decay)


Betas = tuple[Probability, Probability]


@settings
class AdamWSettings(_OptimizerBase):
    type: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    fused: bool | None = None  # null: where it exists


@settings
class AdafactorSettings(_OptimizerBase):
    type: Literal["adafactor"] = "adafactor"
    beta2_decay: float = -0.8
    clipping_threshold: PositiveFloat = 1.0


@settings
class MuonSettings(_OptimizerBase):
    """Muon for the hidden matrices, AdamW for the rest (embeddings, head, norms, biases)."""

    type: Literal["muon"] = "muon"
    momentum: Probability = 0.95
    nesterov: bool = True
    ns_steps: PositiveInt = 5
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    betas: Betas = (0.9, 0.95)  # of AdamW
    eps: PositiveFloat = 1e-8  # of AdamW
    fused: bool | None = None  # of AdamW


@settings
class SGDSettings(_OptimizerBase):
    type: Literal["sgd"] = "sgd"
    momentum: Probability = 0.0
    nesterov: bool = False


OptimizerOption = Annotated[
    Annotated[AdamWSettings, Tag("adamw")]
    | Annotated[AdafactorSettings, Tag("adafactor")]
    | Annotated[MuonSettings, Tag("muon")]
    | Annotated[SGDSettings, Tag("sgd")]
    | TargetOption,
    by_type,
]


@settings
class _SchedulerBase:
    warmup_steps: NonNegative = 0  # optimizer steps; below 1: a fraction of all steps


@settings
class CosineSettings(_SchedulerBase):
    type: Literal["cosine"] = "cosine"
    min_lr_ratio: Fraction = 0.1


@settings
class LinearSettings(_SchedulerBase):
    type: Literal["linear"] = "linear"
    min_lr_ratio: Fraction = 0.0


@settings
class ConstantSettings(_SchedulerBase):
    type: Literal["constant"] = "constant"


@settings
class WSDSettings(_SchedulerBase):
    """Warmup, stable, decay."""

    type: Literal["wsd"] = "wsd"
    decay_steps: NonNegative = 0.2  # optimizer steps; below 1: a fraction of all steps
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    min_lr_ratio: Fraction = 0.0


@settings
class InverseSqrtSettings(_SchedulerBase):
    type: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: PositiveInt | None = None  # steps; null: warmup_steps, at least 1


@settings
class InfiniteSettings(_SchedulerBase):
    """Warmup, cosine cooldown to a constant, then an anneal when asked for."""

    type: Literal["infinite"] = "infinite"
    cooldown_steps: Count = 1000
    constant_lr_ratio: Fraction = 0.3
    anneal_start_step: Count | None = None  # null: never
    anneal_steps: PositiveInt = 1000
    min_lr_ratio: Fraction = 0.0


@settings
class TransformersScheduleSettings(_SchedulerBase):
    """A schedule of transformers' ``get_scheduler``, warmup from 0 included: what TrainingArguments select."""

    type: Literal["transformers"] = "transformers"
    name: str = "linear"
    kwargs: dict[str, Any] = field(default_factory=dict)  # lr_scheduler_kwargs
    reference_lr: NonNegative = 1.0  # what min_lr and lr_end are shares of


SchedulerOption = Annotated[
    Annotated[CosineSettings, Tag("cosine")]
    | Annotated[LinearSettings, Tag("linear")]
    | Annotated[ConstantSettings, Tag("constant")]
    | Annotated[WSDSettings, Tag("wsd")]
    | Annotated[InverseSqrtSettings, Tag("inverse_sqrt")]
    | Annotated[InfiniteSettings, Tag("infinite")]
    | Annotated[TransformersScheduleSettings, Tag("transformers")]
    | TargetOption,
    by_type,
]


@settings
class _LossBase:
    z_loss: NonNegative = 0.0
    label_smoothing: Probability = 0.0


@settings
class CrossEntropySettings(_LossBase):
    type: Literal["cross_entropy"] = "cross_entropy"


@settings
class LinearCrossEntropySettings(_LossBase):
    """Head and loss together in chunks, without the tokens x vocabulary logits."""

    type: Literal["linear_cross_entropy"] = "linear_cross_entropy"
    chunk_size: PositiveInt = 256  # tokens


@settings
class LigerSettings(_LossBase):
    """Head and loss together in the kernels of liger-kernel."""

    type: Literal["liger"] = "liger"


@settings
class CutCrossEntropySettings:
    """Head and loss together in the kernels of cut-cross-entropy, which know neither z_loss nor label_smoothing."""

    type: Literal["cut_cross_entropy"] = "cut_cross_entropy"


KernelLoss = LigerSettings | CutCrossEntropySettings
"""Options that are computed by an optional package."""
FusedLoss = LinearCrossEntropySettings | KernelLoss
"""Options that apply the head's weight themselves."""

LossOption = Annotated[
    Annotated[CrossEntropySettings, Tag("cross_entropy")]
    | Annotated[LinearCrossEntropySettings, Tag("linear_cross_entropy")]
    | Annotated[LigerSettings, Tag("liger")]
    | Annotated[CutCrossEntropySettings, Tag("cut_cross_entropy")]
    | TargetOption,
    by_type,
]

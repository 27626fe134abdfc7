"""Options of the group ``trainer``."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Tag

from forgather_cli.config.schema.base import Count, NonNegative, PositiveInt, TargetOption, by_type, settings


class _TrainerBase:
    """Facts of a strategy, for the checks, plans and the strategy itself."""

    min_ranks: ClassVar[int] = 1
    max_ranks: ClassVar[int | None] = None
    supports_fp16: ClassVar[bool] = True
    supports_optimizer_in_backward: ClassVar[bool] = True
    trains_given_parameters: ClassVar[bool] = True
    """The parameters that an optimizer gets are those of the model as it was built."""
    takes_built_model: ClassVar[bool] = True
    """It trains a model that is there already; else it builds its own."""


@settings
class SingleSettings(_TrainerBase):
    """One device, in the process itself."""

    max_ranks: ClassVar[int | None] = 1

    type: Literal["single"] = "single"


@settings
class PostLocalSGD:
    enabled: bool = False
    start_step: Count = 500
    period: PositiveInt = 4
    post_local_gradient_allreduce: bool = False
    subgroup: PositiveInt | None = None


@settings
class DDPSettings(_TrainerBase):
    supports_optimizer_in_backward: ClassVar[bool] = False

    type: Literal["ddp"] = "ddp"
    broadcast_buffers: bool = True
    init_sync: bool = True
    bucket_cap_mb: PositiveInt | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    comm_hook: Literal["none", "bf16_compress", "fp16_compress", "powersgd"] = "none"
    post_local_sgd: PostLocalSGD = field(default_factory=PostLocalSGD)


Schedule = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@settings
class PipelineSettings(_TrainerBase):
    min_ranks: ClassVar[int] = 2
    supports_fp16: ClassVar[bool] = False
    supports_optimizer_in_backward: ClassVar[bool] = False
    trains_given_parameters: ClassVar[bool] = False
    takes_built_model: ClassVar[bool] = False

    type: Literal["pipeline"] = "pipeline"
    n_microbatches: PositiveInt = 4
    schedule: Schedule = "1F1B"
    stages_per_rank: PositiveInt | None = None  # null: from the schedule
    split: Literal["auto"] | list[PositiveInt] = "auto"
    input_weight: NonNegative = 1.0
    output_weight: NonNegative = 1.0

    @property
    def splits_backward(self) -> bool:
        """A zero-bubble schedule: gradients of inputs and of weights are computed at different times."""
        return self.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@settings
class FSDP2Settings(_TrainerBase):
    trains_given_parameters: ClassVar[bool] = False

    type: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None  # null: from precision
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None  # null: from precision
    replicate: PositiveInt = 1
    block_classes: list[str] | None = None  # null: the model's repeated blocks
    accelerate_config: str | None = None


TrainerOption = Annotated[
    Annotated[SingleSettings, Tag("single")]
    | Annotated[DDPSettings, Tag("ddp")]
    | Annotated[PipelineSettings, Tag("pipeline")]
    | Annotated[FSDP2Settings, Tag("fsdp2")]
    | TargetOption,
    by_type,
]

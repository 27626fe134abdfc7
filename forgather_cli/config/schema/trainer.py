"""Options of the group ``trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from forgather_cli.config.schema.base import (
    Count,
    FilePath,
    NonNegative,
    OnlyIf,
    Option,
    PositiveInt,
    Settings,
    Target,
    Void,
    by_type,
    only_if,
    settings,
)
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from forgather_cli.config.own_schedule import OwnSchedule


class TrainerFacts:
    """What config, launch and plan ask of a strategy; the values are those of a user's and of plain data parallel."""

    is_one_process: ClassVar[bool | None] = False
    """It trains in the process itself, without a process group. None: only the user knows."""
    min_ranks: ClassVar[int] = 1
    supports_fp16: ClassVar[bool] = True
    supports_optimizer_in_backward: ClassVar[bool] = True
    compiles_with_loss: ClassVar[bool] = False
    """Model and loss can be compiled as one, as the strategy says too; else the blocks."""
    trains_given_parameters: ClassVar[bool] = True
    """The parameters that an optimizer gets are those of the model as it was built."""
    trains_quantized: ClassVar[bool] = False
    """It trains beside parameters in four bits."""
    takes_built_model: ClassVar[bool] = True
    """It trains a model that is there already; else it builds its own."""
    cuts_layers: ClassVar[bool] = False
    """Each rank holds some of the layers, and ``shard`` of them read different data."""
    # fields of some options: without annotations here, whose order is that of ``config explain``
    shard = n_microbatches = 1
    """Pipelines side by side, each with its own data; equal parts that a micro-batch is cut into."""
    param_dtype = cast(str | None, None)
    """Of the gathered weights, where not ``precision`` says it."""

    @property
    def shards_parameters(self) -> bool:
        """Each rank holds some rows of its parameters."""
        return self.shard > 1

    @property
    def splits_backward(self) -> bool:
        """Gradients of inputs and of weights are computed at different times."""
        return False


class TrainerSettings(TrainerFacts, Option):
    """An option of ``trainer``: a strategy, and the facts about it that config, launch and plan read.

    ``maker(option, device, loss, precision)`` returns its ``strategies.base.Strategy``; every rank calls it, and the
    default process group is there unless ``is_one_process``.
    """

    def problems(self, config: Any) -> Iterator[str]:
        if config.precision.scales_loss and not self.supports_fp16:
            yield (
                f"precision: {config.precision.type} scales the loss, which trainer={self.type} does not; set "
                "precision=bf16, or trainer=ddp or fsdp2"
            )
        if config.torch_compile_scope == "model" and (config.fuse_optim_with_backward or not self.compiles_with_loss):
            # one backward of the whole frees no gradient early
            what = "fuse_optim_with_backward=true" if self.compiles_with_loss else f"trainer={self.type}"
            yield f"torch_compile_scope: {what} compiles block by block, got model; set torch_compile_scope=blocks"
        if config.fuse_optim_with_backward and not self.supports_optimizer_in_backward:
            yield (
                f"fuse_optim_with_backward: not possible with trainer={self.type}; choose trainer=single or "
                "trainer=fsdp2"
            )


@dataclass(frozen=True)
class TrainerTarget(Target, TrainerFacts):
    """A strategy of the user's, which states on itself what it supports."""

    is_one_process: ClassVar[bool | None] = None


_ONE_PROCESS = Void("trainer", "choose trainer=ddp, fsdp2 or pipeline")
NEEDS_RANKS = OnlyIf(lambda config, *_: _ONE_PROCESS if config.trainer.is_one_process else None)


@settings
class SingleSettings(TrainerSettings):
    """One device, in the process itself."""

    maker: ClassVar[str] = "forgather_cli.strategies.single:SingleDevice.from_settings"
    is_one_process: ClassVar[bool | None] = True
    compiles_with_loss: ClassVar[bool] = True
    trains_quantized: ClassVar[bool] = True

    type: Literal["single"] = "single"


_AVERAGES = only_if(".enabled", True, remedy="set post_local_sgd.enabled=true")


@settings
class PostLocalSGD(Settings):
    enabled: bool = False  # each rank trains alone between two averages
    start_step: Annotated[Count, _AVERAGES] = 500  # steps with ordinary all-reduce first
    period: Annotated[PositiveInt, _AVERAGES] = 4  # steps between two averages of the weights
    # after start_step the ranks of one host go on averaging gradients
    post_local_gradient_allreduce: Annotated[bool, _AVERAGES] = False
    # so many neighbouring ranks do; null: those of one host, or none (the line above)
    subgroup: Annotated[PositiveInt | None, _AVERAGES] = None

    def problems(self, config: Any) -> Iterator[str]:
        if not self.enabled:
            return
        if (hook := config.trainer.comm_hook) != "none":
            yield (
                f"post_local_sgd.enabled: excludes comm_hook={hook}, both replace the all-reduce; set comm_hook=none "
                "or post_local_sgd.enabled=false"
            )
        ranks = config.known_world
        if ranks is not None and self.subgroup is not None and ranks % self.subgroup:
            yield (
                f"post_local_sgd.subgroup: {ranks} ranks cannot be divided into groups of {self.subgroup}; "
                f"set it to a divisor of {ranks}"
            )
        if config.precision.scales_loss:
            yield (
                "post_local_sgd.enabled: ranks that train by themselves would leave out different steps under "
                f"precision={config.precision.type}; set precision=bf16 or post_local_sgd.enabled=false"
            )


@settings
class DDPSettings(TrainerSettings):
    """Data parallel: every rank holds the whole model and reads its slice of each batch."""

    maker: ClassVar[str] = "forgather_cli.strategies.ddp:DataParallel.from_settings"
    supports_optimizer_in_backward: ClassVar[bool] = False
    compiles_with_loss: ClassVar[bool] = True
    trains_quantized: ClassVar[bool] = True

    type: Literal["ddp"] = "ddp"
    broadcast_buffers: bool = True  # send rank 0's buffers before each forward, if the model's state has any
    init_sync: bool = True  # send rank 0's parameters at the start
    bucket_cap_mb: PositiveInt | None = None  # MiB of gradients per all-reduce; null: PyTorch's 25
    find_unused_parameters: bool = False  # for models that leave parameters without a gradient in some steps
    gradient_as_bucket_view: bool = True  # gradients live in the buckets: saves one copy of them
    static_graph: bool = False  # the same graph in every step
    # do not send what no rank ever uses; needs find_unused_parameters
    skip_all_reduce_unused_params: Annotated[bool, only_if(".find_unused_parameters", True)] = False
    # none, bf16_compress, fp16_compress, powersgd; not together with post_local_sgd
    comm_hook: Literal["none", "bf16_compress", "fp16_compress", "powersgd"] = "none"
    post_local_sgd: PostLocalSGD = field(default_factory=PostLocalSGD)

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        precision = config.precision
        if precision.scales_loss and self.comm_hook == "powersgd":
            yield (
                f"comm_hook: an overflow of precision={precision.type} would stay in powersgd's error feedback; set "
                "precision=bf16 or comm_hook=none"
            )
        if precision.parameters == "bf16" and self.comm_hook == "fp16_compress":
            yield (
                f"comm_hook: fp16_compress makes gradients of precision={precision.type} no smaller and loses the "
                "small ones; set comm_hook=none"
            )


Schedule = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


@settings
class PipelineSettings(TrainerSettings):
    """Pipeline parallel: every rank holds some of the layers."""

    maker: ClassVar[str] = "forgather_cli.strategies.pipeline:Pipeline"
    min_ranks: ClassVar[int] = 2
    cuts_layers: ClassVar[bool] = True
    supports_fp16: ClassVar[bool] = False
    supports_optimizer_in_backward: ClassVar[bool] = False
    trains_given_parameters: ClassVar[bool] = False
    takes_built_model: ClassVar[bool] = False

    type: Literal["pipeline"] = "pipeline"
    n_microbatches: PositiveInt = 4  # parts the batch is cut into on its way through the stages, per schedule step
    # 1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV; or a class of yours by
    # _target_
    schedule: Schedule | Annotated[Target, by_type] = "1F1B"
    # null: what the schedule needs (1, or 2 for the interleaved and V schedules)
    stages_per_rank: PositiveInt | None = None
    split: Literal["auto"] | list[PositiveInt] = "auto"  # auto, or a list of layers per stage
    # how many layers the embedding counts as, for split=auto
    input_weight: Annotated[NonNegative, only_if(".split", "auto")] = 1.0
    # how many layers the head counts as, for split=auto
    output_weight: Annotated[NonNegative, only_if(".split", "auto")] = 1.0
    # a function of yours by _target_ that makes the stages; null: the model's cut(), or ours for transformers' decoders
    model_splitter: Annotated[Target, by_type] | None = None
    shard: PositiveInt = 1  # ranks over which FSDP2 shards each stage, with their own data; no zero-bubble schedules

    @property
    def splitter(self) -> Callable[..., Any] | None:
        """``model_splitter``, imported; called with the model and its stages. Raises ConfigError."""
        return None if self.model_splitter is None else self.model_splitter.bound("model_splitter")

    @property
    def own_schedule(self) -> OwnSchedule | None:
        """The class that ``schedule`` names by ``_target_``, imported. Raises ConfigError."""
        from forgather_cli.config.own_schedule import OwnSchedule

        return OwnSchedule(self.schedule.path, self.schedule.kwargs) if isinstance(self.schedule, Target) else None

    @property
    def splits_backward(self) -> bool:
        """A zero-bubble schedule: gradients of inputs and of weights are computed at different times."""
        if (own := self.own_schedule) is not None:
            return own.splits_backward(self.stages_each, self.n_microbatches)
        return self.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

    @property
    def is_v_shaped(self) -> bool:
        """Stages go through the ranks and back: each rank has two, and the first one has the first and the last."""
        return self.schedule in ("ZBVZeroBubble", "DualPipeV")

    @property
    def has_one_stage(self) -> bool:
        """Each rank has one stage; the other schedules interleave several."""
        if (own := self.own_schedule) is not None:
            return own.has_one_stage
        return self.schedule in ("1F1B", "GPipe")

    @property
    def stages_each(self) -> int:
        """Stages on each rank: as set, else one, or two for interleaved and V schedules."""
        return self.stages_per_rank or (1 if self.has_one_stage else 2)

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        try:
            own = self.own_schedule
        except ConfigError as error:
            yield from error.problems
            return
        found = []
        if config.torch_compile is True and self.splits_backward:
            found.append(
                f"torch_compile: compiled blocks get wrong gradients from schedule={self.schedule}, which splits the "
                "backward; set torch_compile=false or schedule=1F1B"
            )
        if self.shard > 1 and self.splits_backward:
            # it assigns gradients of weights by autograd.grad, where hooks that sum them over ranks never run
            found.append(
                f"shard: stages whose ranks share their parameters get wrong gradients from schedule={self.schedule}, "
                f"which splits the backward, got {self.shard}; set shard=1 or schedule=Interleaved1F1B"
            )
        wanted, has = self.stages_per_rank, f"stages_per_rank: schedule={self.schedule}"
        if wanted is not None and wanted != 1 and self.has_one_stage:
            remedy = "leave stages_per_rank out or set schedule=Interleaved1F1B"
            found.append(f"{has} runs one stage per rank, got {wanted}; {remedy}")
        elif wanted is not None and wanted != 2 and self.is_v_shaped:
            found.append(f"{has} runs exactly two stages per rank, got {wanted}; leave stages_per_rank out")
        elif wanted == 1 and not self.has_one_stage and own is None:
            remedy = "set stages_per_rank=2 or more, or schedule=1F1B"
            found.append(f"{has} interleaves several stages per rank, got 1; {remedy}")
        yield from found
        if config.known_world is not None and not found:
            yield from self.layout_problems(getattr(config.model, "num_hidden_layers", None), config.known_world)

    def layout_problems(self, num_layers: int | None, world: int) -> Iterator[str]:
        """What the schedule cannot do with ``world`` ranks, and ``num_layers`` where they are known.

        Limits of torch.distributed.pipelining's schedules, torch 2.13.
        """
        shard = self.shard
        if world < 2 * shard:
            least = (
                f"pipeline with shard={shard} needs at least {2 * shard}" if shard > 1 else "pipeline needs at least 2"
            )
            got = f"got {world} (nproc_per_node x nnodes)"
            yield f"trainer: {least} ranks, {got}; choose trainer={'single' if world == 1 else 'fsdp2'}"
            return
        if world % shard:
            yield (
                f"shard: {world} ranks cannot be divided into groups of {shard} that share a stage's parameters; "
                f"set it to a divisor of {world}"
            )
            return
        world //= shard  # ranks of each pipeline
        number, parts, schedule = world * self.stages_each, self.n_microbatches, self.schedule
        if (own := self.own_schedule) is not None:
            try:
                own.order(world, self.stages_each, parts)
            except ConfigError as error:
                yield from error.problems
        if schedule in ("1F1B", "DualPipeV") and parts < number:
            yield (
                f"n_microbatches: schedule={schedule} with {number} stages needs at least as many, got {parts}; "
                f"set n_microbatches={number}"
            )
        rounds = max(1, parts // world)
        if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and parts % rounds:
            yield (
                f"n_microbatches: schedule={schedule} on {world} ranks needs a multiple of {rounds}, got {parts}; "
                f"set n_microbatches={parts // world * world}"
            )
        if self.split != "auto" and len(self.split) != number:
            named = f"names {len(self.split)} stages, schedule and ranks make {number}"
            yield f"split: {named}; name {number} or set split=auto"
        elif self.split != "auto" and num_layers not in (None, sum(self.split)):
            total = f"adds up to {sum(self.split)} layers, got num_hidden_layers={num_layers}"
            yield f"split: {total}; mend it or set split=auto"
        elif self.split == "auto" and num_layers is not None and number > num_layers:
            remedies = [f"set num_hidden_layers={number}"]
            if self.stages_per_rank is None and self.stages_each > 1 and world <= num_layers:
                remedies.append("choose schedule=1F1B")
            ranks = num_layers // self.stages_each
            few = "choose trainer=single" if shard == 1 else "choose trainer=fsdp2"
            remedies.append(f"take {ranks * shard} ranks (nproc_per_node)" if ranks > 1 else few)
            yield (
                f"trainer: {number} pipeline stages are more than num_hidden_layers={num_layers} (schedule={schedule}, "
                f"{self.stages_each} on each of {world} ranks); {', or '.join(remedies)}"
            )


@settings
class FSDP2Settings(TrainerSettings):
    """Fully sharded data parallel: every rank holds a slice of every parameter."""

    maker: ClassVar[str] = "forgather_cli.strategies.fsdp2:FullyShard"
    trains_given_parameters: ClassVar[bool] = False

    type: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = True  # free the gathered weights after the forward: less memory, one more gather
    cpu_offload: bool = False  # keep the shards in host memory
    # fp32, bf16, fp16 of the gathered weights; null: from precision
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    # fp32, bf16, fp16 of the gradient reduction; null: from precision
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    replicate: PositiveInt = 1  # copies of the sharded model (HSDP); must divide the number of ranks
    # class names of the modules that are gathered one at a time; null: the repeated blocks
    block_classes: list[str] | None = None
    # file of Accelerate (FSDP2, DeepSpeed) or DeepSpeed's JSON; the command line outranks it
    accelerate_config: FilePath | None = None

    @property
    def shards_parameters(self) -> bool:
        return True

    def problems(self, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if (ranks := config.known_world) is not None and ranks % self.replicate:
            yield (
                f"replicate: {ranks} ranks cannot be divided into {self.replicate} copies of the model; "
                f"set it to a divisor of {ranks}"
            )
        chosen, other = self.param_dtype, config.precision
        fitting = other.autocast or other.parameters or ("fp32" if other.maker else None)
        if chosen == "fp16" and fitting != "fp16":
            yield "param_dtype: fp16 needs the loss scaling of precision=fp16; set that, and leave param_dtype out"
        elif chosen is not None and fitting is not None and chosen != fitting:
            yield f"param_dtype: {chosen} contradicts precision={other.type}; set precision={chosen} or leave it out"
        if self.block_classes == []:
            yield "block_classes: names no class, got []; set block_classes=null for the model's repeated blocks"


TrainerOption = Annotated[TrainerSettings | TrainerTarget, by_type]

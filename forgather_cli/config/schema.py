"""The typed settings of a run: run-level settings, and one dataclass per shipped option of each config group.

Plain frozen dataclasses; nothing of ours and no torch is imported. ``config/load.py`` decodes composed YAML into
``Config`` with pydantic, strictly: unknown keys and wrong types are errors. Names are those of Hugging Face
``TrainingArguments`` and ``LlamaConfig`` wherever one exists.

Every group option carries ``type``, which tells its class. An option with ``_target_`` becomes a ``Target``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ConfigDict, Discriminator, Tag
from typing_extensions import dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[_T]) -> type[_T]:
    """A frozen keyword-only dataclass that pydantic decodes without accepting unknown keys."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


def _no(value: Any) -> Any:
    """YAML 1.1 reads a bare ``no`` as false; Hugging Face users write it."""
    return "no" if value is False else value


PositiveInt = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Probability = Annotated[float, Ge(0), Lt(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Interval = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_no)]


@dataclass(frozen=True)
class Target:
    """A class or function of the user's (``_target_``) with its keyword arguments, bound to the signature at load."""

    path: str
    kwargs: dict[str, Any] = field(default_factory=dict)


def _to_target(value: Any) -> Any:
    if isinstance(value, dict) and "_target_" in value:
        return {"path": value["_target_"], "kwargs": {k: v for k, v in value.items() if k != "_target_"}}
    return value


def _option(value: Any) -> Any:
    """Discriminator of the group unions: ``_target_`` or the option's ``type``."""
    if isinstance(value, dict):
        return "_target_" if "_target_" in value else value.get("type")
    return "_target_" if isinstance(value, Target) else getattr(value, "type", None)


TargetOption = Annotated[Target, BeforeValidator(_to_target), Tag("_target_")]
_by_type = Discriminator(_option)

# ----------------------------------------------------------------------------------------------------------- model


@settings
class RopeScaling:
    """Hugging Face's rope parameters; which ones are read depends on ``rope_type``."""

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: PositiveFloat = 1.0
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@settings
class DecoderSettings:
    """The own decoder: Llama, Mistral, Qwen2 and Qwen3 shapes."""

    type: Literal["decoder"] = "decoder"
    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt | None = None  # null: 8/3 hidden_size, rounded up to a multiple of 32
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt | None = None  # null: num_attention_heads
    head_dim: PositiveInt | None = None  # null: hidden_size / num_attention_heads
    vocab_size: PositiveInt | None = None  # null: the tokenizer's
    max_position_embeddings: PositiveInt | None = None  # null: data.seq_len
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: PositiveInt | None = None
    attention_bias: bool = False  # q, k, v
    attention_output_bias: bool | None = None  # o; null: as attention_bias
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    attention_dropout: Probability = 0.0
    residual_dropout: Probability = 0.0
    initializer_range: PositiveFloat = 0.02


@settings
class PretrainedSettings:
    """A Hugging Face directory of the decoder's families."""

    type: Literal["pretrained"] = "pretrained"
    path: str


ModelOption = Annotated[
    Annotated[DecoderSettings, Tag("decoder")] | Annotated[PretrainedSettings, Tag("pretrained")] | TargetOption,
    _by_type,
]

# ------------------------------------------------------------------------------------------------------------ data


@settings
class _DataBase:
    tokenizer: str = "bytes"  # bytes, bpe, or a directory with tokenizer.json
    bpe_vocab_size: Annotated[int, Ge(258)] = 4096
    seq_len: Annotated[int, Ge(2)] = 256  # tokens
    packing: Literal["concat", "best_fit", "pad"] = "concat"
    isolate_documents: bool = False
    cache_dir: str | None = None  # null: $XDG_CACHE_HOME/forgather or ~/.cache/forgather


@settings
class PythonStdlibSettings(_DataBase):
    """Sources of the running interpreter's standard library."""

    type: Literal["python_stdlib"] = "python_stdlib"
    eval_fraction: Fraction = 0.05  # of the files


@settings
class TextSettings(_DataBase):
    """Local text: txt, md, jsonl, parquet."""

    type: Literal["text"] = "text"
    files: list[str]
    eval_files: list[str] = field(default_factory=list)  # empty: eval_fraction of the documents
    text_key: str = "text"
    eval_fraction: Fraction = 0.05  # of the documents


@settings
class TokensSettings(_DataBase):
    """Pre-tokenized memory maps."""

    type: Literal["tokens"] = "tokens"
    files: list[str]
    eval_files: list[str] = field(default_factory=list)
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"  # of .bin files; .npy say their own
    document_separator: int | None = None  # token id that ends a document
    eval_fraction: Fraction = 0.05  # of the tokens, from the end


@settings
class SyntheticSettings(_DataBase):
    """Random tokens made on the fly, for benchmarks and tests."""

    type: Literal["synthetic"] = "synthetic"
    num_samples: PositiveInt = 100_000
    num_eval_samples: Count = 64
    ragged: bool = False  # sequences of random length, padded, padding without targets


DataOption = Annotated[
    Annotated[PythonStdlibSettings, Tag("python_stdlib")]
    | Annotated[TextSettings, Tag("text")]
    | Annotated[TokensSettings, Tag("tokens")]
    | Annotated[SyntheticSettings, Tag("synthetic")]
    | TargetOption,
    _by_type,
]

# --------------------------------------------------------------------------------------------------------- trainer


@settings
class SingleSettings:
    """One device, in the process itself."""

    type: Literal["single"] = "single"


@settings
class PostLocalSGD:
    enabled: bool = False
    start_step: Count = 500
    period: PositiveInt = 4
    post_local_gradient_allreduce: bool = False
    subgroup: PositiveInt | None = None


@settings
class DDPSettings:
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
class PipelineSettings:
    type: Literal["pipeline"] = "pipeline"
    n_microbatches: PositiveInt = 4
    schedule: Schedule = "1F1B"
    stages_per_rank: PositiveInt | None = None  # null: from the schedule
    split: Literal["auto"] | list[PositiveInt] = "auto"
    input_weight: NonNegative = 1.0
    output_weight: NonNegative = 1.0


@settings
class FSDP2Settings:
    type: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None  # null: from precision
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None  # null: from precision
    replicate: PositiveInt = 1
    accelerate_config: str | None = None


TrainerOption = Annotated[
    Annotated[SingleSettings, Tag("single")]
    | Annotated[DDPSettings, Tag("ddp")]
    | Annotated[PipelineSettings, Tag("pipeline")]
    | Annotated[FSDP2Settings, Tag("fsdp2")]
    | TargetOption,
    _by_type,
]

# ----------------------------------------------------------------------------- optimizer, lr_scheduler, loss, precision


@settings
class GroupSettings:
    """Parameters whose full name matches ``regex`` (re.search) form a group; the first match wins."""

    regex: str
    settings: dict[str, Any] = field(default_factory=dict)  # param-group settings: lr, weight_decay, betas, ...
    optimizer: OptimizerOption | None = None  # an optimizer of its own; null: the main one


def _no_decay() -> dict[str, GroupSettings]:
    pattern = r"(norm|embed_tokens)\w*\.weight$|\.bias$|(^|\.)norm\.weight$"
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
    _by_type,
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


SchedulerOption = Annotated[
    Annotated[CosineSettings, Tag("cosine")]
    | Annotated[LinearSettings, Tag("linear")]
    | Annotated[ConstantSettings, Tag("constant")]
    | Annotated[WSDSettings, Tag("wsd")]
    | Annotated[InverseSqrtSettings, Tag("inverse_sqrt")]
    | Annotated[InfiniteSettings, Tag("infinite")]
    | TargetOption,
    _by_type,
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


LossOption = Annotated[
    Annotated[CrossEntropySettings, Tag("cross_entropy")]
    | Annotated[LinearCrossEntropySettings, Tag("linear_cross_entropy")]
    | TargetOption,
    _by_type,
]


@settings
class FP32Settings:
    type: Literal["fp32"] = "fp32"


@settings
class BF16Settings:
    """bf16 autocast; parameters, moments and loss stay fp32."""

    type: Literal["bf16"] = "bf16"


PrecisionOption = Annotated[Annotated[FP32Settings, Tag("fp32")] | Annotated[BF16Settings, Tag("bf16")], _by_type]

# ------------------------------------------------------------------------------------------------------- callbacks


@settings
class MetricsSettings:
    peak_hardware_flops: PositiveFloat | None = None  # FLOP/s per device; null: from the table


@settings
class ProgressSettings:
    header_interval: PositiveInt = 20  # rows
    step_columns: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    final_metrics: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    output_stream: Literal["stdout", "stderr"] = "stdout"


@settings
class InfoSettings:
    verbose: bool = False


@settings
class JsonSettings:
    pass


@settings
class TensorboardSettings:
    scalars: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # tag: {source, transform}; null removes


@settings
class TextgenSettings:
    prompts: list[str] | str = field(default_factory=list)  # texts, or a YAML file that holds a list
    do_sample: bool = True
    top_k: Count = 20
    temperature: PositiveFloat = 0.7
    repetition_penalty: PositiveFloat = 1.15
    max_new_tokens: PositiveInt = 200
    generation_steps: PositiveInt | None = None  # null: at each evaluation


@settings
class EarlyStoppingSettings:
    patience: PositiveInt = 3  # evaluations
    threshold: NonNegative = 0.0
    metric: str = "eval_loss"


@settings
class CallbackSettings:
    """The active callbacks by config name; None is inactive. ``custom`` holds the user's ``_target_`` entries."""

    metrics: MetricsSettings | None = None
    info: InfoSettings | None = None
    progress: ProgressSettings | None = None
    json: JsonSettings | None = None
    tensorboard: TensorboardSettings | None = None
    textgen: TextgenSettings | None = None
    early_stopping: EarlyStoppingSettings | None = None
    custom: dict[str, TargetOption] = field(default_factory=dict)


def _split_custom(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    custom = {k: v for k, v in value.items() if isinstance(v, dict) and "_target_" in v}
    return {**{k: v for k, v in value.items() if k not in custom}, "custom": custom} if custom else value


# -------------------------------------------------------------------------------------------------------- run level


@settings
class RunSettings:
    """Run-level settings. Steps are optimizer steps, batch sizes are sequences, times are seconds."""

    output_dir: str | None = None  # null: outputs/<recipe>/<date>_<time>
    logging_dir: str | None = None  # null: output_dir
    overwrite_output_dir: bool = False

    max_steps: Annotated[int, Ge(-1)] = -1
    num_train_epochs: float = 1.0  # -1: data that ends by itself
    epoch_train_steps: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None
    per_device_train_batch_size: PositiveInt = 8
    per_device_eval_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt | None = None  # null: 1, or what global_batch_size asks for

    learning_rate: NonNegative = 1e-3
    weight_decay: NonNegative = 0.1
    max_grad_norm: NonNegative | None = 1.0

    logging_strategy: Interval = "steps"
    logging_steps: PositiveInt = 10
    logging_first_step: bool = True
    eval_strategy: Interval = "steps"
    eval_steps: PositiveInt = 100
    eval_delay: NonNegative = 0
    eval_on_start: bool = False
    eval_on_save: bool = False
    max_eval_samples: PositiveInt | None = None
    max_eval_steps: Annotated[int, Ge(-1)] = -1

    save_strategy: Interval = "steps"
    save_steps: PositiveInt = 500
    save_total_limit: PositiveInt | None = 3  # null: keep all
    async_save: bool = True
    save_timeout: PositiveFloat = 600.0
    verify_checkpoint: Literal["full", "size", "none"] = "full"
    replication_check: Literal["none", "quick", "tensor", "full"] = "tensor"
    load_best_model_at_end: bool = False
    metric_for_best_model: str = "eval_loss"
    greater_is_better: bool = False
    preserve_n_best: Count = 1

    resume_from_checkpoint: bool | str = False
    resume_components: (
        Literal["all"] | list[Literal["model", "optimizer", "scheduler", "trainer", "data", "rng", "callbacks"]]
    ) = "all"
    ignore_data_skip: bool = False

    dataloader_num_workers: Count = 0
    dataloader_prefetch_factor: PositiveInt | None = None
    dataloader_pin_memory: bool | None = None  # null: on CUDA
    dataloader_persistent_workers: bool = False
    dataloader_drop_last: bool = True
    set_dataset_epoch: bool = True

    seed: Annotated[int, Ge(-1)] = 42
    deterministic: bool = False
    device: str = "auto"

    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    torch_compile_dynamic: bool | None = None
    torch_compile_fullgraph: bool = False
    activation_memory_budget: Fraction | None = None
    gradient_checkpointing: bool = False
    fuse_optim_with_backward: bool = False
    construct_model_on: Literal["meta", "device", "cpu"] = "meta"

    gc_steps: PositiveInt = 1000
    gc_threshold: Fraction | None = None
    speed_metrics_start_step: Count = 1
    hang_timeout: PositiveFloat = 1800.0

    nproc_per_node: PositiveInt | Literal["auto"] = "auto"
    nnodes: PositiveInt = 1
    node_rank: Count = 0
    rdzv_endpoint: str | None = None
    rdzv_backend: str = "c10d"
    rdzv_id: str | None = None
    max_restarts: Count = 0


@settings
class Config(RunSettings):
    """A whole run: run-level settings and one option of each group."""

    GROUPS: ClassVar[tuple[str, ...]] = (
        "model", "data", "trainer", "optimizer", "lr_scheduler", "loss", "precision", "callbacks",
    )  # fmt: skip

    recipe: str = "default"
    model: ModelOption
    data: DataOption
    trainer: TrainerOption
    optimizer: OptimizerOption
    lr_scheduler: SchedulerOption
    loss: LossOption
    precision: PrecisionOption
    callbacks: Annotated[CallbackSettings, BeforeValidator(_split_custom)]


Factory = Callable[..., Any]

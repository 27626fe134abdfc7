"""Run-level settings, and a whole run."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from forgather_cli.config.schema.base import (
    Count,
    Fraction,
    Interval,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    settings,
)
from forgather_cli.config.schema.callbacks import CallbackOption
from forgather_cli.config.schema.data import DataOption
from forgather_cli.config.schema.hugging_face import HuggingFaceArguments
from forgather_cli.config.schema.model import ModelOption
from forgather_cli.config.schema.optimization import LossOption, OptimizerOption, SchedulerOption
from forgather_cli.config.schema.precision import PrecisionOption
from forgather_cli.config.schema.trainer import TrainerOption


@settings
class RunSettings(HuggingFaceArguments):
    """Run-level settings. Steps are optimizer steps, batch sizes are sequences, times are seconds."""

    output_dir: str | None = None  # null: outputs/<recipe>/<date>_<time>
    logging_dir: str | None = None  # null: output_dir
    overwrite_output_dir: bool = False
    job_id: str | None = None  # null: job_<time>_<host>_<pid>

    max_steps: Annotated[int, Ge(-1)] = -1
    num_train_epochs: float = 1.0  # -1: data that ends by itself
    epoch_train_steps: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None
    per_device_train_batch_size: PositiveInt = 8
    per_device_eval_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt | None = None  # null: 1, or what global_batch_size asks for
    auto_find_batch_size: bool = False

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
    max_eval_steps: Literal[-1] | PositiveInt = -1

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
    hang_report_after: PositiveFloat = 30.0
    hang_timeout: PositiveFloat = 1800.0

    nproc_per_node: PositiveInt | Literal["auto"] = "auto"
    nnodes: PositiveInt = 1
    node_rank: Count = 0
    rdzv_endpoint: str | None = None
    rdzv_backend: str | None = None
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
    callbacks: CallbackOption

    @property
    def dispatch_batches(self) -> bool | None:
        """``data.dispatch_batches``."""
        return self.data.dispatch_batches

    @property
    def dispatch_eval_batches(self) -> bool | None:
        """``data.dispatch_eval_batches``."""
        return self.data.dispatch_eval_batches

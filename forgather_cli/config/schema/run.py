"""Run-level settings, and a whole run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from pydantic import BeforeValidator

from forgather_cli.config.batch import batch_plan
from forgather_cli.config.schema.adapter import AdapterOption, NoAdapter
from forgather_cli.config.schema.base import (
    NEEDS_EVALUATION,
    Count,
    FilePath,
    Fraction,
    Interval,
    NonNegative,
    OnlyIf,
    PositiveFloat,
    PositiveInt,
    SaveInterval,
    Settings,
    Steps,
    Target,
    Void,
    asks_for_evaluation,
    only_if,
    only_where,
    settings,
    typed,
    value_at,
)
from forgather_cli.config.schema.callbacks import CallbackOption
from forgather_cli.config.schema.data import DataOption
from forgather_cli.config.schema.loss import LossOption, LossSettings
from forgather_cli.config.schema.model import ModelOption
from forgather_cli.config.schema.optimizer import OptimizerOption
from forgather_cli.config.schema.precision import PrecisionOption
from forgather_cli.config.schema.scheduler import SchedulerOption
from forgather_cli.config.schema.trainer import NEEDS_RANKS, TrainerOption
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import is_name

_IN_STAGES = OnlyIf(lambda config, *_: None if config.trainer.cuts_layers else Void("trainer", "set trainer=pipeline"))
_WORKERS = only_where("dataloader_num_workers", bool, "set dataloader_num_workers above 0")
_COMPILED = only_if("torch_compile", True, "auto", remedy="set torch_compile=true")
_EVALUATES = only_if("eval_strategy", "steps", "epoch", remedy="set eval_strategy=steps")
_SAVES = only_if("save_strategy", "steps", "epoch", "best", remedy="set save_strategy=steps")
_DATASET = BeforeValidator(lambda x: ["data" if n == "dataset" else n for n in x] if isinstance(x, list) else x)
_ON_RESUME = only_where("resume_from_checkpoint", lambda resume: resume is not False, "set resume_from_checkpoint=true")


_SERVED = OnlyIf(  # the server of commands names the job by it
    lambda config, _: None if config.callbacks.control else Void("callbacks.control", "add '+callbacks.control={}'")
)
_NEW_RUN = OnlyIf(  # one that is gone on with is not overwritten; overwrite_output_dir=false says just that
    lambda config, _: (
        Void("resume_from_checkpoint", "set resume_from_checkpoint=false")
        if config.overwrite_output_dir and config.resume_from_checkpoint is True
        else None
    )
)


EVALUATED = ("loss", "perplexity", "bits_per_byte", "tokens", "targets", "runtime", "samples_per_second")
"""What an evaluation measures, behind its prefix (``eval_loss``); the bytes only where the tokenizer can tell them."""


@settings
class RunSettings(Settings):
    """One training run: an option of each group, and the run-level settings.

    Steps are optimizer steps, batch sizes are sequences, times are seconds; names are those of TrainingArguments.
    """

    output_dir: FilePath | None = None  # run directory; null: outputs/<recipe>/<date>_<time>
    logging_dir: FilePath | None = None  # where loggers write; null: output_dir
    # true: start anew in a directory that holds metrics or checkpoints
    overwrite_output_dir: Annotated[bool, _NEW_RUN] = False
    # name of the job for forgather control; null: job_<time>_<host>_<pid>
    job_id: Annotated[str | None, _SERVED] = None

    max_steps: Annotated[int, Ge(-1)] = -1  # optimizer steps, repeating data; -1: by num_train_epochs
    # passes over the data; -1: until the data ends by itself
    num_train_epochs: Annotated[float, only_if("max_steps", -1)] = 1.0
    epoch_train_steps: PositiveInt | None = None  # optimizer steps per epoch, for data without a length
    # sequences per optimizer step over all ranks; null: per_device x accumulation x ranks
    global_batch_size: PositiveInt | None = None
    # sequences per rank and micro-step; with global_batch_size an upper bound
    per_device_train_batch_size: PositiveInt = 8
    per_device_eval_batch_size: Annotated[PositiveInt, NEEDS_EVALUATION] = 8  # sequences per rank and evaluation batch
    # micro-steps per optimizer step; null: 1, or what global_batch_size asks for
    gradient_accumulation_steps: PositiveInt | None = None
    # out of memory in the first steps: again with half the micro-batch, more accumulation
    auto_find_batch_size: bool = False

    learning_rate: NonNegative = 1e-3  # peak of the schedule
    weight_decay: NonNegative = 0.1  # of the parameters that optimizer.groups does not exempt
    # regular expressions of the parameters that are trained; null: all, beside an adapter none
    trainable: list[str] | None = None
    max_grad_norm: NonNegative | None = 1.0  # global norm to clip to; null or 0: measure only

    # tensorboard, wandb, mlflow, ..., a list, none, all (installed); null: as callbacks say
    report_to: list[str] | str | None = None
    logging_strategy: Interval = "steps"  # no, steps, epoch
    # steps between two log records; below 1: a fraction of all steps, rounded up
    logging_steps: Annotated[Steps, only_if("logging_strategy", "steps")] = 10
    logging_first_step: Annotated[bool, only_if("logging_strategy", "steps")] = True  # log step 1 too
    eval_strategy: Annotated[Interval, asks_for_evaluation("eval_strategy")] = "steps"  # no, steps, epoch
    # steps between two evaluations; below 1: a fraction of all steps
    eval_steps: Annotated[Steps, only_if("eval_strategy", "steps"), NEEDS_EVALUATION] = 100
    # steps (epochs under eval_strategy=epoch) before the first evaluation
    eval_delay: Annotated[NonNegative, _EVALUATES, NEEDS_EVALUATION] = 0
    eval_on_start: Annotated[bool, asks_for_evaluation("eval_on_start")] = False  # evaluate before the first step
    eval_on_save: Annotated[bool, _SAVES, asks_for_evaluation("eval_on_save")] = False  # evaluate before each save
    # the first N sequences of the split (of each source of a mixture), the same in every layout; null: all
    max_eval_samples: Annotated[PositiveInt | None, NEEDS_EVALUATION] = None
    max_eval_steps: Annotated[Literal[-1] | PositiveInt, NEEDS_EVALUATION] = -1  # evaluation batches per rank; -1: all

    # no, steps, epoch, best (after each evaluation better than all before, and at the end)
    save_strategy: SaveInterval = "steps"
    # steps between two checkpoints; below 1: a fraction of all steps
    save_steps: Annotated[Steps, only_if("save_strategy", "steps")] = 500
    save_total_limit: PositiveInt | None = 3  # newest checkpoints to keep; null: all
    async_save: bool = True  # train on while the checkpoint is written; costs one copy in host memory
    save_timeout: PositiveFloat = 600.0  # seconds until a save that does not finish is given up
    verify_checkpoint: Literal["full", "size", "none"] = "full"  # before loading: full (SHA-256), size, none
    # at save, of what all ranks hold: none, quick (names, shapes), tensor (checksum), full
    replication_check: Annotated[Literal["none", "quick", "tensor", "full"], NEEDS_RANKS] = "tensor"
    load_best_model_at_end: bool = False  # needs evaluation
    # an entry of the evaluations, by which checkpoints are compared
    metric_for_best_model: Annotated[str, NEEDS_EVALUATION] = "eval_loss"
    greater_is_better: Annotated[bool, NEEDS_EVALUATION] = False  # is a larger metric_for_best_model better
    preserve_n_best: Count = 1  # best checkpoints to keep besides the newest
    # at the end write the mean of the last N checkpoints' weights too, N at least 3
    average_last: Annotated[Annotated[int, Ge(3)] | None, _SAVES] = None

    # false; true: newest valid in output_dir, fresh if none; or a checkpoint's path
    resume_from_checkpoint: bool | FilePath = False
    resume_components: Annotated[
        Literal["all"]
        | list[Literal["model", "optimizer", "scheduler", "trainer", "data", "rng", "callbacks", "components"]],
        _DATASET,
        _ON_RESUME,
    ] = "all"  # all, or a list of model, optimizer, scheduler, trainer, data, rng, callbacks, components (your own)
    ignore_data_skip: Annotated[bool, _ON_RESUME] = False  # true: start the data from its beginning

    # of a corpus (data=python_stdlib, text, hf) whose data and model name none: bytes, bpe
    tokenizer_default: Literal["bytes", "bpe"] = "bytes"
    dataloader_num_workers: Count = 0  # worker processes per rank; 0: load in the training process
    # batches each worker loads ahead; null: PyTorch's 2
    dataloader_prefetch_factor: Annotated[PositiveInt | None, _WORKERS] = None
    dataloader_pin_memory: bool | None = None  # page-locked host memory for faster copies; null: on CUDA
    dataloader_persistent_workers: Annotated[bool, _WORKERS] = False  # keep the workers between epochs
    dataloader_drop_last: bool = True  # leave out the last incomplete global batch of an epoch
    set_dataset_epoch: bool = True  # call set_epoch(epoch) on datasets that have it

    seed: Annotated[int, Ge(-1)] = 42  # of initial weights, data order and dropout; -1: none
    deterministic: bool = False  # two runs bit-identical on the same machine; slower on CUDA
    device: str = "auto"  # auto (CUDA if there is one), cpu, cuda, cuda:1, mps
    # of fp32 products: highest, high (TF32), medium (bf16); null: as torch is (highest)
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = None
    # torch's anomaly mode: an error where a gradient is NaN, with what made it; much slower
    detect_anomaly: bool = False
    # each rank prints its parameters and buffers after each step in which its model is made
    debug_model_init: bool = False
    debug_model_params: bool = False  # each rank prints its parameters and buffers with shape, dtype and device
    # under trainer=pipeline each rank prints the modules of its stages
    debug_split_model: Annotated[bool, _IN_STAGES] = False
    # under trainer=pipeline each rank prints what its stages do, as torch logs it
    debug_pipeline: Annotated[bool, _IN_STAGES] = False

    # true, false; auto: where the GPU and the run make it pay, decided at the first start
    torch_compile: bool | Literal["auto"] = False
    # model (and its loss, one graph), blocks; auto: model under single and ddp, else blocks
    torch_compile_scope: Annotated[Literal["auto", "blocks", "model"], _COMPILED] = "auto"
    torch_compile_backend: Annotated[str | None, _COMPILED] = None  # null: inductor
    torch_compile_mode: Annotated[str | None, _COMPILED] = None  # null: default; reduce-overhead, max-autotune
    torch_compile_dynamic: Annotated[bool | None, _COMPILED] = None  # dynamic shapes; null: as torch.compile decides
    torch_compile_fullgraph: Annotated[bool, _COMPILED] = False  # error on a graph break
    # fraction of the activations that compile may keep, 0 to 1; needs torch_compile
    activation_memory_budget: Annotated[Fraction | None, _COMPILED] = None
    gradient_checkpointing: bool = False  # recompute activations in the backward: less memory, about a third slower
    # of every n-th layer alone, from the first: more memory, faster
    gradient_checkpointing_every: Annotated[PositiveInt, only_if("gradient_checkpointing", True)] = 1
    fuse_optim_with_backward: bool = False  # step the optimizer inside the backward: no memory for gradients
    # meta: no memory before this rank's share is known; device (other random numbers), cpu
    construct_model_on: Literal["meta", "device", "cpu"] = "meta"

    gc_steps: PositiveInt = 1000  # steps between two runs of Python's garbage collector
    # fraction of device memory above which the CUDA cache may be released; null: never
    gc_threshold: Fraction | None = None
    speed_metrics_start_step: Count = 1  # steps of this process left out of the speed metrics
    # seconds without progress (or 5 median steps, if longer) until the rank that hangs is named
    hang_report_after: PositiveFloat = 30.0
    # seconds without progress after which the job is ended; at least hang_report_after
    hang_timeout: PositiveFloat = 1800.0

    # ranks on this node; auto: number of GPUs, or 2 on CPU
    nproc_per_node: Annotated[PositiveInt | Literal["auto"], NEEDS_RANKS] = "auto"
    nnodes: Annotated[PositiveInt, NEEDS_RANKS] = 1  # nodes
    node_rank: Annotated[Count, NEEDS_RANKS] = 0  # this node's number, from 0
    # host:port on node 0, where several nodes meet: whoever reaches that port can disturb a start
    rdzv_endpoint: Annotated[str | None, NEEDS_RANKS] = None
    # torchrun's; null: static, with max_restarts c10d, for trusted networks only (pickles)
    rdzv_backend: Annotated[str | None, NEEDS_RANKS] = None
    rdzv_id: Annotated[str | None, NEEDS_RANKS] = None  # name of the job at the rendezvous
    max_restarts: Annotated[Count, NEEDS_RANKS] = 0  # restarts from the newest valid checkpoint after a rank failed

    @property
    def loss_applies_head(self) -> bool:
        """Whether the loss multiplies with the head's weight itself."""
        return isinstance(loss := getattr(self, "loss", None), LossSettings) and loss.applies_head

    def recomputes(self, layer: int) -> bool:
        """Whether activations of this layer, counted from 0 in its stack of the full model, are computed again."""
        return self.gradient_checkpointing and layer % self.gradient_checkpointing_every == 0


@settings
class Config(RunSettings):
    """A whole run: run-level settings and one option of each group."""

    GROUPS: ClassVar[tuple[str, ...]] = (
        "model", "data", "trainer", "optimizer", "lr_scheduler", "loss", "precision", "adapter", "callbacks",
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
    adapter: AdapterOption = NoAdapter()

    @property
    def dispatch_batches(self) -> bool | None:
        """``data.dispatch_batches``."""
        return self.data.dispatch_batches

    @property
    def dispatch_eval_batches(self) -> bool | None:
        """``data.dispatch_eval_batches``."""
        return self.data.dispatch_eval_batches

    @property
    def known_world(self) -> int | None:
        """Ranks of the whole job where the config says so; None under ``nproc_per_node=auto``."""
        if self.trainer.is_one_process:
            return 1
        if self.nproc_per_node == "auto":
            return self.nnodes if self.trainer.is_one_process is None else None
        return self.nproc_per_node * self.nnodes

    def problems(self, config: Any = None) -> Iterator[str]:
        for name, path in {"output_dir": self.output_dir, "logging_dir": self.logging_dir}.items():
            if path == "":
                yield f"{name}: is empty; name a directory"
        if isinstance(self.resume_from_checkpoint, str) and not self.resume_from_checkpoint.strip():
            yield "resume_from_checkpoint: is empty; name a checkpoint, or set true (the newest) or false"
        if self.job_id is not None and not is_name(self.job_id):
            yield (
                "job_id: must be at most 100 letters, digits, dots, dashes and underscores, with a letter or digit "
                f"first, got {self.job_id!r}; set job_id=my-run or the like"
            )
        elif self.job_id == "latest":
            yield "job_id: latest stands for the newest job, got latest; choose another name"
        if self.activation_memory_budget is not None and self.gradient_checkpointing:
            yield (
                "activation_memory_budget: gradient_checkpointing=true recomputes all of a block already; set one of "
                "the two"
            )
        epochs = self.num_train_epochs
        if self.max_steps == 0:
            yield "max_steps: 0 trains nothing; set max_steps=-1 to train by num_train_epochs, or a number of steps"
        elif self.max_steps == -1 and epochs == -1 and not self.data.is_stream:
            data = value_at(self, "data")
            yield f"max_steps: -1 with num_train_epochs=-1 never ends on data={data}; set one of them"
        elif self.max_steps == -1 and epochs <= 0 and epochs != -1:
            yield f"num_train_epochs: must be above 0 with max_steps=-1, got {epochs:g}; set one of them"
        yield from self._batch_problems()
        best, metric, saves_best = "load_best_model_at_end", self.metric_for_best_model, self.save_strategy == "best"
        if saves_best and self.eval_strategy == "no":
            yield "save_strategy: best saves after an evaluation, got eval_strategy=no; set eval_strategy=steps"
        elif self.load_best_model_at_end and self.eval_strategy == "no" and not self.eval_on_save:
            yield f"{best}: needs evaluations, got eval_strategy=no; set eval_strategy=steps or eval_on_save=true"
        elif (saves_best or self.load_best_model_at_end) and (nothing := self.data.nothing_held_out):
            name, got = "save_strategy" if saves_best else best, typed(value_at(self, nothing.because))
            yield (
                f"{name}: needs evaluations, got {nothing.because.rpartition('.')[2]}={got}, which leaves nothing to "
                f"evaluate on; {nothing.remedy}"
            )
        if self.load_best_model_at_end and self.save_strategy == "no":
            yield f"{best}: needs checkpoints, got save_strategy=no; set save_strategy=steps"
        average, limit = self.average_last, self.save_total_limit
        if average is not None and limit is not None and limit < average:
            yield (
                f"average_last: needs the last {average} checkpoints, got save_total_limit={limit}; set "
                f"save_total_limit={average}, or average_last=null"
            )
        if self.hang_timeout < self.hang_report_after:
            yield (
                f"hang_timeout: ends the job before hang_report_after={self.hang_report_after:g} says which rank "
                f"hangs, got {self.hang_timeout:g}; set hang_report_after below it, or raise hang_timeout"
            )
        if self.greater_is_better and metric.endswith(("loss", "perplexity")):
            yield f"greater_is_better: true keeps the worst metric_for_best_model={metric}; set greater_is_better=false"
        endpoint, nodes, world = self.rdzv_endpoint, self.nnodes, self.known_world
        if self.node_rank >= nodes:
            yield f"node_rank: counts from 0 to nnodes-1, got {self.node_rank} with nnodes={nodes}; set one below"
        if endpoint is not None and not re.fullmatch(r"[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", endpoint):
            yield f"rdzv_endpoint: must be HOST:PORT, got {endpoint!r}; set rdzv_endpoint=localhost:29500 or the like"
        if problem := wrong_device(self.device):
            yield f"device: {problem}"
        elif re.fullmatch(r"cuda:\d+", self.device) and world is not None and world > 1:
            yield f"device: {self.device} is one device for {world} ranks; set device=cuda, and each takes its own"

    def _batch_problems(self) -> Iterator[str]:
        plan = None  # where only the launch knows the number of ranks
        try:
            if ranks := self.trainer.shard if self.trainer.cuts_layers else self.known_world:
                plan = batch_plan(self, ranks, multiple_of=self.trainer.n_microbatches)
        except ConfigError as error:
            yield from error.problems
        if self.auto_find_batch_size and self.fuse_optim_with_backward:
            yield (
                "auto_find_batch_size: accumulates in short memory, which excludes fuse_optim_with_backward=true; set "
                "one to false"
            )
        if self.auto_find_batch_size and self.nnodes > 1:
            yield (
                f"auto_find_batch_size: starts the ranks of one node again, got nnodes={self.nnodes}; set "
                "auto_find_batch_size=false"
            )
        if not self.fuse_optim_with_backward:
            return
        fused, steps, optimizer = "fuse_optim_with_backward", self.gradient_accumulation_steps, self.optimizer
        if self.max_grad_norm:
            yield (
                f"{fused}: gradients are gone before max_grad_norm={self.max_grad_norm:g} could clip them; "
                "set max_grad_norm=null"
            )
        if steps is not None and steps > 1:
            yield (
                f"{fused}: steps in every backward, got gradient_accumulation_steps={steps}; "
                "set gradient_accumulation_steps=1"
            )
        elif plan is not None and plan.accumulation > 1:
            yield (
                f"{fused}: steps in every backward, but global_batch_size={self.global_batch_size} with "
                f"per_device_train_batch_size={self.per_device_train_batch_size} accumulates {plan.accumulation} "
                f"micro-batches; set per_device_train_batch_size={plan.micro_batch * plan.accumulation}"
            )
        if isinstance(optimizer, Target):
            return
        if optimizer.brings_another:
            kind = f"optimizer={optimizer.type} brings AdamW for the rest"
            yield f"{fused}: takes one optimizer, and {kind}; choose optimizer=adamw"
        elif own := [name for name, group in optimizer.groups.items() if group.optimizer is not None]:
            yield f"{fused}: takes one optimizer, optimizer.groups.{own[0]}.optimizer is another; set it to null"


def wrong_device(name: str) -> str | None:
    """What is wrong with a device's name; None if it is one. torch knows other kinds, on which nothing here was run."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", name):
        return None
    return f"must be auto, cpu, cuda, cuda:N (a number) or mps, got {name!r}; set it to auto for a GPU if there is one"

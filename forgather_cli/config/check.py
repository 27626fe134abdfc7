"""Settings that contradict each other, and settings that nothing will read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from forgather_cli.config.batch import BatchPlan, batch_plan
from forgather_cli.config.control_limits import control_problems
from forgather_cli.config.divergence_limits import divergence_problems
from forgather_cli.config.fsdp2_limits import fsdp2_problems
from forgather_cli.config.hf_limits import hf_problems, void_in_hf
from forgather_cli.config.model_limits import model_problems
from forgather_cli.config.options import did_you_mean
from forgather_cli.config.pipeline_limits import pipeline_problems
from forgather_cli.config.precision_limits import precision_problems
from forgather_cli.config.schema import (
    TRACKERS,
    Config,
    DDPSettings,
    FSDP2Settings,
    HfSettings,
    MuonSettings,
    PipelineSettings,
    SingleSettings,
    Target,
)
from forgather_cli.errors import ConfigError

_SEVERAL_RANKS = (
    "nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "max_restarts",
    "replication_check",
)  # fmt: skip
"""Settings that only a job of several ranks reads."""
_ENDPOINT = re.compile(r"[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
_DISPATCH = ("dispatch_batches", "dispatch_eval_batches")


def cross_check(config: Config, given: frozenset[str], command_line: frozenset[str] = frozenset()) -> list[str]:
    """Problems between settings, each naming both and the remedy.

    ``given`` are the paths that recipe or command line set, ``command_line`` those of the latter. A recipe's setting
    that the command line makes void (``save_strategy=no`` over ``save_steps``) is no mistake.
    """
    return [
        *_length(config),
        *_batch(config),
        *_optimizer_in_backward(config),
        *_smaller_batches(config),
        *_best_model(config),
        *_loading(config),
        *_memory(config),
        *_trainer(config),
        *_launch(config),
        *_trackers(config),
        *hf_problems(config),
        *model_problems(config),
        *precision_problems(config),
        *control_problems(config, given),
        *divergence_problems(config, given),
        *_unread(config, given, command_line),
    ]


def world_problems(config: Config, world: int) -> list[str]:
    """Problems of a config that is to be trained by ``world`` ranks, however it says so itself."""
    return cross_check(replace(config, nproc_per_node=world, nnodes=1, node_rank=0), frozenset())


def known_world(config: Config) -> int | None:
    """Ranks of the whole job where the config says so; None under ``nproc_per_node=auto``."""
    if isinstance(config.trainer, SingleSettings):
        return 1
    if config.nproc_per_node == "auto":
        return config.nnodes if isinstance(config.trainer, Target) else None
    return config.nproc_per_node * config.nnodes


def planned_batch(config: Config) -> BatchPlan | None:
    """The batch plan, None where it depends on a number of ranks that only the launch knows. Raises ConfigError."""
    if isinstance(config.trainer, PipelineSettings):
        return batch_plan(config, 1, multiple_of=config.trainer.n_microbatches)
    world = known_world(config)
    return None if world is None else batch_plan(config, world)


def _length(config: Config) -> Iterator[str]:
    epochs = config.num_train_epochs
    if config.max_steps == 0:
        yield "max_steps: 0 trains nothing; set max_steps=-1 to train by num_train_epochs, or a number of steps"
    elif config.max_steps == -1 and epochs == -1 and not isinstance(config.data, Target):
        yield f"max_steps: -1 with num_train_epochs=-1 never ends on data={config.data.type}; set one of them"
    elif config.max_steps == -1 and epochs <= 0 and epochs != -1:
        yield f"num_train_epochs: must be above 0 with max_steps=-1, got {epochs:g}; set one of them"


def _batch(config: Config) -> list[str]:
    try:
        planned_batch(config)
    except ConfigError as error:
        return error.problems
    return []


def _optimizer_in_backward(config: Config) -> Iterator[str]:
    if not config.fuse_optim_with_backward:
        return
    fused = "fuse_optim_with_backward"
    if config.max_grad_norm:
        yield (
            f"{fused}: gradients are gone before max_grad_norm={config.max_grad_norm:g} could clip them; "
            "set max_grad_norm=null"
        )
    if problem := _accumulation(config):
        yield f"{fused}: steps in every backward, {problem}"
    if isinstance(config.optimizer, MuonSettings):
        yield f"{fused}: takes one optimizer, and optimizer=muon brings AdamW for the rest; choose optimizer=adamw"
    elif own := [name for name, group in _groups(config).items() if group.optimizer is not None]:
        yield f"{fused}: takes one optimizer, optimizer.groups.{own[0]}.optimizer is another; set it to null"
    if isinstance(config.trainer, DDPSettings | PipelineSettings):
        yield f"{fused}: not possible with trainer={config.trainer.type}; choose trainer=single or trainer=fsdp2"


def _smaller_batches(config: Config) -> Iterator[str]:
    if not config.auto_find_batch_size:
        return
    name = "auto_find_batch_size"
    if config.fuse_optim_with_backward:
        yield f"{name}: accumulates in short memory, which excludes fuse_optim_with_backward=true; set one to false"
    if config.nnodes > 1:
        yield f"{name}: starts the ranks of one node again, got nnodes={config.nnodes}; set {name}=false"


def _accumulation(config: Config) -> str | None:
    """Why micro-batches are accumulated, with the remedy; None if they are not."""
    steps = config.gradient_accumulation_steps
    if steps is not None and steps > 1:
        return f"got gradient_accumulation_steps={steps}; set gradient_accumulation_steps=1"
    try:
        plan = planned_batch(config)
    except ConfigError:  # reported by _batch
        return None
    if plan is None or plan.accumulation == 1:
        return None
    return (
        f"but global_batch_size={config.global_batch_size} with per_device_train_batch_size="
        f"{config.per_device_train_batch_size} accumulates {plan.accumulation} micro-batches; "
        f"set per_device_train_batch_size={plan.micro_batch * plan.accumulation}"
    )


def _groups(config: Config) -> dict[str, Any]:
    return {} if isinstance(config.optimizer, Target) else config.optimizer.groups


def _best_model(config: Config) -> Iterator[str]:
    best, metric = "load_best_model_at_end", config.metric_for_best_model
    if config.load_best_model_at_end and config.eval_strategy == "no" and not config.eval_on_save:
        yield f"{best}: needs evaluations, got eval_strategy=no; set eval_strategy=steps or eval_on_save=true"
    if config.load_best_model_at_end and config.save_strategy == "no":
        yield f"{best}: needs checkpoints, got save_strategy=no; set save_strategy=steps"
    if config.greater_is_better and metric.endswith(("loss", "perplexity")):
        yield f"greater_is_better: true keeps the worst metric_for_best_model={metric}; set greater_is_better=false"


def _loading(config: Config) -> Iterator[str]:
    if config.dataloader_num_workers:
        return
    if config.dataloader_prefetch_factor is not None:
        yield "dataloader_prefetch_factor: only workers prefetch, got dataloader_num_workers=0; set it above 0"
    if config.dataloader_persistent_workers:
        yield "dataloader_persistent_workers: there are none, got dataloader_num_workers=0; set it above 0"


def _memory(config: Config) -> Iterator[str]:
    budget = "activation_memory_budget"
    if config.activation_memory_budget is None:
        return
    if not config.torch_compile:
        yield f"{budget}: only the compiler reads it, got torch_compile=false; set torch_compile=true"
    if config.gradient_checkpointing:
        yield f"{budget}: gradient_checkpointing=true recomputes all of a block already; set one of the two"


def _trainer(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if isinstance(trainer, PipelineSettings):
        yield from pipeline_problems(config, known_world(config))
    if isinstance(trainer, FSDP2Settings):
        yield from fsdp2_problems(config, trainer, known_world(config))
    if isinstance(trainer, DDPSettings) and trainer.post_local_sgd.enabled:
        yield from _post_local_sgd(trainer, known_world(config))


def _launch(config: Config) -> Iterator[str]:
    endpoint, world = config.rdzv_endpoint, known_world(config)
    if config.node_rank >= config.nnodes:
        yield f"node_rank: counts from 0 to nnodes-1, got {config.node_rank} with nnodes={config.nnodes}; set one below"
    if config.nnodes > 1 and endpoint is None:
        yield f"rdzv_endpoint: nnodes={config.nnodes} have to meet somewhere; set rdzv_endpoint=HOST:PORT, of node 0"
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        yield f"rdzv_endpoint: must be HOST:PORT, got {endpoint!r}; set rdzv_endpoint=localhost:29500 or the like"
    if re.fullmatch(r"cuda:\d+", config.device) and world is not None and world > 1:
        yield f"device: {config.device} is one device for {world} ranks; set device=cuda, and each takes its own"


def _post_local_sgd(trainer: DDPSettings, ranks: int | None) -> Iterator[str]:
    if trainer.comm_hook != "none":
        yield (
            f"post_local_sgd.enabled: excludes comm_hook={trainer.comm_hook}, both replace the all-reduce; "
            "set comm_hook=none or post_local_sgd.enabled=false"
        )
    subgroup = trainer.post_local_sgd.subgroup
    if ranks is not None and subgroup is not None and ranks % subgroup:
        yield (
            f"post_local_sgd.subgroup: {ranks} ranks cannot be divided into groups of {subgroup}; "
            f"set it to a divisor of {ranks}"
        )


def _trackers(config: Config) -> Iterator[str]:
    if (trackers := config.callbacks.trackers) is None:
        return
    path, known = "callbacks.trackers", [*TRACKERS, "comet"]
    if not trackers.names:
        yield f"{path}.names: is empty; name a tracker, or remove it with ~{path}"
    for name in trackers.names:
        if name not in known and "." not in name:
            near = did_you_mean(name, known)
            yield f"{path}.names: unknown tracker, got {name!r};{near} One of your own is given as module.Class"
    for name in trackers.init_kwargs.keys() - set(trackers.names):
        yield f"{path}.init_kwargs.{name}: nothing reads it, since {name} is not among {path}.names; leave it out"


def _unread(config: Config, given: frozenset[str], command_line: frozenset[str]) -> Iterator[str]:
    """Settings given explicitly that nothing will read."""
    for path, because, remedy in _void(config):
        if path in given and (path in command_line or because not in command_line):
            name, cause = path.rpartition(".")[2], because.rpartition(".")[2]
            yield f"{name}: nothing reads it with {cause}={_value(config, because)}; {remedy} or leave {name} out"


def _void(config: Config) -> Iterator[tuple[str, str, str]]:
    """(setting, the setting that makes it void, what would make it count) for this config."""
    for kind, names in (
        ("logging", ("logging_steps", "logging_first_step")),
        ("eval", ("eval_steps",)),
        ("save", ("save_steps",)),
    ):
        if getattr(config, f"{kind}_strategy") != "steps":
            yield from ((name, f"{kind}_strategy", f"set {kind}_strategy=steps") for name in names)
    if config.eval_strategy == "no":
        yield "eval_delay", "eval_strategy", "set eval_strategy=steps"
    if config.overwrite_output_dir and config.resume_from_checkpoint is True:
        yield "overwrite_output_dir", "resume_from_checkpoint", "set resume_from_checkpoint=false"
    if config.save_strategy == "no":
        yield "eval_on_save", "save_strategy", "set save_strategy=steps"
    if isinstance(config.trainer, DDPSettings):
        yield from _void_ddp(config.trainer)
    if isinstance(config.trainer, SingleSettings):
        yield from ((name, "trainer", "choose trainer=ddp, fsdp2 or pipeline") for name in _SEVERAL_RANKS)
    yield from _void_data(config)
    if not config.torch_compile:
        for name in ("backend", "mode", "dynamic", "fullgraph"):
            yield f"torch_compile_{name}", "torch_compile", "set torch_compile=true"
    if config.max_steps > 0:
        yield "num_train_epochs", "max_steps", "set max_steps=-1"


def _void_data(config: Config) -> Iterator[tuple[str, str, str]]:
    data = config.data
    is_stream = isinstance(data, Target) or (isinstance(data, HfSettings) and data.streaming)
    if not isinstance(data, Target) and data.tokenizer != "bpe":
        yield "data.bpe_vocab_size", "data.tokenizer", "set tokenizer=bpe"
    if isinstance(data, HfSettings):
        yield from void_in_hf(data)
    if not is_stream:
        remedy = "ranks read its samples by number; give iterable data (data._target_, or data=hf with streaming=true)"
        yield from ((f"data.{name}", "data", remedy) for name in _DISPATCH)
    elif isinstance(config.trainer, SingleSettings):
        yield from ((f"data.{name}", "trainer", "choose trainer=ddp, fsdp2 or pipeline") for name in _DISPATCH)


def _void_ddp(trainer: DDPSettings) -> Iterator[tuple[str, str, str]]:
    local, unused = "trainer.post_local_sgd", "trainer.find_unused_parameters"
    if not trainer.post_local_sgd.enabled:
        for name in ("start_step", "period", "post_local_gradient_allreduce", "subgroup"):
            yield f"{local}.{name}", f"{local}.enabled", "set post_local_sgd.enabled=true"
    if not trainer.find_unused_parameters:
        yield "trainer.skip_all_reduce_unused_params", unused, "set find_unused_parameters=true"


def _value(config: Config, path: str) -> Any:
    """A setting's value as it is typed; of a group its option's type."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    value = getattr(value, "type", value)
    return str(value).lower() if isinstance(value, bool) else value

"""Settings that contradict each other; those that nothing will read are in ``unread.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from forgather_cli.config.batch import BatchPlan, batch_plan
from forgather_cli.config.control_limits import control_problems
from forgather_cli.config.device_limits import wrong_device
from forgather_cli.config.divergence_limits import divergence_problems
from forgather_cli.config.evaluation_limits import best_model_problems
from forgather_cli.config.fsdp2_limits import fsdp2_problems
from forgather_cli.config.hf_limits import hf_problems
from forgather_cli.config.loss_limits import loss_problems
from forgather_cli.config.model_limits import model_problems
from forgather_cli.config.optimizer_limits import optimizer_problems
from forgather_cli.config.options import did_you_mean
from forgather_cli.config.pipeline_limits import pipeline_problems
from forgather_cli.config.precision_limits import precision_problems
from forgather_cli.config.schema import (
    TRACKERS,
    Config,
    DDPSettings,
    FSDP2Settings,
    MuonSettings,
    PipelineSettings,
    SingleSettings,
    Target,
    WSDSettings,
)
from forgather_cli.config.unread import is_stream, unread
from forgather_cli.errors import ConfigError

_ENDPOINT = re.compile(r"[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


def cross_check(config: Config, layers: Mapping[str, int] = MappingProxyType({})) -> list[str]:
    """Problems between settings, each naming both and the remedy.

    ``layers`` are the paths that recipe or command line set, with how late that was. A setting that a later one makes
    void (``save_strategy=no`` on the command line, ``save_steps`` in the recipe) is no mistake.
    """
    given = frozenset(layers)
    directories = {"output_dir": config.output_dir, "logging_dir": config.logging_dir}
    return [
        *(f"{name}: is empty; name a directory" for name, path in directories.items() if path == ""),
        *_length(config),
        *_schedule(config, layers),
        *_batch(config),
        *_optimizer_in_backward(config),
        *_smaller_batches(config),
        *best_model_problems(config),
        *_loading(config),
        *_memory(config),
        *_trainer(config),
        *_launch(config),
        *_device(config),
        *_callbacks(config, given),
        *_trackers(config),
        *hf_problems(config),
        *model_problems(config),
        *optimizer_problems(config.optimizer),
        *precision_problems(config),
        *loss_problems(config),
        *control_problems(config, given),
        *divergence_problems(config, given),
        *unread(config, layers),
    ]


def world_problems(config: Config, world: int) -> list[str]:
    """Problems of a config that is to be trained by ``world`` ranks, however it says so itself."""
    return cross_check(replace(config, nproc_per_node=world, nnodes=1, node_rank=0))


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
    elif config.max_steps > 0:
        return
    elif epochs == -1 and not is_stream(config.data):
        assert not isinstance(config.data, Target)
        yield f"max_steps: -1 with num_train_epochs=-1 never ends on data={config.data.type}; set one of them"
    elif epochs <= 0 and epochs != -1:
        yield f"num_train_epochs: must be above 0 with max_steps=-1, got {epochs:g}; set one of them"


def _schedule(config: Config, layers: Mapping[str, int]) -> Iterator[str]:
    scheduler, path = config.lr_scheduler, "lr_scheduler.warmup_steps"
    if isinstance(scheduler, Target):
        return
    lengths = {"warmup_steps": scheduler.warmup_steps}
    if isinstance(scheduler, WSDSettings):
        lengths["decay_steps"] = scheduler.decay_steps
    for name, value in lengths.items():
        if value >= 1 and value != int(value):
            yield f"lr_scheduler.{name}: must be whole steps, or below 1 a fraction of all, got {value:g}; round it"
    # a warmup of the recipe in a run that is made shorter to try it is no mistake
    if 0 < config.max_steps < scheduler.warmup_steps and layers.get(path, -1) >= layers.get("max_steps", 0):
        yield (
            f"warmup_steps: {scheduler.warmup_steps:g} is more than max_steps={config.max_steps}, so the learning rate "
            f"never reaches learning_rate={config.learning_rate:g}; set warmup_steps to {config.max_steps} or less, or "
            "to a fraction such as 0.05"
        )


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
    if not isinstance(config.trainer, Target) and not config.trainer.supports_optimizer_in_backward:
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


def _device(config: Config) -> Iterator[str]:
    if problem := wrong_device(config.device):
        yield f"device: {problem}"


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


def _callbacks(config: Config, given: frozenset[str]) -> Iterator[str]:
    for callback in (config.callbacks.progress, config.callbacks.tensorboard):
        if callback is not None:
            yield from callback.problems()
    textgen = config.callbacks.textgen
    # a file that a saved config names is for training alone: eval and generate may be called from elsewhere
    if textgen is not None and (isinstance(textgen.prompts, list) or "callbacks.textgen.prompts" in given):
        yield from textgen.problems()


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

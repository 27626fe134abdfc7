"""DeepSpeed's settings read as settings of ours: its JSON, and what Accelerate's files and launcher say of it.

Keys are those of the JSON by dotted path (https://www.deepspeed.ai/docs/config-json/), which Accelerate's own names
stand for (accelerate 1.15, ``utils/dataclasses.py: DeepSpeedPlugin``). "auto" is what is set here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import typed
from forgather_cli.config.translation import ALWAYS_SO, AS_SET, NO_EFFECT, Section, Translation
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ConfigError

_ZERO = "zero_optimization"
_STAGE = f"{_ZERO}.stage"
_OFFLOADS = (f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param")

_OF_ACCELERATE = {
    "zero_stage": _STAGE,
    "offload_optimizer_device": f"{_OFFLOADS[0]}.device",
    "offload_optimizer_nvme_path": f"{_OFFLOADS[0]}.nvme_path",
    "offload_param_device": f"{_OFFLOADS[1]}.device",
    "offload_param_nvme_path": f"{_OFFLOADS[1]}.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
"""Key of ``deepspeed_config`` -> the same in the JSON."""
_OLD_NAMES = {
    "bfloat16": "bf16",
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
_VARIABLES = {
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    **{f"ACCELERATE_DEEPSPEED_{key.upper()}": json_key for key, json_key in _OF_ACCELERATE.items()},
}
"""Variable of ``accelerate launch`` -> key."""

_SETTINGS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "dataloader_drop_last": "dataloader_drop_last",
    "communication_data_type": "trainer.reduce_dtype",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.momentum": "optimizer.momentum",
    "optimizer.params.nesterov": "optimizer.nesterov",
    "scheduler.params.warmup_num_steps": "lr_scheduler.warmup_steps",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.cos_min_ratio": "lr_scheduler.min_lr_ratio",
}
"""Key -> the setting that has its value."""
_OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"}  # its Adam is AdamW unless adam_w_mode is false
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "constant": {"scheduler.params.warmup_num_steps": 1000},
    "linear": {"scheduler.params.warmup_num_steps": 1000},
    "cosine": {"scheduler.params.warmup_num_steps": 1000, "scheduler.params.cos_min_ratio": 1e-4},
}
"""Schedule -> DeepSpeed's values of what is not said, where ours are others."""

_ONLY: dict[str, tuple[Any, str]] = {
    "fp16.loss_scale": (0, "the scale follows the overflows; set it to 0"),
    "data_types.grad_accum_dtype": ("fp32", "gradients are summed in fp32; precision=bf16_true has all in bf16"),
    "optimizer.params.adam_w_mode": (True, "weight_decay does not go through the moments; set it to true"),
    "optimizer.params.bias_correction": (True, "the moments are corrected; set it to true"),
    "optimizer.params.amsgrad": (False, "there is no AMSGrad; set it to false"),
    "scheduler.params.warmup_min_lr": (0, "the warmup begins at 0; set it to 0"),
    "scheduler.params.warmup_min_ratio": (0, "the warmup begins at 0; set it to 0"),
    f"{_ZERO}.zero_hpz_partition_size": (1, "set trainer.replicate for a copy on each node, and this to 1"),
    f"{_ZERO}.mics_shard_size": (-1, "set trainer.replicate for a copy on each node, and this to -1"),
    f"{_ZERO}.zero_quantized_weights": (False, "weights travel in trainer.param_dtype; set it to false"),
    f"{_ZERO}.zero_quantized_nontrainable_weights": (False, "weights travel in trainer.param_dtype; set it to false"),
    f"{_ZERO}.zero_quantized_gradients": (False, "gradients travel in trainer.reduce_dtype; set it to false"),
    "activation_checkpointing.cpu_checkpointing": (False, "set it to false, and gradient_checkpointing=true"),
    "activation_checkpointing.partition_activations": (False, "set it to false, and gradient_checkpointing=true"),
}
"""Key -> the one value that it may have, and what to do instead of another."""
_ALWAYS_SO = (
    "zero3_init_flag", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "fp16.auto_cast",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "optimizer.params.torch_adam",
    "optimizer.params.fused", f"{_ZERO}.overlap_comm", f"{_ZERO}.contiguous_gradients", f"{_ZERO}.reduce_scatter",
    f"{_ZERO}.elastic_checkpoint", f"{_ZERO}.load_from_fp32_weights", f"{_ZERO}.ignore_unused_parameters",
)  # fmt: skip
"""A model is made in shares, gradients are summed exactly and while the backward runs, checkpoints fit any layout."""
_WITHOUT_EFFECT = (
    *(f"{_ZERO}.{key}" for key in (
        "allgather_bucket_size", "allgather_partitions", "reduce_bucket_size", "sub_group_size",
        "round_robin_gradients", "memory_efficient_linear", "use_multi_rank_bucket_allreduce", "legacy_stage1",
        "use_all_reduce_for_fetch_params", "cpu_offload_use_pin_memory", "override_module_apply",
        "log_trace_cache_warnings",
        "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
        "module_granularity_threshold",
    )),
    *(f"{block}.{key}" for block in _OFFLOADS for key in (
        "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline", "pipeline_read",
        "pipeline_write", "ratio",
    )),
    *(f"fp16.{key}" for key in (
        "hysteresis", "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads",
    )),
    *(f"activation_checkpointing.{key}" for key in (
        "contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile",
    )),
    "bf16.immediate_grad_update", "bf16.check_grad_overflow", "scheduler.params.last_batch_iteration",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_allgather",
    "deepspeed_multinode_launcher",
)  # fmt: skip
"""Keys that tune how DeepSpeed works, or what it prints."""
_BLOCKS = {
    "amp": "set precision=bf16 or fp16",
    "aio": "nothing is kept on disk while training",
    "autotuning": "set auto_find_batch_size=true for a micro-batch that fits",
    "checkpoint": "checkpoints are written as save_* say",
    "comms_logger": "see callbacks.profiler",
    "compression_training": "set precision=qat, or forgather finalize --quantize",
    "csv_monitor": "RUN/metrics.jsonl has every number",
    "curriculum_learning": "samples are read in the order of the seed",
    "data_efficiency": "samples are read in the order of the seed",
    "eigenvalue": "it serves compression_training",
    "elasticity": "global_batch_size stays the same on any number of ranks",
    "flops_profiler": "see callbacks.profiler",
    "hybrid_engine": "there is no reinforcement learning here",
    "pipeline": "choose trainer=pipeline",
    "progressive_layer_drop": "all layers are trained in every step",
    "quantize_training": "set precision=qat",
    "sparse_attention": "attention is dense",
    "tensor_parallel": "there is none here",
    "tensorboard": "set report_to=[tensorboard]",
    "wandb": "set report_to=[wandb]",
    "comet": "set report_to=[comet]",
    "compile": "set torch_compile=true",
    "deepspeed_hostfile": "give num_machines and machine_rank",
    "deepspeed_inclusion_filter": "set CUDA_VISIBLE_DEVICES in the environment",
    "deepspeed_exclusion_filter": "set CUDA_VISIBLE_DEVICES in the environment",
    "deepspeed_moe_layer_cls_names": "there are no experts to keep together",
    **{f"{block}.nvme_path": "offload to the cpu instead of nvme" for block in _OFFLOADS},
    f"{_ZERO}.cpu_offload_params": "give offload_param instead",
}
"""Keys that must be unset or off -> what to do instead."""
_KEYS = (_STAGE, "bf16.enabled", "fp16.enabled", *_SETTINGS, *_ONLY, *_ALWAYS_SO, *_WITHOUT_EFFECT, *_BLOCKS)


def is_deepspeed(tree: Mapping[str, Any]) -> bool:
    """Whether a mapping is DeepSpeed's own, not Accelerate's."""
    return _ZERO in tree or "train_micro_batch_size_per_gpu" in tree or "train_batch_size" in tree


def read_deepspeed_json(file: Section) -> None:
    """Translate DeepSpeed's JSON, to its last key."""
    file.refuse({key: remedy for key, remedy in _BLOCKS.items() if "." not in key})
    file.left = {_OLD_NAMES.get(key, key): value for key, value in file.left.items()}
    file.left = {_OLD_NAMES.get(key, key): value for key, value in _flat(file.left)}
    if "trainer" not in file.found.settings:
        file.default(_STAGE, 0, "DeepSpeed's")
    _read(file)
    file.finish(_KEYS)


def read_deepspeed_config(file: Section) -> None:
    """Translate ``deepspeed_config`` of an Accelerate file, and the JSON that it names, to their last keys."""
    keys = file.take("deepspeed_config")
    if not isinstance(keys, dict):
        file.wrong("deepspeed_config", f"must be a mapping with zero_stage or deepspeed_config_file, got {keys!r}")
        return
    shown = {json_key: key for key, json_key in _OF_ACCELERATE.items()}
    section = Section(
        lambda key: file.name(f"deepspeed_config.{shown.get(key, key)}"),
        {_OF_ACCELERATE.get(str(key), str(key)): value for key, value in keys.items()},
        file.found,
        shown,
    )
    _with_its_json(section, [*_OF_ACCELERATE, "gradient_clipping", "gradient_accumulation_steps", "zero3_init_flag"])


def launched_deepspeed(environ: Mapping[str, str] = os.environ) -> Translation:
    """What the variables of ``accelerate launch`` with DeepSpeed say; not checked."""
    names: dict[str, str] = {key: name for name, key in _VARIABLES.items()}
    said = {key: _scalar(environ[name]) for name, key in _VARIABLES.items() if name in environ}
    said |= {n: v for n, v in environ.items() if n.startswith("ACCELERATE_DEEPSPEED_") and n not in _VARIABLES}
    section = Section(lambda key: f"{names.get(key, key)} in the environment", said, Translation(), names)
    try:
        _with_its_json(section, list(_VARIABLES))
    except ConfigError as error:
        section.found.problems += error.problems
    return section.found


def _with_its_json(section: Section, known: list[str]) -> None:
    """What Accelerate says of DeepSpeed, and the JSON that it names. Raises ConfigError where that cannot be read."""
    named = section.take("deepspeed_config_file")
    if named in (None, "none"):
        section.default(_STAGE, 2, "Accelerate's")
    else:
        section.tell("deepspeed_config_file", "the lines of that file")
    _read(section)
    section.finish(known)
    if named in (None, "none"):
        return
    where, path = section.name("deepspeed_config_file"), Path(str(named)).expanduser()
    tree = read_json_object(path, lambda why: ConfigError(f"{where}: {why}; give DeepSpeed's JSON"))
    read_deepspeed_json(Section(lambda key: f"accelerate_config: {key} in {path}", tree, section.found))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted path, value) of everything that is no mapping."""
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _scalar(text: str) -> Any:
    """A variable's value: a number or a bool where it is one."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def _read(section: Section) -> None:
    """Translate all known keys, by dotted path."""
    section.leave([key for key, value in section.left.items() if value == "auto"], AS_SET)

    stage = section.take(_STAGE)
    if isinstance(stage, bool) or stage not in (None, 0, 1, 2, 3):
        section.wrong(_STAGE, f"must be 0, 1, 2 or 3, got {stage!r}")
    elif stage is not None:
        section.put("trainer", "fsdp2" if stage else "ddp", _STAGE)
        section.put("trainer.reshard_after_forward", stage == 3 if stage else None, _STAGE)
    devices = {key: section.take(key) for key in (f"{block}.device" for block in _OFFLOADS) if key in section.left}
    for key in _OFFLOADS:
        if key in section.left:  # null: no block
            devices[key] = section.take(key)
    old = f"{_ZERO}.cpu_offload"
    if (offloads := section.boolean(old)) is not None:
        devices[old] = "cpu" if offloads else "none"
    for key, device in devices.items():
        if device not in (None, "none", "cpu"):
            section.wrong(key, f"must be none or cpu, got {device!r}; nothing is kept on disk: set cpu")
        elif device == "cpu" and section.found.settings.get("trainer") == "ddp":
            section.wrong(key, "needs zero_stage 1, 2 or 3, got 0; set none")
        else:  # weights and moments go together
            section.put("trainer.cpu_offload", "cpu" in devices.values() or None, key)
            if "cpu" not in devices.values():
                section.tell(key, ALWAYS_SO)

    enabled = {name: section.boolean(f"{name}.enabled") for name in ("bf16", "fp16")}
    for name, on in enabled.items():
        if on or enabled == {"bf16": False, "fp16": False}:
            section.put("precision", name if on else "fp32", f"{name}.enabled")
    if enabled["fp16"]:
        power = section.number(key := "fp16.initial_scale_power", 0)
        if power is not None and power > 100:
            section.wrong(key, f"must be 100 or less, got {power}")
        elif power is not None:
            section.put("precision.init_scale", 2.0**power, key)
        key = "fp16.loss_scale_window"
        section.put("precision.growth_interval", section.number(key, 1), key)
    section.leave(["fp16.initial_scale_power", "fp16.loss_scale_window"], NO_EFFECT)

    for block, counterparts in {"optimizer": _OPTIMIZERS, "scheduler": _SCHEDULES}.items():
        group, kind = {"scheduler": "lr_scheduler"}.get(block, block), section.take(f"{block}.type")
        option = {name.lower(): option for name, option in counterparts.items()}.get(str(kind).lower())
        if option is not None:
            section.put(group, option, f"{block}.type")
            for key, value in _DEFAULTS.get(option, {}).items():
                section.default(key, value, "DeepSpeed's")
        elif kind is not None:
            known = ", ".join(counterparts)
            section.wrong(
                f"{block}.type",
                f"must be one of {known}, got {kind!r}; leave {block} out of the JSON, and choose with {group}=...",
            )
            section.left = {key: value for key, value in section.left.items() if not key.startswith(f"{block}.")}
    section.leave(["scheduler.params.warmup_type"], "the warmup is a line")

    key = f"{_ZERO}.stage3_gather_16bit_weights_on_model_save"
    if (saves := section.boolean(key)) is not None:
        section.tell(key, "write it with forgather finalize RUN DEST --dtype bf16" if saves else ALWAYS_SO)
    for key, path in _SETTINGS.items():
        section.put(path, section.take(key), key)
    for key, (value, remedy) in _ONLY.items():
        if key in section.left and (got := section.take(key)) is not None:
            if got == value and isinstance(got, bool) == isinstance(value, bool):
                section.tell(key, ALWAYS_SO)
            else:
                section.wrong(key, f"must be {typed(value)}, got {typed(got)}: {remedy}")
    section.leave(_ALWAYS_SO, ALWAYS_SO)
    section.leave(_WITHOUT_EFFECT, NO_EFFECT)
    section.refuse(_BLOCKS)

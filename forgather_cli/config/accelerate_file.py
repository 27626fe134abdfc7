"""Hugging Face Accelerate's FSDP2 config files, read as settings of ours. Needs neither torch nor accelerate.

Keys are those of accelerate 1.15, ``commands/config/config_args.py: ClusterConfig`` and ``commands/config/cluster.py``;
the environment variables in which ``accelerate launch --config_file`` hands them on those of ``utils/launch.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgather_cli.errors import ConfigError, did_you_mean
from forgather_cli.input_files import read_yaml

ALWAYS_SO = (
    "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type",
    "fsdp_backward_prefetch", "fsdp_forward_prefetch",
)  # fmt: skip
"""Keys about what is always so here: parameters keep their names, ranks start with the same weights, each reads its
rows of a checkpoint, and the next weights are gathered ahead."""
_SILENT = (*ALWAYS_SO, "main_training_function", "rdzv_backend", "same_network")

_RESHARDS = {
    "FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False,
    "True": True, "False": False,
}  # fmt: skip
"""fsdp_sharding_strategy or fsdp_reshard_after_forward -> whether weights are freed after the forward."""
_BY_NUMBER = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # from 1
_STRATEGIES = {number: name for n, name in enumerate(_BY_NUMBER, 1) for number in (n, str(n))}
_OWN_LAYERS = ("DecoderLayer", *(f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")))
_PORT = 29500  # accelerate's and torch's default
_UNSUPPORTED = {
    "debug": "set TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment",
    "downcast_bf16": "it is for TPUs",
    "enable_cpu_affinity": "bind the processes with numactl or Slurm",
    "deepspeed_config": "DeepSpeed is not supported",
    "megatron_lm_config": "Megatron-LM is not supported",
    "fp8_config": "set precision=... instead",
    "parallelism_config": "set trainer.replicate for HSDP",
    "mpirun_config": "start the ranks with torchrun",
    "dynamo_config": "set torch_compile=true and torch_compile_* instead",
    "dynamo_backend": "set torch_compile=true and torch_compile_backend instead",
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), "no TPUs here"),
    **dict.fromkeys(("command_file", "commands"), "they are for TPUs"),
    "fsdp_ignored_modules": "all parameters are sharded",
    "fsdp_activation_checkpointing_offload": "activations stay on the device, or are recomputed",
    "fsdp_min_num_params": "the model is sharded block by block",
    **dict.fromkeys(("fsdp_xla", "fsdp_xla_fsdp_v2", "fsdp_xla_fsdp_grad_ckpt"), "no TPUs here"),
}
"""Keys that must be unset -> why, or what to do instead."""

LAUNCHED = "the environment of accelerate launch"
_VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_DEBUG_MODE": "debug",
    "ACCELERATE_CPU_AFFINITY": "enable_cpu_affinity",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_config",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_config",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_FSDP_VARIABLES = {
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
    **{
        key.upper(): key
        for key in (
            "fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params",
            "fsdp_auto_wrap_policy", "fsdp_activation_checkpointing", *ALWAYS_SO,
            *(key for key in _UNSUPPORTED if key.startswith("fsdp_")),
        )
    },
}  # fmt: skip
_UNSAID = {
    "ACCELERATE_MIXED_PRECISION": "no", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_MIN_NUM_PARAMS": "100000000",
}  # fmt: skip
"""What ``accelerate launch`` sets where its file and command line say nothing."""


@dataclass
class _File:
    """A file being read into settings: ``left`` are the keys not read yet; ``name`` formats a key for messages."""

    name: Callable[[str], str]
    left: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        self.asked.append(key)
        return self.left.pop(key, default)

    def wrong(self, key: str, problem: str) -> None:
        self.problems.append(f"{self.name(key)}: {problem}")

    def boolean(self, key: str) -> bool | None:
        """None where the key is missing. Also as text, which accelerate writes."""
        value = self.take(key)
        text = str(value).lower()
        if value is not None and text not in ("true", "false"):
            self.wrong(key, f"must be true or false, got {value!r}")
        return None if value is None else text == "true"

    def number(self, key: str, least: int) -> int | None:
        value = self.take(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            self.wrong(key, f"must be a whole number, {least} or more, got {value!r}")
            return None
        return value

    def finish(self) -> None:
        """What is left must have no effect, or is wrong."""
        for key, value in self.left.items():
            if key in _UNSUPPORTED and _is_set(value):
                self.wrong(key, f"nothing reads it, got {value!r}; {_UNSUPPORTED[key]}, and leave it out")
            elif key not in _UNSUPPORTED and key not in _SILENT:
                self.wrong(key, f"no such key;{did_you_mean(key, [*self.asked, *_SILENT])} leave it out")


def _is_set(value: Any) -> bool:
    """True for what is neither empty nor one of accelerate's words for no."""
    if isinstance(value, dict):
        return any(_is_set(item) for item in value.values())
    return bool(value) and str(value).lower() not in ("no", "false", "none")


def accelerate_settings(path: Path, *, own_decoder: bool) -> dict[str, Any]:
    """Our settings by dotted path, ``precision`` as the option's name, for what the file says; no others.

    ``own_decoder``: the model is the decoder, whose layers stand for the Hugging Face classes they equal. Layer classes
    named for another model become ``trainer.block_classes``, which are looked for in the model once it is built.
    Raises ConfigError with every problem, naming file and key.
    """
    tree = read_yaml(
        path.expanduser(), lambda why: ConfigError(f"accelerate_config: {why}; give an Accelerate YAML file")
    )
    if not isinstance(tree, dict):
        raise ConfigError(f"accelerate_config: {path} must hold a mapping, got {type(tree).__name__}")
    file = _File(lambda key: f"accelerate_config: {key} in {path}", {str(key): value for key, value in tree.items()})
    settings = _launch(file)
    settings |= _precision_and_device(file)
    inner = file.take("fsdp_config")
    if isinstance(inner, dict):
        section = _File(lambda key: file.name(f"fsdp_config.{key}"), dict(inner), file.problems)
        settings |= _sharding(section, settings.get("nnodes", 1), own_decoder)
        section.finish()
    else:
        file.wrong("fsdp_config", f"must be a mapping with fsdp_version: 2, got {inner!r}")
    file.finish()
    if file.problems:
        raise ConfigError(file.problems)
    return settings


def fsdp_settings(keys: dict[str, Any]) -> dict[str, Any]:
    """Our settings by dotted path for Accelerate's ``fsdp_config`` alone, as Hugging Face's TrainingArguments have it.

    Raises ConfigError with every problem.
    """
    section = _File(lambda key: f"fsdp_config.{key}", {"fsdp_version": 2, **keys})
    section.take("fsdp_limit_all_gathers")  # always so too
    settings = _sharding(section, 1, own_decoder=False)
    section.finish()
    if section.problems:
        raise ConfigError(section.problems)
    return settings


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """True in a rank that ``accelerate launch`` has started. Other programs leave its variables too, but no ranks."""
    return "RANK" in environ and "ACCELERATE_MIXED_PRECISION" in environ


def is_launched_for_fsdp(environ: Mapping[str, str] = os.environ) -> bool:
    return is_launched(environ) and environ.get("ACCELERATE_USE_FSDP") == "true"


def launched_settings(*, sharded: bool, own_decoder: bool, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Our settings for what the variables of ``accelerate launch`` say; ``sharded``: the trainer is fsdp2.

    What they say by default counts as not said. Raises ConfigError with every problem, naming the variable.
    """
    said = {name: value for name, value in environ.items() if value != _UNSAID.get(name)}

    def named(variables: Mapping[str, str]) -> _File:
        by_key = {key: name for name, key in variables.items()}
        values = {key: said[name] for name, key in variables.items() if name in said}
        return _File(lambda key: f"{by_key[key]} in the environment", values)

    file, section = named(_VARIABLES), named(_FSDP_VARIABLES)
    settings = _precision_and_device(file)
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if not steps.isdecimal() or steps == "0":
        file.problems.append(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS: must be a whole number, 1 or more, got {steps!r}"
        )
    elif steps != "1":
        settings["gradient_accumulation_steps"] = int(steps)
    if sharded and is_launched_for_fsdp(environ):
        nodes = int(environ.get("WORLD_SIZE", 1)) // max(1, int(environ.get("LOCAL_WORLD_SIZE", 1)))
        settings |= _sharding(section, nodes, own_decoder)
        section.finish()
    file.finish()
    if problems := file.problems + section.problems:
        raise ConfigError(problems)
    return settings


def _launch(file: _File) -> dict[str, Any]:
    """What is to be started. num_processes counts the ranks of all machines, nproc_per_node those of one."""
    where, kind = file.take("compute_environment", "LOCAL_MACHINE"), file.take("distributed_type")
    if where != "LOCAL_MACHINE":
        file.wrong("compute_environment", f"must be LOCAL_MACHINE, got {where!r}; start the ranks on their machines")
    if kind == "DEEPSPEED":
        file.wrong("distributed_type", "DEEPSPEED is not supported; run accelerate config again and choose FSDP 2")
    elif kind != "FSDP":
        remedy = "; set trainer=ddp, without accelerate_config" if str(kind).startswith("MULTI_") else ""
        file.wrong("distributed_type", f"must be FSDP, got {kind!r}{remedy}")
    machines, processes = file.number("num_machines", 1), file.number("num_processes", -1)
    node, address = file.number("machine_rank", 0), file.take("main_process_ip")
    port = file.number("main_process_port", 0)
    settings: dict[str, Any] = {"nnodes": machines, "node_rank": node}
    if processes is not None and processes != -1:  # -1: as the launcher says
        if processes < 1 or processes % (machines or 1):
            file.wrong("num_processes", f"must be a multiple of num_machines={machines or 1}, got {processes}")
        settings["nproc_per_node"] = processes // (machines or 1)
    if address is not None or port:
        settings["rdzv_endpoint"] = f"{address or 'localhost'}:{port or _PORT}"
    return {name: value for name, value in settings.items() if value is not None}


def _precision_and_device(file: _File) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    precision, gpus = file.take("mixed_precision"), file.take("gpu_ids")
    if precision is not None:
        text = "no" if precision is False else str(precision)  # YAML 1.1 reads a bare no as false
        settings["precision"] = "fp32" if text == "no" else text
        if text not in ("no", "bf16", "fp16"):
            file.wrong("mixed_precision", f"must be 'no', bf16 or fp16 with trainer=fsdp2, got {text!r}; set bf16")
    if gpus not in (None, "all"):
        file.wrong("gpu_ids", f"nothing reads it, got {gpus!r}; set CUDA_VISIBLE_DEVICES in the environment")
    return {**settings, "device": "cpu"} if file.boolean("use_cpu") else settings


def _sharding(file: _File, machines: int, own_decoder: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "trainer.cpu_offload": file.boolean("fsdp_offload_params"),
        "gradient_checkpointing": file.boolean("fsdp_activation_checkpointing"),
    }
    version, named = file.take("fsdp_version", 1), _strategy(file, "fsdp_sharding_strategy")
    reshards = _strategy(file, "fsdp_reshard_after_forward")
    if str(version) != "2":
        file.wrong("fsdp_version", f"must be 2, got {version!r}; run accelerate to-fsdp2 on the file")
    if named and reshards and _RESHARDS[named] != _RESHARDS[reshards]:
        file.wrong("fsdp_reshard_after_forward", f"contradicts fsdp_sharding_strategy: {named}; keep one of them")
    if strategy := named or reshards:
        settings["trainer.reshard_after_forward"] = _RESHARDS[strategy]
        if strategy not in ("True", "False"):
            settings["trainer.replicate"] = machines if strategy.startswith("HYBRID") else 1
    key = "fsdp_transformer_layer_cls_to_wrap"
    policy, classes = file.take("fsdp_auto_wrap_policy"), file.take(key)
    if policy not in (None, "TRANSFORMER_BASED_WRAP"):
        file.wrong("fsdp_auto_wrap_policy", f"must be TRANSFORMER_BASED_WRAP, got {policy!r}")
    names = [name.strip() for name in (classes.split(",") if isinstance(classes, str) else classes or [])]
    if not own_decoder:
        settings["trainer.block_classes"] = names or None
    elif foreign := [name for name in names if name not in _OWN_LAYERS]:
        stands = f"the layers of this model stand for {', '.join(_OWN_LAYERS[1:])}"
        file.wrong(key, f"{stands}, got {', '.join(foreign)}; leave it out")
    return {path: value for path, value in settings.items() if value is not None}


def _strategy(file: _File, key: str) -> str | None:
    """A key of ``_RESHARDS``; None if the file has none, or a wrong one."""
    value = file.take(key)
    if value is None:
        return None
    text = str(value) if isinstance(value, bool) else _STRATEGIES.get(value, str(value).upper())
    text = text.title() if text.lower() in ("true", "false") else text
    if text in _RESHARDS and (key != "fsdp_sharding_strategy" or text not in ("True", "False")):
        return text
    remedy = "set trainer=ddp, without accelerate_config" if text == "NO_SHARD" else "set FULL_SHARD"
    file.wrong(key, f"must be one of {', '.join(list(_RESHARDS)[:4])}, got {value!r}; {remedy}")
    return None

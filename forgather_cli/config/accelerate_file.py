"""Hugging Face Accelerate's config files for FSDP2 and DeepSpeed, read as settings of ours. Needs neither torch nor
accelerate.

Keys are those of accelerate 1.15, ``commands/config/config_args.py: ClusterConfig`` and ``commands/config/cluster.py``;
the environment variables in which ``accelerate launch --config_file`` hands them on those of ``utils/launch.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgather_cli.config.deepspeed_file import (
    is_deepspeed,
    launched_deepspeed,
    read_deepspeed_config,
    read_deepspeed_json,
)
from forgather_cli.config.translation import ALWAYS_SO, Section, Translation
from forgather_cli.documents.regular_files import read_json, read_yaml
from forgather_cli.errors import ConfigError, SetupError

_FSDP_ALWAYS_SO = (
    "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type",
    "fsdp_backward_prefetch", "fsdp_forward_prefetch",
)  # fmt: skip
"""Keys about what is always so here: parameters keep their names, ranks start with the same weights, each reads its
rows of a checkpoint, and the next weights are gathered ahead."""
_ALWAYS_SO = ("main_training_function", "rdzv_backend", "same_network")

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
    "deepspeed_config": "it is for distributed_type: DEEPSPEED",
    "fsdp_config": "it is for distributed_type: FSDP",
    "megatron_lm_config": "Megatron-LM is not supported",
    "fp8_config": "set precision=... instead",
    "parallelism_config": "set trainer.replicate for HSDP",
    "mpirun_config": "start the ranks with torchrun",
    "dynamo_config": "set torch_compile=true and torch_compile_* instead",
    "dynamo_backend": "set torch_compile=true and torch_compile_backend instead",
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), "no TPUs here"),
    **dict.fromkeys(("command_file", "commands"), "they are for TPUs"),
}
"""Keys that must be unset -> why, or what to do instead."""
_FSDP_UNSUPPORTED = {
    "fsdp_ignored_modules": "all parameters are sharded",
    "fsdp_activation_checkpointing_offload": "activations stay on the device, or are recomputed",
    "fsdp_min_num_params": "the model is sharded block by block",
    **dict.fromkeys(("fsdp_xla", "fsdp_xla_fsdp_v2", "fsdp_xla_fsdp_grad_ckpt"), "no TPUs here"),
}

LAUNCHED = "the environment of accelerate launch"
_VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_DEBUG_MODE": "debug",
    "ACCELERATE_CPU_AFFINITY": "enable_cpu_affinity",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_config",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_FSDP_VARIABLES = {
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
    **{
        key.upper(): key
        for key in (
            "fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params",
            "fsdp_auto_wrap_policy", "fsdp_activation_checkpointing", *_FSDP_ALWAYS_SO, *_FSDP_UNSUPPORTED,
        )
    },
}  # fmt: skip
_UNSAID = {
    "ACCELERATE_MIXED_PRECISION": "no", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_MIN_NUM_PARAMS": "100000000",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}  # fmt: skip
"""What ``accelerate launch`` sets where its file and command line say nothing."""


def accelerate_settings(path: Path, *, own_decoder: bool) -> Translation:
    """What an Accelerate file for FSDP2 or DeepSpeed says, or a DeepSpeed JSON itself; of a group the option's name.

    ``own_decoder``: the model is the decoder, whose layers stand for the Hugging Face classes they equal. Layer classes
    named for another model become ``trainer.block_classes``, which are looked for in the model once it is built.
    Raises ConfigError with every problem, naming file and key.
    """
    path = path.expanduser()
    read = read_json if path.suffix == ".json" else read_yaml  # 1e-8 is a text in YAML 1.1
    tree = read(path, lambda why: ConfigError(f"accelerate_config: {why}; give an Accelerate or DeepSpeed file"))
    if not isinstance(tree, dict):
        raise ConfigError(f"accelerate_config: {path} must hold a mapping, got {type(tree).__name__}")
    file = Section(lambda key: f"accelerate_config: {key} in {path}", {str(key): value for key, value in tree.items()})
    if not tree.keys() & {"distributed_type", "compute_environment"} and (read is read_json or is_deepspeed(tree)):
        read_deepspeed_json(file)
        return file.found.checked()
    kind = _launch(file)
    _precision_and_device(file)
    if kind == "DEEPSPEED":
        read_deepspeed_config(file)
    elif isinstance(inner := file.take("fsdp_config"), dict):
        section = Section(lambda key: file.name(f"fsdp_config.{key}"), dict(inner), file.found)
        _sharding(section, file.found.settings.get("nnodes", 1), own_decoder)
    else:
        file.wrong("fsdp_config", f"must be a mapping with fsdp_version: 2, got {inner!r}")
    file.leave(_ALWAYS_SO, ALWAYS_SO)
    file.refuse(_UNSUPPORTED)
    file.finish(_ALWAYS_SO)
    return file.found.checked()


def fsdp_settings(keys: dict[str, Any]) -> dict[str, Any]:
    """Our settings by dotted path for Accelerate's ``fsdp_config`` alone, as Hugging Face's TrainingArguments have it.

    Raises ConfigError with every problem.
    """
    section = Section(lambda key: f"fsdp_config.{key}", {"fsdp_version": 2, **keys})
    section.leave(["fsdp_limit_all_gathers"], ALWAYS_SO)
    _sharding(section, 1, own_decoder=False)
    return section.found.checked().settings


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """True in a rank that ``accelerate launch`` has started. Other programs leave its variables too, but no ranks."""
    return "RANK" in environ and "ACCELERATE_MIXED_PRECISION" in environ


def launched_alone(environ: Mapping[str, str] = os.environ) -> str:
    """A line where ``accelerate launch``, asked for several processes, has started this one alone; else empty.

    It does so for any distributed_type but those of GPUs, and on CPUs without mpirun. Its variables do not say for how
    many it was asked: they are looked for on its command line and in its file.
    """
    if "RANK" in environ or "ACCELERATE_MIXED_PRECISION" not in environ:
        return ""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
        if not any("accelerate" in word for word in words):  # another program has left its variables
            return ""
        parts = [word.partition("=") for word in words]
        options = {
            name.lstrip("-").replace("-", "_"): value or follows
            for (name, _, value), follows in zip(parts, [*words[1:], ""], strict=True)
        }
        base = environ.get("HF_HOME") or f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        file = Path(options.get("config_file") or f"{base}/accelerate/default_config.yaml").expanduser()
        tree = read_yaml(file) if file.is_file() else {}
        asked = int(options.get("num_processes") or tree.get("num_processes") or 1)
        kind = tree.get("distributed_type", "NO")
    except (OSError, SetupError, ValueError, AttributeError):
        return ""
    if asked < 2:
        return ""
    return (
        f"accelerate launch: num_processes is {asked}, but for distributed_type {kind} it starts one process here; "
        f"forgather starts the ranks itself: forgather train trainer=ddp nproc_per_node={asked}"
    )


def launched_trainer(environ: Mapping[str, str] = os.environ) -> str | None:
    """The option of ``trainer`` that ``accelerate launch`` has asked for; None if it has not."""
    if is_launched(environ) and environ.get("ACCELERATE_USE_FSDP") == "true":
        return "fsdp2"
    if is_launched(environ) and environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return str(launched_deepspeed(environ).settings.get("trainer", "fsdp2"))
    return None


def launched_settings(*, sharded: bool, own_decoder: bool, environ: Mapping[str, str] = os.environ) -> Translation:
    """What the variables of ``accelerate launch`` say; ``sharded``: the trainer is fsdp2.

    What they say by default counts as not said. Raises ConfigError with every problem, naming the variable.
    """
    with_deepspeed = environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    found = launched_deepspeed(environ) if with_deepspeed else Translation()

    def section(variables: Mapping[str, str]) -> Section:
        names = {key: name for name, key in variables.items()}
        said = {key: environ[name] for key, name in names.items() if environ.get(name) not in (None, _UNSAID.get(name))}
        return Section(lambda key: f"{names[key]} in the environment", said, found, names)

    file = section(_VARIABLES)
    _precision_and_device(file)
    steps = file.take("gradient_accumulation_steps")
    if steps is not None and (not steps.isdecimal() or steps == "0"):
        file.wrong("gradient_accumulation_steps", f"must be a whole number, 1 or more, got {steps!r}")
    elif steps is not None:
        file.put("gradient_accumulation_steps", int(steps), "gradient_accumulation_steps")
    file.refuse(_UNSUPPORTED)
    if is_launched(environ) and environ.get("ACCELERATE_USE_FSDP") == "true":
        used = section({"ACCELERATE_USE_FSDP": "use_fsdp"})
        used.take("use_fsdp")
        used.put("trainer", "fsdp2", "use_fsdp")
        if sharded:
            nodes = int(environ.get("WORLD_SIZE", 1)) // max(1, int(environ.get("LOCAL_WORLD_SIZE", 1)))
            _sharding(section(_FSDP_VARIABLES), nodes, own_decoder)
    return found.checked()


def _launch(file: Section) -> str:
    """What is to be started, FSDP or DEEPSPEED. num_processes counts the ranks of all machines, nproc_per_node those of
    one.
    """
    where, kind = file.take("compute_environment", "LOCAL_MACHINE"), file.take("distributed_type")
    if where == "LOCAL_MACHINE":
        file.tell("compute_environment", ALWAYS_SO)
    else:
        file.wrong("compute_environment", f"must be LOCAL_MACHINE, got {where!r}; start the ranks on their machines")
    if kind == "FSDP":
        file.put("trainer", "fsdp2", "distributed_type")
    elif kind == "DEEPSPEED":
        file.tell("distributed_type", "the trainer follows from zero_stage")
    else:
        remedy = "; set trainer=ddp, without accelerate_config" if str(kind).startswith("MULTI_") else ""
        file.wrong("distributed_type", f"must be FSDP or DEEPSPEED, got {kind!r}{remedy}")
    machines, processes = file.number("num_machines", 1), file.number("num_processes", -1)
    file.put("nnodes", machines, "num_machines")
    file.put("node_rank", file.number("machine_rank", 0), "machine_rank")
    if processes is not None and processes != -1:  # -1: as the launcher says
        if processes < 1 or processes % (machines or 1):
            file.wrong("num_processes", f"must be a multiple of num_machines={machines or 1}, got {processes}")
        file.put("nproc_per_node", processes // (machines or 1), "num_processes")
    address, port = file.take("main_process_ip"), file.number("main_process_port", 0)
    for key, given in (("main_process_ip", address), ("main_process_port", port)):
        if given:
            file.put("rdzv_endpoint", f"{address or 'localhost'}:{port or _PORT}", key)
    return str(kind)


def _precision_and_device(file: Section) -> None:
    precision, gpus = file.take("mixed_precision"), file.take("gpu_ids")
    if precision is not None:
        text = "no" if precision is False else str(precision)  # YAML 1.1 reads a bare no as false
        if text not in ("no", "bf16", "fp16"):
            file.wrong("mixed_precision", f"must be 'no', bf16 or fp16 with trainer=fsdp2, got {text!r}; set bf16")
        file.put("precision", "fp32" if text == "no" else text, "mixed_precision")
    if gpus not in (None, "all"):
        file.wrong("gpu_ids", f"nothing reads it, got {gpus!r}; set CUDA_VISIBLE_DEVICES in the environment")
    file.put("device", "cpu" if file.boolean("use_cpu") else None, "use_cpu")


def _sharding(file: Section, machines: int, own_decoder: bool) -> None:
    """What ``fsdp_config`` says, to its last key."""
    file.put("trainer.cpu_offload", file.boolean("fsdp_offload_params"), "fsdp_offload_params")
    key = "fsdp_activation_checkpointing"
    # false leaves it to gradient_checkpointing, which Hugging Face's scripts set beside such a file
    file.put("gradient_checkpointing", file.boolean(key) or None, key)
    version = file.take("fsdp_version", 1)
    if str(version) == "2":
        file.tell("fsdp_version", ALWAYS_SO)
    else:
        file.wrong("fsdp_version", f"must be 2, got {version!r}; run accelerate to-fsdp2 on the file")
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        if strategy := _strategy(file, key):
            file.put("trainer.reshard_after_forward", _RESHARDS[strategy], key)
            if strategy not in ("True", "False"):
                file.put("trainer.replicate", machines if strategy.startswith("HYBRID") else 1, key)
    policy = file.take("fsdp_auto_wrap_policy")
    if policy == "TRANSFORMER_BASED_WRAP":
        file.tell("fsdp_auto_wrap_policy", ALWAYS_SO)
    elif policy is not None:
        file.wrong("fsdp_auto_wrap_policy", f"must be TRANSFORMER_BASED_WRAP, got {policy!r}")
    key = "fsdp_transformer_layer_cls_to_wrap"
    classes = file.take(key)
    # accelerate launch 1.15 hands on a YAML list as its repr, "['A', 'B']" (utils/launch.py:321)
    names = re.findall(r"[\w.]+", classes) if isinstance(classes, str) else classes or []
    if not own_decoder or "Qwen3EncoderLayer" in names:  # a model of a directory may be an encoder-decoder
        file.put("trainer.block_classes", names or None, key)
    elif foreign := [name for name in names if name not in _OWN_LAYERS]:
        stands = f"the layers of this model stand for {', '.join(_OWN_LAYERS[1:])}"
        file.wrong(key, f"{stands}, got {', '.join(foreign)}; leave it out")
    elif names:
        file.tell(key, ALWAYS_SO)
    file.leave(_FSDP_ALWAYS_SO, ALWAYS_SO)
    file.refuse(_FSDP_UNSUPPORTED)
    file.finish([*_FSDP_ALWAYS_SO, *_FSDP_UNSUPPORTED])


def _strategy(file: Section, key: str) -> str | None:
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

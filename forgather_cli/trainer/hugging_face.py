"""Hugging Face's ``TrainingArguments``: what becomes of each argument here, and how its value is read.

``ARGUMENTS`` is the one table; ``docs/python_api.md`` shows it, and a test compares it with the library's own fields.
Names, types and defaults are those of transformers 5.23 (training_args.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from forgather_cli.config.accelerate_file import fsdp_settings
from forgather_cli.config.schema import services
from forgather_cli.errors import ConfigError


class Argument(NamedTuple):
    """One of that library's arguments; at its ``default`` it is always accepted."""

    type: Any
    default: Any
    how: Literal["read", "refused", "no meaning"]
    note: str
    """What is read of it; ``why; remedy``; or why nothing is lost."""


def _read(type: Any, default: Any, note: str = "as there") -> Argument:
    return Argument(type, default, "read", note)


def _refused(type: Any, default: Any, note: str) -> Argument:
    return Argument(type, default, "refused", note)


def _void(type: Any, default: Any, note: str) -> Argument:
    return Argument(type, default, "no meaning", note)


_NO_HUB = "nothing is uploaded"
_OWN_OPTIMIZER = "give optimizers=, optimizer_factory= or optimizer_cls_and_kwargs= to the Trainer"

ARGUMENTS: dict[str, Argument] = {
    "output_dir": _read(str | None, None),
    "per_device_train_batch_size": _read(int, 8),
    "num_train_epochs": _read(float, 3.0),
    "max_steps": _read(int, -1),
    "learning_rate": _read(float, 5e-5),
    "lr_scheduler_type": _read(str, "linear", "all but reduce_lr_on_plateau and greedy, which are refused"),
    "lr_scheduler_kwargs": _read(dict | str | None, None),
    "warmup_steps": _read(float, 0),
    "optim": _read(str, "adamw_torch_fused", "adamw_torch_fused, adamw_torch, sgd; others are refused"),
    "optim_args": _refused(str | None, None, f"no optimizer that optim names takes any; {_OWN_OPTIMIZER}"),
    "weight_decay": _read(float, 0.0),
    "adam_beta1": _read(float, 0.9),
    "adam_beta2": _read(float, 0.999),
    "adam_epsilon": _read(float, 1e-8),
    "optim_target_modules": _refused(
        None | str | list[str], None, "GaLore and APOLLO are not available; give optimizer_groups= to the Trainer"
    ),
    "gradient_accumulation_steps": _read(int, 1),
    "average_tokens_across_devices": _refused(
        bool, True, "the loss of a step is always the mean over the targets of all ranks; leave it out"
    ),
    "max_grad_norm": _read(float, 1.0),
    "label_smoothing_factor": _read(float, 0.0, "as there, in evaluation too"),
    "bf16": _read(bool, False),
    "fp16": _read(bool, False),
    "bf16_full_eval": _refused(bool, False, "evaluation uses the weights of training; set bf16, or cast the model"),
    "fp16_full_eval": _refused(bool, False, "evaluation uses the weights of training; set fp16, or cast the model"),
    "tf32": _read(bool | None, None, "as there; torch_compile alone does not turn it on"),
    "activation_checkpointing": _read(bool | None, None),
    "activation_checkpointing_kwargs": _read(
        dict[str, Any] | str | None, None, "every_n_layers, preserve_rng_state, determinism_check; others are refused"
    ),
    "gradient_checkpointing": _read(bool | None, None),
    "gradient_checkpointing_kwargs": _read(dict[str, Any] | str | None, None, "as activation_checkpointing_kwargs"),
    "torch_compile": _read(bool, False, "as torch_compile_scope says"),
    "torch_compile_backend": _read(str | None, None),
    "torch_compile_mode": _read(str | None, None),
    "use_liger_kernel": _refused(
        bool, False, "models are not patched; give fused_loss_factory= to the Trainer, or loss=liger in a recipe"
    ),
    "liger_kernel_config": _refused(dict[str, bool] | None, None, "models are not patched; leave it out"),
    "use_cache": _refused(bool, False, "training keeps no keys and values; leave it out"),
    "neftune_noise_alpha": _refused(
        float | None, None, "not available; add the noise in a forward hook on the model's embeddings"
    ),
    "torch_empty_cache_steps": _refused(
        int | None, None, "the cache is released where that wins memory; set gc_threshold, gc_steps"
    ),
    "auto_find_batch_size": _refused(
        bool, False, "a new attempt needs a new process; use `forgather train auto_find_batch_size=true`"
    ),
    "logging_strategy": _read(str, "steps"),
    "logging_steps": _read(float, 500),
    "logging_first_step": _read(bool, False),
    "log_on_each_node": _void(bool, True, "rank 0 speaks for all"),
    "logging_nan_inf_filter": _void(bool, True, "a loss that is not finite is shown, and ends the run"),
    "include_num_input_tokens_seen": _void(str | bool, "no", "total_tokens is in every log"),
    "log_level": _read(str, "passive", "the level of the logger forgather_cli on rank 0"),
    "log_level_replica": _read(str, "warning", "its level on the other ranks"),
    "disable_tqdm": _read(bool | None, None, "True: no progress is shown"),
    "report_to": _read(
        None | str | list[str], "none", "as there: tensorboard (in OUTPUT_DIR/tensorboard), and Accelerate's trackers"
    ),
    "run_name": _read(str | None, None, "of the run in trackers"),
    "project": _read(str, "huggingface", "of the run in trackers"),
    "trackio_space_id": _read(str | None, None, "by that library's TrackioCallback"),
    "trackio_bucket_id": _read(str | None, None, "by that library's TrackioCallback"),
    "trackio_static_space_id": _read(str | None | Literal[False], None, "by that library's TrackioCallback"),
    "eval_strategy": _read(str, "no"),
    "eval_steps": _read(float | None, None),
    "eval_delay": _read(float, 0),
    "per_device_eval_batch_size": _read(int, 8),
    "prediction_loss_only": _read(bool, False),
    "eval_on_start": _read(bool, False),
    "eval_do_concat_batches": _refused(bool, True, "predictions are one padded array; cut them up in compute_metrics"),
    "eval_use_gather_object": _void(bool, False, "ranks exchange arrays of any shape"),
    "eval_accumulation_steps": _read(int | None, None, "as there; without it after every batch"),
    "include_for_metrics": _read(list[str], []),
    "batch_eval_metrics": _refused(
        bool, False, "compute_metrics gets all predictions at once; make them small in preprocess_logits_for_metrics"
    ),
    "save_only_model": _read(bool, False, "as there: such a checkpoint is no place to resume from"),
    "save_strategy": _read(str, "steps", "as there; best saves at the end too"),
    "save_steps": _read(float, 500),
    "save_on_each_node": _refused(
        bool, False, "ranks write one checkpoint together; give an output_dir that all nodes see"
    ),
    "save_total_limit": _read(int | None, None, "as there; the best checkpoint comes on top"),
    "enable_jit_checkpoint": _refused(
        bool, False, "a Trainer installs no signal handlers; give should_stop=, a function that tells of signals"
    ),
    "push_to_hub": _refused(bool, False, f"{_NO_HUB}; use `forgather finalize` and `hf upload` after training"),
    "hub_token": _void(str | None, None, _NO_HUB),
    "hub_private_repo": _void(bool | None, None, _NO_HUB),
    "hub_model_id": _void(str | None, None, _NO_HUB),
    "hub_strategy": _void(str, "every_save", _NO_HUB),
    "hub_always_push": _void(bool, False, _NO_HUB),
    "hub_revision": _void(str | None, None, _NO_HUB),
    "load_best_model_at_end": _read(bool, False, "as there; a save evaluates first where no evaluation was due"),
    "metric_for_best_model": _read(str | None, None),
    "greater_is_better": _read(bool | None, None),
    "ignore_data_skip": _read(bool, False),
    "restore_callback_states_from_checkpoint": _void(
        bool, False, "callbacks with a state_dict always come back; leave them out by resume_components"
    ),
    "full_determinism": _read(bool, False, "as deterministic, without CUDA_LAUNCH_BLOCKING, which changes no number"),
    "seed": _read(int, 42),
    "data_seed": _read(int | None, None),
    "use_cpu": _read(bool, False),
    "accelerator_config": _read(
        dict | str | None, None, "dispatch_batches; others are refused unless at their default"
    ),
    "parallelism_config": _refused(str | None, None, "not available; choose a strategy instead"),
    "dataloader_drop_last": _read(bool, False, "an incomplete global batch, where that library drops a micro-batch"),
    "dataloader_num_workers": _read(int, 0),
    "dataloader_pin_memory": _read(bool, True, "as there, on CUDA"),
    "dataloader_persistent_workers": _read(bool, False),
    "dataloader_prefetch_factor": _read(int | None, None),
    "dataloader_multiprocessing_context": _refused(
        str | None, None, "workers start as torch's default says; call torch.multiprocessing.set_start_method"
    ),
    "dataloader_in_order": _refused(bool, True, "a resume needs to know the order; leave it out"),
    "remove_unused_columns": _read(bool, True, "what forward does not name is left out of dict samples"),
    "label_names": _read(list[str] | None, None, "one name; several are refused"),
    "train_sampling_strategy": _read(str, "random", "random, sequential, group_by_length; evaluation stays in order"),
    "length_column_name": _read(str, "length", "as there; without such a column samples are read once at start"),
    "ddp_find_unused_parameters": _read(bool | None, None),
    "ddp_bucket_cap_mb": _read(int | None, None),
    "ddp_broadcast_buffers": _read(bool | None, None),
    "ddp_static_graph": _read(bool | None, None),
    "ddp_backend": _refused(
        str | None, None, "gloo on CPU and nccl on CUDA; for others make the process group before the Trainer"
    ),
    "ddp_timeout": _read(int, 1800, "as hang_timeout, in seconds"),
    "fsdp": _read(str | None, None, "FSDP2: true, or full_shard, shard_grad_op, offload, auto_wrap"),
    "fsdp_config": _read(dict[str, Any] | str | None, None, "of FSDP2, also as a JSON file"),
    "deepspeed": _refused(dict | str | None, None, "DeepSpeed is not available; set fsdp=true"),
    "debug": _refused(str, "", "not available; set detect_anomaly=True, or use callbacks.divergence"),
    "skip_memory_metrics": _void(bool, True, "peak_mem_allocated is in every log"),
    "do_train": _void(bool, False, "kept for the script to read"),
    "do_eval": _void(bool, False, "kept for the script to read"),
    "do_predict": _void(bool, False, "kept for the script to read"),
    "resume_from_checkpoint": _read(str | None, None, "also by train()"),
    "local_rank": _void(int, -1, "ranks are those of torchrun's environment"),
}
"""In that library's order."""

_OLD_NAMES = {
    "evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu", "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
}  # fmt: skip
"""Names of transformers 4 that scripts still use."""
_GONE = ("save_safetensors", "include_tokens_per_second")
"""Arguments of transformers 4 that are always so here."""


def read_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments as values of its settings. Raises ConfigError with all that is refused.

    What is in no table here is handed on: a recipe's setting, or a name that decoding will not know.
    """
    given = {name: getattr(value, "value", value) for name, value in given.items() if name not in _GONE}  # enums too
    for old, new in _OLD_NAMES.items():
        value = given.pop(old, None)
        if value and given.get(new, ARGUMENTS[new].default) == ARGUMENTS[new].default:
            given[new] = "group_by_length" if old == "group_by_length" else value
    values = {name: value for name, value in given.items() if name not in ARGUMENTS}
    problems: list[str] = []
    for name, value in given.items():
        argument = ARGUMENTS.get(name)
        if argument is None or value == argument.default or argument.how == "no meaning":
            continue
        if argument.how == "refused":
            if value not in (None, [], ""):
                why, remedy = argument.note.split("; ", 1)
                problems.append(f"{name}: {why}, got {value!r}; {remedy}")
        else:
            try:
                values |= _READERS[name](value, given) if name in _READERS else {name: value}
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    if "eval_steps" not in values and "logging_steps" in values and values.get("eval_strategy", "no") == "steps":
        values["eval_steps"] = values["logging_steps"]
    return values


# -------------------------------------------------------------------------------------- arguments that need a reading


def _steps(name: str) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    return lambda value, given: {name: int(value) if isinstance(value, float) and value.is_integer() else value}


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """A dict, its JSON text, or a JSON file with it."""
    if isinstance(value, str):
        try:
            value = json.loads(value if value.startswith("{") else Path(value).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: {value!r} is no readable JSON ({error}); give a dict or a file") from None
    if hasattr(value, "to_dict"):  # accelerate's AcceleratorConfig
        value = value.to_dict()
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must be a dict, its JSON text, or a JSON file, got {value!r}")
    return value


def _none_left(name: str, left: dict[str, Any], defaults: dict[str, Any], known: str) -> None:
    """Raise ConfigError for what nobody reads and is not what it always is here."""
    problems = [
        f"{name}.{key}: nothing reads it, got {value!r}; {known} are read: leave it out"
        for key, value in left.items()
        if key not in defaults or value != defaults[key]
    ]
    if problems:
        raise ConfigError(problems)


def _checkpointing_kwargs(name: str) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    takes = ("every_n_layers", "preserve_rng_state", "determinism_check")

    def read(value: Any, given: dict[str, Any]) -> dict[str, Any]:
        kwargs = _mapping(name, value)
        left = {key: each for key, each in kwargs.items() if key not in takes}
        _none_left(name, left, {"use_reentrant": False, "offload": False}, ", ".join(takes))
        found = {key: each for key, each in kwargs.items() if key in takes}
        every = found.pop("every_n_layers", None)
        if every is not None and given.get("gradient_checkpointing_every", 1) != 1:
            raise ConfigError(f"gradient_checkpointing_every: {name}.every_n_layers says it, got both; leave one out")
        return {"gradient_checkpointing_kwargs": found} | (
            {} if every is None else {"gradient_checkpointing_every": every}
        )

    return read


def _accelerator_config(value: Any, given: dict[str, Any]) -> dict[str, Any]:
    config = dict(_mapping("accelerator_config", value))
    dispatch = config.pop("dispatch_batches", None)
    defaults = {
        "split_batches": False, "even_batches": True, "use_seedable_sampler": True, "non_blocking": False,
        "gradient_accumulation_kwargs": None, "use_configured_state": False,
    }  # fmt: skip
    _none_left("accelerator_config", config, defaults, "dispatch_batches")
    return {} if dispatch is None else {"dispatch_batches": dispatch}


def _fsdp(value: Any, given: dict[str, Any]) -> dict[str, Any]:
    """FSDP2's settings, of ``fsdp`` and ``fsdp_config`` together."""
    if is_dataclass(value):
        return {"fsdp": vars(value)}
    options = value.split() if isinstance(value, str) else [] if value is True else list(value or ())
    if not options and value is not True:
        return {}
    config = _mapping("fsdp_config", given.get("fsdp_config") or {})
    keys = {key if key.startswith("fsdp_") else f"fsdp_{key}": each for key, each in config.items()}
    if "fsdp_cpu_offload" in keys:
        keys["fsdp_offload_params"] = keys.pop("fsdp_cpu_offload")
    for option in (getattr(option, "value", option) for option in options):
        if option in ("full_shard", "shard_grad_op"):
            keys.setdefault("fsdp_reshard_after_forward", option == "full_shard")
        elif option == "offload":
            keys.setdefault("fsdp_offload_params", True)
        elif str(option).lower() not in ("auto_wrap", "true"):
            raise ConfigError(
                f"fsdp: use true, full_shard, shard_grad_op, offload or auto_wrap, got {option!r}; for shards within "
                "each node give trainer=FSDP2Settings(replicate=...)"
            )
    found = fsdp_settings(keys)
    sharding = {key.removeprefix("trainer."): each for key, each in found.items() if key.startswith("trainer.")}
    rest = {key: each for key, each in found.items() if not key.startswith("trainer.")}
    return {"fsdp": {"type": "fsdp2", **sharding}, **rest}


def _fsdp_config(value: Any, given: dict[str, Any]) -> dict[str, Any]:
    if value and not given.get("fsdp"):
        raise ConfigError(f"fsdp_config: nothing reads it without fsdp, got {value!r}; set fsdp=True, or leave it out")
    return {}


def _metric(value: Any, given: dict[str, Any]) -> dict[str, Any]:
    greater = given.get("greater_is_better")
    return {"metric_for_best_model": value, "greater_is_better": not str(value).endswith("loss")} | (
        {} if greater is None else {"greater_is_better": greater}
    )


def _label_names(value: Any, given: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 1:
        raise ConfigError(f"label_names: the loss compares one tensor of labels, got {value!r}; name that one")
    return {"label_names": value}


_READERS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "num_train_epochs": lambda value, given: {"num_train_epochs": float(value) if isinstance(value, int) else value},
    "logging_steps": _steps("logging_steps"),
    "eval_steps": _steps("eval_steps"),
    "save_steps": _steps("save_steps"),
    "lr_scheduler_kwargs": lambda value, given: {"lr_scheduler_kwargs": _mapping("lr_scheduler_kwargs", value)},
    "activation_checkpointing": lambda value, given: {"gradient_checkpointing": value},
    "activation_checkpointing_kwargs": _checkpointing_kwargs("activation_checkpointing_kwargs"),
    "gradient_checkpointing_kwargs": _checkpointing_kwargs("gradient_checkpointing_kwargs"),
    "torch_compile_backend": lambda value, given: {"torch_compile": True, "torch_compile_backend": value},
    "torch_compile_mode": lambda value, given: {"torch_compile": True, "torch_compile_mode": value},
    "report_to": lambda value, given: {"report_to": services(value)},
    "metric_for_best_model": _metric,
    "full_determinism": lambda value, given: {"deterministic": value},
    "use_cpu": lambda value, given: {"use_cpu": value, "device": "cpu"} if value else {},
    "accelerator_config": _accelerator_config,
    "label_names": _label_names,
    "ddp_timeout": lambda value, given: {"hang_timeout": value},
    "fsdp": _fsdp,
    "fsdp_config": _fsdp_config,
}
"""Argument -> the settings that its value stands for; the rest stand for themselves."""

"""``TrainingArguments``: the run-level settings for Python users, under Hugging Face's names and with its defaults."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from forgather_cli.config.decode import decode_settings, to_tree
from forgather_cli.config.schema import (
    HF_PROJECT,
    AdafactorSettings,
    AdamWSettings,
    BF16Settings,
    CallbackSettings,
    Config,
    ConstantSettings,
    CosineSettings,
    CrossEntropySettings,
    DDPSettings,
    FP16Settings,
    FP32Settings,
    GroupSettings,
    InfoSettings,
    InverseSqrtSettings,
    JsonSettings,
    LinearSettings,
    LossOption,
    MetricsSettings,
    OptimizerOption,
    PrecisionOption,
    ProgressSettings,
    RunSettings,
    SchedulerOption,
    SGDSettings,
    SingleSettings,
    TrainerOption,
    settings,
)
from forgather_cli.distributed import world_size
from forgather_cli.errors import ConfigError
from forgather_cli.strategies.base import Strategy

# where a Hugging Face script relies on a default that differs from a recipe's (transformers 5.23, training_args.py)
_HF_DEFAULTS: dict[str, Any] = {
    "output_dir": "trainer_output",
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "num_train_epochs": 3.0,
    "logging_steps": 500,
    "logging_first_step": False,
    "eval_strategy": "no",
    "save_total_limit": None,
    "dataloader_drop_last": False,
}
# that library decays embeddings, a recipe does not (transformers 5.23, Trainer.get_decay_parameter_names)
_HF_GROUPS = {"no_decay": GroupSettings(regex=r"norm\w*\.weight$|bias$", settings={"weight_decay": 0.0})}
# settings of that library that change nothing here, with the reason why it is safe to accept them
_ACCEPTED = {
    "report_to", "disable_tqdm", "remove_unused_columns", "label_names", "log_level", "save_safetensors",
    "data_seed", "do_train", "do_eval", "do_predict", "include_num_input_tokens_seen", "logging_nan_inf_filter",
    "group_by_length", "save_only_model", "eval_do_concat_batches",
}  # fmt: skip
_RENAMED = {"evaluation_strategy": "eval_strategy", "include_tokens_per_second": None, "no_cuda": "use_cpu"}
_FALSE_ONLY = {"push_to_hub", "fp16_full_eval", "bf16_full_eval", "use_liger_kernel", "auto_find_batch_size"}


@settings
class HFSettings(RunSettings):
    """``RunSettings`` and the ``TrainingArguments`` names that stand for whole groups in a recipe."""

    optim: str = "adamw_torch_fused"
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0.0  # below 1: a fraction of all steps
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    bf16: bool = False
    fp16: bool = False
    use_cpu: bool = False
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    dispatch_batches: bool | None = None  # as a recipe's data.dispatch_batches
    dispatch_eval_batches: bool | None = None
    run_name: str | None = None  # with project, for callbacks of that library that send metrics to a service
    project: str = HF_PROJECT


@settings
class Groups:
    """A recipe's groups as a Python user gave them; None: what the Hugging Face names say."""

    trainer: TrainerOption | None = None
    precision: PrecisionOption | None = None
    optimizer: OptimizerOption | None = None
    lr_scheduler: SchedulerOption | None = None
    loss: LossOption | None = None


_STAND_FOR = {
    "trainer": ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    "precision": ("bf16", "fp16"),
    "optimizer": ("optim", "adam_beta1", "adam_beta2", "adam_epsilon"),
    "lr_scheduler": ("lr_scheduler_type", "warmup_steps"),
}
"""Group -> the Hugging Face names that stand for it."""


class TrainingArguments(HFSettings):
    """``TrainingArguments("out", max_steps=100, ...)``; unknown names and wrong types raise ConfigError.

    Takes every run-level setting of a recipe besides the Hugging Face names ``optim``, ``lr_scheduler_type``,
    ``warmup_steps``, ``warmup_ratio``, ``adam_beta1/2``, ``adam_epsilon``, ``bf16``, ``fp16``, ``use_cpu`` and
    ``ddp_*``; in a process that torchrun or the like has started beside others, ranks train data-parallel. Defaults are
    Hugging Face's where a script would notice: learning rate 5e-5, 3 epochs, logging every 500 steps, no evaluation.

    A recipe's groups ``trainer``, ``precision``, ``optimizer``, ``lr_scheduler`` and ``loss`` go by their names too: an
    option's name (``trainer="fsdp2"``), its settings (``trainer=FSDP2Settings(cpu_offload=True)``), or a dict with
    ``type`` or ``_target_``. One that is given stands in the place of the Hugging Face names for it.
    """

    def __init__(self, output_dir: str | None = None, **kwargs: Any) -> None:
        own = {f.name: kwargs.pop(f.name, None) for f in dataclasses.fields(Groups)}
        values = {**_HF_DEFAULTS, **_translate(kwargs)}
        if output_dir is not None:
            values["output_dir"] = str(output_dir)
        checked = decode_settings(HFSettings, values)
        for f in dataclasses.fields(checked):
            object.__setattr__(self, f.name, getattr(checked, f.name))
        if self.bf16 and self.fp16:
            raise ConfigError("fp16: excludes bf16, got True for both; set one of them")
        self.groups = as_groups(own)
        self.typed = {group: name for group, names in _STAND_FOR.items() for name in self.given.intersection(names)}
        """Group -> the name that says something of it."""
        for group, names in _STAND_FOR.items():
            twice = self.given.intersection(names) if own[group] is not None else ()
            for name in twice:
                raise ConfigError(f"{name}: {group} says it, got both; leave {name} out")

    @property
    def given(self) -> frozenset[str]:
        """Settings that differ from their defaults."""
        defaults = {f.name: f.default for f in dataclasses.fields(HFSettings)} | _HF_DEFAULTS
        return frozenset(name for name, default in defaults.items() if getattr(self, name) != default)

    @property
    def optimizer(self) -> OptimizerOption:
        """The option that ``optim`` names, or the group. Raises ConfigError."""
        if self.groups.optimizer is not None:
            return self.groups.optimizer
        if self.optim in ("adamw_torch", "adamw_torch_fused"):
            fused = None if self.optim == "adamw_torch_fused" else False
            betas = (self.adam_beta1, self.adam_beta2)
            return AdamWSettings(betas=betas, eps=self.adam_epsilon, fused=fused, groups=_HF_GROUPS)
        if self.optim in ("adafactor", "sgd"):
            return AdafactorSettings(groups=_HF_GROUPS) if self.optim == "adafactor" else SGDSettings(groups=_HF_GROUPS)
        raise ConfigError(
            f"optim: got {self.optim!r}; use adamw_torch_fused, adamw_torch, adafactor, sgd, or give optimizer_factory"
        )

    @property
    def lr_scheduler(self) -> SchedulerOption:
        """The option that ``lr_scheduler_type`` names, or the group. Raises ConfigError."""
        if self.groups.lr_scheduler is not None:
            return self.groups.lr_scheduler
        options: dict[str, SchedulerOption] = {
            "linear": LinearSettings(warmup_steps=self.warmup_steps),
            "cosine": CosineSettings(warmup_steps=self.warmup_steps, min_lr_ratio=0.0),
            "constant": ConstantSettings(),
            "constant_with_warmup": ConstantSettings(warmup_steps=self.warmup_steps),
            "inverse_sqrt": InverseSqrtSettings(warmup_steps=self.warmup_steps),
        }
        if self.lr_scheduler_type not in options:
            names = ", ".join(options)
            raise ConfigError(
                f"lr_scheduler_type: got {self.lr_scheduler_type!r}; use {names}, or give lr_scheduler_factory"
            )
        return options[self.lr_scheduler_type]

    @property
    def trainer(self) -> TrainerOption:
        """As given, else data parallel in one of several processes (torchrun, ``accelerate launch``), or one device."""
        if self.groups.trainer is not None:
            return self.groups.trainer
        if world_size() == 1:
            return SingleSettings()
        return DDPSettings(
            find_unused_parameters=bool(self.ddp_find_unused_parameters),
            bucket_cap_mb=self.ddp_bucket_cap_mb,
            broadcast_buffers=self.ddp_broadcast_buffers is not False,
        )

    @property
    def precision(self) -> PrecisionOption:
        if self.groups.precision is not None:
            return self.groups.precision
        if self.fp16:
            return FP16Settings()
        return BF16Settings() if self.bf16 else FP32Settings()

    @property
    def callbacks(self) -> CallbackSettings:
        """What every run shows and writes; the Trainer's own ``callbacks`` come after these."""
        shown = ProgressSettings()
        return CallbackSettings(metrics=MetricsSettings(), info=InfoSettings(), progress=shown, json=JsonSettings())

    @property
    def loss(self) -> LossOption:
        return self.groups.loss or CrossEntropySettings()


def as_groups(given: dict[str, Any]) -> Groups:
    """Options by group, each as its name, its settings, or a dict. Raises ConfigError with all that is wrong."""
    trees: dict[str, Any] = {}
    for group, option in given.items():
        if isinstance(option, str):
            trees[group] = {"type": option}
        elif option is not None:
            trees[group] = to_tree(option) if dataclasses.is_dataclass(option) else option
    return decode_settings(Groups, trees)


def _translate(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face spellings to ours; what asks for something that does not exist here raises ConfigError."""
    values: dict[str, Any] = {}
    for key, value in kwargs.items():
        if key in _ACCEPTED and key not in RunSettings.__dataclass_fields__:
            continue
        if key in _FALSE_ONLY:
            if value:
                raise ConfigError(f"{key}: not available, got {value!r}; leave it out")
            continue
        name = _RENAMED.get(key, key)
        if name is None:
            continue
        values[name] = getattr(value, "value", value)  # Hugging Face's enums
    ratio = values.pop("warmup_ratio", 0.0)
    if ratio and not values.get("warmup_steps"):
        values["warmup_steps"] = ratio
    if values.pop("use_cpu", False):
        values["device"] = "cpu"
    if "num_train_epochs" in values:
        values["num_train_epochs"] = float(values["num_train_epochs"])
    return values


def as_arguments(args: Config | TrainingArguments | dict[str, Any] | None) -> Config | TrainingArguments:
    """What a Trainer takes as ``args``: a recipe's settings, TrainingArguments, a dict of their names, or nothing."""
    if isinstance(args, (Config, TrainingArguments)):
        return args
    if args is None or isinstance(args, dict):
        return TrainingArguments(**(args or {}))
    raise ConfigError(f"args: got a {type(args).__name__}; give TrainingArguments or a dict of its settings")


def placed(
    args: Config | TrainingArguments, given: Strategy | TrainerOption | str | None
) -> tuple[Config | TrainingArguments, Strategy | None]:
    """``args`` and the strategy that was made already; an option in its place is ``args``'s. Raises ConfigError."""
    if given is None or isinstance(given, Strategy):
        return args, given
    trainer = as_groups({"trainer": given}).trainer
    assert trainer is not None
    if isinstance(args, Config):
        return dataclasses.replace(args, trainer=trainer), None
    if args.groups.trainer is not None:
        raise ConfigError("strategy: trainer in args says it too; leave one of the two out")
    changed = copy.copy(args)
    changed.groups = dataclasses.replace(args.groups, trainer=trainer)
    changed.typed = {**args.typed, "trainer": "strategy"}
    return changed, None

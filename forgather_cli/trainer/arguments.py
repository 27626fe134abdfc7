"""``TrainingArguments``: the run-level settings for Python users, under Hugging Face's names and with its defaults."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from dataclasses import field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from forgather_cli.config.decode import decode_settings, to_tree, without_tokens
from forgather_cli.config.schema import (
    AdamWSettings,
    BF16Settings,
    CallbackSettings,
    Config,
    CrossEntropySettings,
    DDPSettings,
    FilePath,
    FP16Settings,
    FP32Settings,
    Fraction,
    FSDP2Settings,
    GroupSettings,
    InfoSettings,
    Interval,
    JsonSettings,
    LossOption,
    MetricsSettings,
    NonNegative,
    OptimizerOption,
    PositiveInt,
    PrecisionOption,
    Probability,
    ProgressSettings,
    RunSettings,
    SchedulerOption,
    SGDSettings,
    SingleSettings,
    Steps,
    TensorboardSettings,
    TrackersSettings,
    TrainerOption,
    TransformersScheduleSettings,
    settings,
)
from forgather_cli.distributed import world_size
from forgather_cli.errors import ConfigError
from forgather_cli.hardware import without_auto
from forgather_cli.optim import transformers_schedules
from forgather_cli.strategies.base import Strategy
from forgather_cli.targets import kept
from forgather_cli.trainer.aliases import ALIASES, without_aliases
from forgather_cli.trainer.hugging_face import ARGUMENTS, read_arguments

LogLevel = Literal["passive", "detail", "debug", "info", "warning", "error", "critical"]

# that library decays embeddings, a recipe does not (transformers 5.23, Trainer.get_decay_parameter_names)
_HF_GROUPS = {"no_decay": GroupSettings(regex=r"norm\w*\.weight$|bias$", settings={"weight_decay": 0.0})}


HF_PROJECT = "huggingface"
"""Hugging Face's name for a project without a name."""


@settings
class ScriptSettings:
    """Settings that only TrainingArguments have. The defaults are what holds for a recipe, whose data have the columns
    that the model takes and are in the order of its seed.
    """

    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    data_seed: int | None = None
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = "random"
    length_column_name: str = "length"
    remove_unused_columns: bool = False
    label_names: list[str] | None = None
    prediction_loss_only: bool = False
    include_for_metrics: list[Literal["inputs", "loss"]] = field(default_factory=list)
    eval_accumulation_steps: PositiveInt | None = None
    save_only_model: bool = False
    debug_optimizer_groups: bool = False
    tf32: bool | None = None
    log_level: LogLevel = "passive"
    log_level_replica: LogLevel = "warning"


@settings
class HFSettings(RunSettings, ScriptSettings):
    """``RunSettings`` with Hugging Face's defaults, and names of ``TrainingArguments`` that a recipe does not have.

    ``trainer/hugging_face.py`` has a table of what is done with each of that library's arguments.
    """

    output_dir: FilePath | None = "trainer_output"
    torch_compile: bool = False
    learning_rate: NonNegative = 5e-5
    weight_decay: NonNegative = 0.0
    num_train_epochs: float = 3.0
    logging_steps: Steps = 500
    logging_first_step: bool = False
    eval_strategy: Interval = "no"
    eval_steps: Steps = 500
    save_total_limit: PositiveInt | None = None
    dataloader_drop_last: bool = False
    gc_threshold: Fraction | None = 0.5
    construct_model_on: Literal["default", "meta", "device"] = "default"  # type: ignore[assignment]

    optim: str = "adamw_torch_fused"
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    warmup_steps: NonNegative = 0  # below 1: a fraction of all steps
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    label_smoothing_factor: Probability = 0.0
    bf16: bool = False
    fp16: bool = False
    use_cpu: bool = False
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None
    fsdp: FSDP2Settings | None = None  # with what fsdp_config says
    dispatch_batches: bool | None = None  # as a recipe's data.dispatch_batches
    dispatch_eval_batches: bool | None = None
    remove_unused_columns: bool = True
    disable_tqdm: bool | None = None
    report_to: list[str] = field(default_factory=list)
    run_name: str | None = None  # with project, for callbacks that send metrics to a service
    project: str = HF_PROJECT
    trackio_space_id: str | None = None
    trackio_bucket_id: str | None = None
    trackio_static_space_id: str | Literal[False] | None = None


@settings
class Groups:
    """A recipe's groups as a Python user gave them; None: what the Hugging Face names say."""

    trainer: TrainerOption | None = None
    precision: PrecisionOption | None = None
    optimizer: OptimizerOption | None = None
    lr_scheduler: SchedulerOption | None = None
    loss: LossOption | None = None


_STAND_FOR = {
    "trainer": ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "fsdp"),
    "precision": ("bf16", "fp16"),
    "optimizer": ("optim", "adam_beta1", "adam_beta2", "adam_epsilon"),
    "lr_scheduler": ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    "loss": ("label_smoothing_factor",),
}
"""Group -> the Hugging Face names that stand for it."""


_RENAMES = {"torch_compile_full_graph", "best_model_metric"}
"""Of ``ALIASES``, those whose values are those of what they stand for."""


class HuggingFaceNames:
    """What callbacks written for Hugging Face ask of ``args`` besides the settings themselves.

    Names are those that ``transformers.integrations`` reads (transformers 5.23): TensorBoard, WandB, Trackio, MLflow,
    Comet, ClearML, Neptune, DVCLive, SwanLab, CodeCarbon.
    """

    per_device_train_batch_size: int
    per_device_eval_batch_size: int

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def process_index(self) -> int:
        """This process among all of the job."""
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        """This process among those of its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def train_batch_size(self) -> int:
        """Sequences per rank and micro-step."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, options of groups as dicts, tokens as their names in angle brackets."""
        tree: dict[str, Any] = without_tokens(to_tree(self))
        return tree

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """``to_dict`` and the batch sizes; what is no number, text or bool as a text."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {key: each if isinstance(each, bool | int | float | str) else str(each) for key, each in values.items()}


class RecipeArguments(HuggingFaceNames):
    """What callbacks get as ``args`` in a run of a recipe: its settings, under the names of that library."""

    def __init__(self, config: Config) -> None:
        self._config = config
        vars(self).update(vars(ScriptSettings()))
        vars(self).update(vars(config))
        self.dispatch_batches, self.dispatch_eval_batches = config.dispatch_batches, config.dispatch_eval_batches
        # as callbacks.trackers calls a run
        self.run_name = None if config.output_dir is None else Path(config.output_dir).resolve().name
        self.project = HF_PROJECT
        self.report_to: list[str] = []  # a recipe gives services as callbacks
        self.disable_tqdm = self.hub_private_repo = self.trackio_space_id = self.trackio_bucket_id = None
        self.trackio_static_space_id = False  # no Space is made or frozen

    def to_dict(self) -> dict[str, Any]:
        tree: dict[str, Any] = without_tokens(to_tree(self._config))
        return {**tree, "run_name": self.run_name}


class TrainingArguments(HFSettings, HuggingFaceNames):
    """``TrainingArguments("out", max_steps=100, ...)``; unknown names and wrong types raise ConfigError.

    Takes every run-level setting of a recipe, and each of Hugging Face's arguments as ``trainer/hugging_face.py`` says,
    with its defaults: learning rate 5e-5, 3 epochs, logging every 500 steps, no evaluation; and the names of
    ``trainer/aliases.py``. In a process that torchrun
    or the like has started beside others, ranks train data-parallel, or with ``fsdp`` sharded.

    A recipe's groups ``trainer``, ``precision``, ``optimizer``, ``lr_scheduler`` and ``loss`` go by their names too: an
    option's name (``trainer="fsdp2"``), its settings (``trainer=FSDP2Settings(cpu_offload=True)``), or a dict with
    ``type`` or ``_target_``. One that is given stands in the place of the Hugging Face names for it.
    """

    def __init__(self, output_dir: str | os.PathLike[str] | None = None, *further: Any, **kwargs: Any) -> None:
        if further:
            raise ConfigError(
                f"TrainingArguments: only output_dir goes by its place, got {1 + len(further)} arguments in a row; "
                "give the others by name, as max_steps=100"
            )
        if not isinstance(output_dir, str | os.PathLike | None):
            remedy = (
                "write TrainingArguments(**settings) for a dict of settings"
                if isinstance(output_dir, dict)
                else ("give the path of a directory")
            )
            raise ConfigError(f"output_dir: got a {type(output_dir).__name__}; {remedy}")
        if output_dir is not None:
            kwargs["output_dir"] = str(output_dir)
        kept = {name: kwargs.get(name, argument.default) for name, argument in ARGUMENTS.items()}
        kept |= {name: kwargs.get(name, alias.default) for name, alias in ALIASES.items()}
        # HfArgumentParser gives every argument, and what it gives at its default nobody has named
        parsed = kwargs.keys() >= _FIELDS.keys()
        named = {
            n for n, v in kwargs.items() if v is not None and not (parsed and n in _FIELDS and v == _FIELDS[n].default)
        }
        kwargs = without_aliases(kwargs, named)
        own = {f.name: kwargs.pop(f.name, None) for f in dataclasses.fields(Groups)}
        checked = decode_settings(HFSettings, read_arguments(kwargs))
        kept["do_eval"] = bool(kept["do_eval"]) or checked.eval_strategy != "no"  # as that library has it
        for name, value in {**kept, **vars(checked)}.items():
            object.__setattr__(self, name, value)
        if self.bf16 and self.fp16:
            raise ConfigError("fp16: excludes bf16, got True for both; set one of them")
        self.groups = as_groups(own)
        self.typed = {group: name for group, names in _STAND_FOR.items() for name in self.given.intersection(names)}
        self.typed |= {"precision": "mixed_precision"} if kept["mixed_precision"] is not None else {}
        self.typed |= {alias.excludes[0]: name for name, alias in ALIASES.items() if name in _RENAMES & named}
        """Group or setting -> the name that says something of it."""
        for group, names in _STAND_FOR.items():
            twice = self.given.intersection(names) if own[group] is not None else ()
            for name in twice:
                raise ConfigError(f"{name}: {group} says it, got both; leave {name} out")
        _ = self.optimizer, self.lr_scheduler  # what they name is known

    @property
    def given(self) -> frozenset[str]:
        """Settings that differ from their defaults."""
        return frozenset(name for name, default in vars(HFSettings()).items() if getattr(self, name) != default)

    @property
    def optimizer(self) -> OptimizerOption:
        """The option that ``optim`` names, or the group. Raises ConfigError."""
        if self.groups.optimizer is not None:
            return self.groups.optimizer
        if self.optim in ("adamw_torch", "adamw_torch_fused"):
            fused = None if self.optim == "adamw_torch_fused" else False
            betas = (self.adam_beta1, self.adam_beta2)
            return AdamWSettings(betas=betas, eps=self.adam_epsilon, fused=fused, groups=_HF_GROUPS)
        if self.optim == "sgd":
            return SGDSettings(groups=_HF_GROUPS)
        raise ConfigError(
            f"optim: got {self.optim!r}; use adamw_torch_fused, adamw_torch, sgd, or give optimizer_cls_and_kwargs"
        )

    @property
    def lr_scheduler(self) -> SchedulerOption:
        """The option that ``lr_scheduler_type`` and its kwargs name, or the group. Raises ConfigError."""
        if self.groups.lr_scheduler is not None:
            return self.groups.lr_scheduler
        transformers_schedules.check(self.lr_scheduler_type, self.lr_scheduler_kwargs, self.learning_rate)
        return TransformersScheduleSettings(
            name=self.lr_scheduler_type,
            kwargs=self.lr_scheduler_kwargs,
            warmup_steps=self.warmup_steps,
            reference_lr=self.learning_rate,
        )

    @property
    def trainer(self) -> TrainerOption:
        """As given, else data parallel in one of several processes (torchrun, ``accelerate launch``), or one device."""
        if self.groups.trainer is not None:
            return self.groups.trainer
        if self.fsdp is not None:
            return self.fsdp
        if world_size() == 1:
            return SingleSettings()
        return DDPSettings(
            find_unused_parameters=bool(self.ddp_find_unused_parameters),
            bucket_cap_mb=self.ddp_bucket_cap_mb,
            broadcast_buffers=self.ddp_broadcast_buffers is not False,
            static_graph=bool(self.ddp_static_graph),
        )

    @property
    def precision(self) -> PrecisionOption:
        if self.groups.precision is not None:
            return without_auto(self.groups.precision, self.device)[0]
        if self.fp16:
            return FP16Settings()
        return BF16Settings() if self.bf16 else FP32Settings()

    @property
    def callbacks(self) -> CallbackSettings:
        """What every run shows and writes, and ``report_to``; the Trainer's own ``callbacks`` come after these."""
        trackers = [name for name in self.report_to if name != "tensorboard"]
        return CallbackSettings(
            metrics=MetricsSettings(),
            info=InfoSettings(),
            progress=None if self.disable_tqdm else ProgressSettings(),
            json=JsonSettings(),
            tensorboard=TensorboardSettings() if "tensorboard" in self.report_to else None,
            trackers=TrackersSettings(names=trackers, project=self.project, run_name=self.run_name)
            if trackers
            else None,
        )

    @property
    def loss(self) -> LossOption:
        return self.groups.loss or CrossEntropySettings(label_smoothing=self.label_smoothing_factor)


def script_settings(args: Config | TrainingArguments) -> ScriptSettings:
    """What a script's arguments say beyond a recipe's settings."""
    return args if isinstance(args, TrainingArguments) else ScriptSettings()


def as_groups(given: dict[str, Any]) -> Groups:
    """Options by group, each as its name, its settings, or a dict. Raises ConfigError with all that is wrong."""
    trees: dict[str, Any] = {}
    for group, option in given.items():
        if isinstance(option, str):
            trees[group] = {"type": option}
        elif option is not None:
            trees[group] = _by_name(to_tree(option) if dataclasses.is_dataclass(option) else option)
    return decode_settings(Groups, trees)


def _by_name(option: Any) -> Any:
    """An option's settings with functions and classes that a script gave as ``_target_``."""
    if not isinstance(option, dict) or "_target_" in option:
        return option
    return {key: {"_target_": kept(value)} if callable(value) else value for key, value in option.items()}


def _fields() -> dict[str, Any]:
    """Dataclass fields for what reads them, Hugging Face's ``HfArgumentParser`` first of all: that library's arguments
    with its types and defaults, which its parser can take, and a recipe's settings of plain types.
    """
    hints = get_type_hints(HFSettings)
    found: list[tuple[str, Any, Any]] = []
    aliases = ((name, (alias.type, alias.default, "read", alias.stands_for)) for name, alias in ALIASES.items())
    for name, (hint, default, how, note) in (*ARGUMENTS.items(), *aliases):
        told = {"help": (note if how == "read" else f"{how}: {note}").replace("%", "%%")}
        made = field(default_factory=list, metadata=told) if default == [] else field(default=default, metadata=told)
        found.append((name, hint, made))
    for own in dataclasses.fields(HFSettings):
        hint = hints[own.name]
        kinds = [kind for kind in get_args(hint) if kind is not NoneType] or [hint]
        is_plain = get_origin(hint) is Literal or (len(kinds) == 1 and kinds[0] in (bool, int, float, str))
        if own.name not in {*ARGUMENTS, *ALIASES} and is_plain:
            found.append((own.name, hint, field(default=own.default)))
    return {each.name: each for each in dataclasses.fields(dataclasses.make_dataclass("_", found))}


_FIELDS = _fields()
setattr(TrainingArguments, "__dataclass_fields__", _FIELDS)  # noqa: B010
TrainingArguments.__annotations__ = {name: each.type for name, each in _FIELDS.items()}


def as_arguments(args: Config | TrainingArguments | dict[str, Any] | None) -> Config | TrainingArguments:
    """What a Trainer takes as ``args``: a recipe's settings, TrainingArguments, a dict of their names, or nothing."""
    if isinstance(args, Config):
        known = without_auto(args.precision, args.device)[0]
        return args if known is args.precision else dataclasses.replace(args, precision=known)
    if isinstance(args, TrainingArguments):
        return args
    if args is None or isinstance(args, dict):
        return TrainingArguments(**(args or {}))
    if type(args).__module__.startswith("transformers."):
        raise ConfigError(
            "args: got transformers' TrainingArguments; import TrainingArguments from forgather_cli, which takes what "
            "that takes"
        )
    raise ConfigError(
        f"args: got a {type(args).__name__}; give TrainingArguments(output_dir, ...) or a dict of its settings"
    )


def with_strategy(
    args: Config | TrainingArguments, given: Strategy | TrainerOption | str | None
) -> tuple[Config | TrainingArguments, Strategy | None]:
    """A Trainer's ``strategy`` argument: the object, if it is one; an option or its name replaces ``args.trainer``.

    Returns (``args``, the object or None). Raises ConfigError.
    """
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

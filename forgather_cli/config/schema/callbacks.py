"""The settings of the callbacks."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Le, Lt
from pydantic import BeforeValidator
from typing_extensions import dataclass_transform

from forgather_cli.config.schema.base import (
    NEEDS_EVALUATION,
    Count,
    FilePath,
    NonNegative,
    OnlyIf,
    Option,
    PositiveFloat,
    PositiveInt,
    Settings,
    Target,
    Void,
    by_type,
    only_if,
    settings,
    without_evaluation,
)
from forgather_cli.config.schema.sampling import GenerationConfig, Sampling
from forgather_cli.documents.regular_files import read_text, read_yaml
from forgather_cli.errors import ConfigError, did_you_mean
from forgather_cli.targets import is_installed

EVENTS = (
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_step_end",
    "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_evaluate", "on_predict", "on_prediction_step",
    "on_save", "on_log", "on_forward_backward_begin", "on_forward_backward_end", "on_train_metrics", "on_log_step",
    "on_divergence", "on_rollback", "on_exception",
)  # fmt: skip
"""What a callback may have methods for: Hugging Face's events (transformers 5.23), and from
``on_forward_backward_begin`` on our own."""


ADDS, SHOWS, ACTS = 0, 10, 20
"""Places at which events reach callbacks: those that add to the logs, those that show or write them, those that act."""


class CallbackPart(Option):
    """A callback that a config makes: its settings, which ``+callbacks.KEY={}`` adds.

    ``type = "KEY"``, without annotation, is no field, unlike that of other options: no tree has a ``type`` there.
    ``maker`` names a class that has ``BuiltIn[THE SETTINGS]`` as its base (``callbacks/base.py``; the events and what
    they are called with stand at ``TrainerCallback``). It is called with the settings, the run directory,
    ``config_tree=`` and ``stream=``.
    """

    place: ClassVar[int] = SHOWS
    """Events reach callbacks of a lower place first, then the user's own, which see ``on_log`` before the others."""
    counts: ClassVar[OnlyIf | None] = None
    """Under which settings it counts: ``NEEDS_EVALUATION``, or an ``OnlyIf`` of its own. None: under all."""


@settings
class MetricsSettings(CallbackPart):
    """Tokens per second, utilization and other numbers, in the logs."""

    maker: ClassVar[str] = "forgather_cli.callbacks.metrics:DefaultMetrics"
    type = "metrics"
    place: ClassVar[int] = ADDS

    peak_hardware_flops: PositiveFloat | None = None  # FLOP/s of one device, for mfu; null: from the table


PROGRESS_COLUMNS = (
    "step", "epoch", "loss", "rewards/accuracies", "rewards/margins", "bits_per_byte", "grad_norm", "learning_rate",
    "tok_per_sec", "step_time", "mfu", "peak_mem_allocated", "total_tokens",
)  # fmt: skip
PROGRESS_RESULTS = (
    "train_runtime", "train_loss", "epoch", "total_tokens", "tokens_per_second", "train_steps_per_second",
    "train_samples_per_second", "effective_batch_size", "flops_per_second",
)  # fmt: skip
"""Columns and results that the display has by default, in its order."""
FORMATS = ("si", "bytes", "duration", "flops")
"""Of a column, besides Python's format specifications."""


@settings
class ProgressSettings(CallbackPart):
    """A display of the run in the terminal."""

    maker: ClassVar[str] = "forgather_cli.callbacks.progress:ProgressCallback"
    type = "progress"

    header_interval: PositiveInt = 20  # table rows between two headers
    # name: {label, width, fmt}, merged over the defaults; null removes one
    step_columns: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    # name: {label, fmt, suffix}, merged over the defaults; null removes one
    final_metrics: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    output_stream: Literal["stdout", "stderr"] = "stdout"  # stdout, stderr
    # true: a table and rich's bar; false: plain lines; null: by whether there is a terminal
    use_tqdm: bool | None = None

    def problems(self, config: Any = None) -> Iterator[str]:
        for setting, changes, defaults in (
            ("step_columns", self.step_columns, PROGRESS_COLUMNS),
            ("final_metrics", self.final_metrics, PROGRESS_RESULTS),
        ):
            for name, change in changes.items():
                where = f"callbacks.progress.{setting}.{name}"
                if change is None and name not in defaults:
                    yield f"{where}: there is no such column to remove; defaults are {', '.join(defaults)}"
                for key, value in (change or {}).items():
                    if key not in ("label", "width", "fmt", "suffix"):
                        yield f"{where}.{key}: unknown, got {value!r}; a column has label, width, fmt, suffix"
                    elif key == "width" and not (isinstance(value, int) and value > 0):
                        yield f"{where}.width: must be a number of characters, got {value!r}"
                    elif key != "width" and not isinstance(value, str):
                        yield f"{where}.{key}: must be text, got {value!r}"
                    elif key == "fmt" and value not in FORMATS:
                        try:
                            format(1 if value.endswith("d") else 1.0, value)
                        except ValueError:
                            remedy = f"give a Python format such as .4f, or {', '.join(FORMATS)}"
                            yield f"{where}.fmt: not a format, got {value!r}; {remedy}"


@settings
class InfoSettings(CallbackPart):
    """What is trained and where, at the start."""

    maker: ClassVar[str] = "forgather_cli.callbacks.info:InfoCallback"
    type = "info"

    verbose: bool = False  # print the resolved config too


@settings
class JsonSettings(CallbackPart):
    """Logs and evaluations as records in RUN/metrics.jsonl."""

    maker: ClassVar[str] = "forgather_cli.callbacks.json_logger:JsonLogger"
    type = "json"


TRANSFORMS: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sqrt": math.sqrt,
    "abs": abs,
    "negate": lambda value: -value,
    "kilo": lambda value: value / 1e3,
    "mega": lambda value: value / 1e6,
    "giga": lambda value: value / 1e9,
    "tera": lambda value: value / 1e12,
    "mib": lambda value: value / 2**20,
    "gib": lambda value: value / 2**30,
    "percent": lambda value: 100 * value,
}


@settings
class TensorboardSettings(CallbackPart):
    """Logs and evaluations for TensorBoard."""

    maker: ClassVar[str] = "forgather_cli.callbacks.tensorboard:TBLogger"
    type = "tensorboard"

    # tag: {source, transform}, merged over the defaults; null removes one
    scalars: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    # name: text (Markdown) or settings of your own, shown beside the config
    experiment_info: dict[str, Any] = field(default_factory=dict)

    def problems(self, config: Any = None) -> Iterator[str]:
        for tag, scalar in self.scalars.items():
            where = f"callbacks.tensorboard.scalars.{tag}"
            if scalar is None:
                continue
            for key in sorted(scalar.keys() - {"source", "transform"}):
                yield f"{where}.{key}: unknown; a scalar has source and transform"
            if not isinstance(source := scalar.get("source"), str):
                yield f"{where}.source: must name a metric, got {source!r}"
            if (transform := scalar.get("transform")) is not None and transform not in TRANSFORMS:
                yield f"{where}.transform: unknown, got {transform!r}; use one of {', '.join(TRANSFORMS)}"


def _once(name: str) -> OnlyIf:
    """For a setting of textgen that ``generation_config`` may have as well."""

    def void(config: Any, owner: TextgenSettings) -> Void | None:
        given = owner.generation_config
        if given is None or getattr(given, name) is None:
            return None
        return Void(f".generation_config.{name}", "take it out there", "generation_config says it too,")

    return OnlyIf(void)


def at_evaluations(part: str, steps: str) -> OnlyIf:
    """For a callback that acts at evaluations, where its setting ``steps`` gives it no steps of its own."""

    def void(config: Any, owner: CallbackSettings) -> Void | None:
        found = without_evaluation(config)
        if found is None or getattr(getattr(config.callbacks, part), steps) is not None:
            return None
        return Void(found.because, f"{found.remedy}, set callbacks.{part}.{steps}=100")

    return OnlyIf(void)


@settings
class TextgenSettings(CallbackPart):
    """What the model writes to held-out beginnings or prompts, at each evaluation."""

    maker: ClassVar[str] = "forgather_cli.callbacks.textgen:TextgenCallback"
    type = "textgen"
    place: ClassVar[int] = SHOWS + 2
    counts: ClassVar[OnlyIf | None] = at_evaluations("textgen", "generation_steps")

    # texts, or a YAML file with a list of them; null: what two held-out samples begin with
    prompts: list[str] | FilePath | None = None
    raw: bool = False  # true: continue prompts as they are; false: by the tokenizer's chat template, if any
    do_sample: Annotated[bool, _once("do_sample")] = True  # false: greedy
    top_k: Annotated[Count, _once("top_k")] = 20  # sample among the k likeliest tokens; 0: all
    temperature: Annotated[PositiveFloat, _once("temperature")] = 0.7  # below 1: sharper
    repetition_penalty: Annotated[PositiveFloat, _once("repetition_penalty")] = 1.15  # above 1: fewer repetitions
    max_new_tokens: Annotated[PositiveInt, _once("max_new_tokens")] = 200  # tokens per sample
    # below 1: draw from the most expected tokens that sum up to it
    typical_p: Annotated[float, Gt(0), Le(1), _once("typical_p")] = 1.0
    # token or tokens that end a sample; null: the tokenizer's
    eos_token_id: Annotated[Count | list[Count] | None, _once("eos_token_id")] = None
    # what shorter prompts are filled up with; null: the tokenizer's
    pad_token_id: Annotated[Count | None, _once("pad_token_id")] = None
    # more of these, as forgather generate has: {top_p: 0.9, num_beams: 3, min_new_tokens: 8}
    generation_config: GenerationConfig | None = None
    generation_steps: PositiveInt | None = None  # optimizer steps between two generations; null: at each evaluation

    def problems(self, config: Any) -> Iterator[str]:
        try:
            self.texts()
        except ConfigError as error:
            yield from error.problems
        for problem in self.sampling().problems():
            yield f"callbacks.textgen.generation_config.{problem}"

    def sampling(self) -> Sampling:
        """How texts are written. What is not said has the default of ``Sampling``."""
        given = {} if self.generation_config is None else vars(self.generation_config)
        flat = {name: value for name, value in vars(self).items() if hasattr(Sampling, name)}
        return Sampling(**flat | {name: value for name, value in given.items() if value is not None})

    def texts(self) -> list[str] | None:
        """The prompts themselves, or those of the YAML file; None: of held-out data. Raises ConfigError for others."""
        path, found = "callbacks.textgen.prompts", self.prompts
        if found is None:
            return None
        if isinstance(found, str):
            file = Path(found).expanduser()
            found = read_yaml(file, lambda why: ConfigError(f"{path}: {why}; give a list or a YAML file"))
        if not isinstance(found, list) or not all(isinstance(prompt, str) for prompt in found):
            raise ConfigError(f"{path}: must be a list of texts, got {found!r:.80}; quote each of them in YAML")
        if not found:
            remedy = "give texts or a YAML file with a list of them, or remove ~callbacks.textgen"
            raise ConfigError(f"{path}: is empty; {remedy}")
        return found


@settings
class ProfilerSettings(CallbackPart):
    """A Chrome trace and tables of some steps, of each rank."""

    maker: ClassVar[str] = "forgather_cli.callbacks.profiler:ProfilerCallback"
    type = "profiler"
    place: ClassVar[int] = ACTS + 2

    start_step: Count = 3  # steps of this process that are left out first
    num_steps: PositiveInt = 5  # steps to record
    output_dir: FilePath | None = None  # directory; null: RUN/profile
    with_stack: bool = False  # record the Python lines that called
    with_flops: bool = False  # estimate floating-point operations
    record_shapes: bool = True  # record the shapes of inputs and tell operators apart by them


TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""Accelerate's (1.15), by name."""


def services(report_to: str | Sequence[str] | None) -> list[str]:
    """The ``TRACKERS`` that ``report_to`` names, in Hugging Face's words: one or several, ``none``, or ``all`` that are
    installed. Raises ConfigError for others.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    for name in names:
        if name not in (*TRACKERS, "none", "all"):
            near = did_you_mean(str(name), TRACKERS)
            raise ConfigError(
                f"report_to: unknown service, got {name!r};{near} Use none, all or some of {', '.join(TRACKERS)}; "
                "another service's callback of Hugging Face's library goes among the callbacks"
            )
    installed = [name for name in TRACKERS if "all" in names and is_installed(name)]
    return list(dict.fromkeys([*(name for name in names if name not in ("none", "all")), *installed]))


@settings
class TrackersSettings(CallbackPart):
    """Weights & Biases, MLflow and the others that Accelerate knows."""

    maker: ClassVar[str] = "forgather_cli.callbacks.trackers:Trackers"
    type = "trackers"
    place: ClassVar[int] = SHOWS + 1

    # aim, clearml, comet_ml, dvclive, mlflow, swanlab, tensorboard, trackio, wandb, module.Class
    names: list[str] = field(default_factory=lambda: ["wandb"])
    project: str = "forgather"  # what the service groups runs by
    run_name: str | None = None  # null: the run directory's name
    # by tracker, what its init takes: {wandb: {entity: us, tags: [a], mode: offline}}
    init_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def problems(self, config: Any) -> Iterator[str]:
        path, known = "callbacks.trackers", [*TRACKERS, "comet"]
        if not self.names:
            yield f"{path}.names: is empty; name a tracker, or remove it with ~{path}"
        for name in self.names:
            if name not in known and "." not in name:
                near = did_you_mean(name, known)
                yield f"{path}.names: unknown tracker, got {name!r};{near} One of your own is given as module.Class"
        for name in self.init_kwargs.keys() - set(self.names):
            yield f"{path}.init_kwargs.{name}: nothing reads it, since {name} is not among {path}.names; leave it out"


TOKEN_VARIABLE = "FORGATHER_AUTH_TOKEN"
_SERVED = only_if(".enable_http", True)
_ASKED_FOR = only_if(".disable_auth", False)


@settings
class ControlSettings(CallbackPart):
    """Commands to the running job: save, stop, evaluate and others."""

    maker: ClassVar[str] = "forgather_cli.callbacks.control:TrainerControlCallback"
    type = "control"
    place: ClassVar[int] = ACTS + 1

    enable_http: bool = True  # false: the job takes no commands
    # address to listen on; 0.0.0.0: other machines reach it, without encryption
    host: Annotated[str, _SERVED] = "127.0.0.1"
    port: Annotated[Annotated[int, Gt(0), Lt(65536)] | None, _SERVED] = None  # null: the first free one of 8900 to 8999
    # better a file or $FORGATHER_AUTH_TOKEN, which no process list shows; null: drawn per job
    auth_token: Annotated[str | None, _SERVED, _ASKED_FOR] = None
    auth_token_file: Annotated[FilePath | None, _SERVED, _ASKED_FOR] = None  # a file that holds your own token
    disable_auth: Annotated[bool, _SERVED] = False  # true: whoever reaches the port may stop the job

    def problems(self, config: Any) -> Iterator[str]:
        if self.auth_token is not None and self.auth_token_file is not None:
            yield "callbacks.control.auth_token: excludes auth_token_file; leave one out"
        elif self.enable_http and not self.disable_auth:
            try:
                self.given_token()
            except ConfigError as error:
                yield from error.problems
        if not self.host:
            yield "callbacks.control.host: must be an address, got nothing; set it to 127.0.0.1"

    def given_token(self) -> str | None:
        """``auth_token``, what ``auth_token_file`` holds, or what the environment has; None where one is to be drawn.

        Raises ConfigError for one that cannot be a token.
        """
        token, where = self.auth_token, "callbacks.control.auth_token"
        if token is None and self.auth_token_file is not None:
            file = Path(self.auth_token_file).expanduser()
            token = read_text(file, lambda why: ConfigError(f"{where}_file: {why}; give a file with the token")).strip()
            where = f"{where}_file: {file}"
        elif token is None and TOKEN_VARIABLE in os.environ:
            token, where = os.environ[TOKEN_VARIABLE], f"{where}: {TOKEN_VARIABLE}"
        if token is not None and not re.fullmatch(r"[!-~]{16,}", token):
            raise ConfigError(f"{where}: must be 16 or more letters, digits and signs without blanks; make it longer")
        return token


@settings
class DilocoSettings(CallbackPart):
    """Rounds with other runs over slow links, through a server."""

    maker: ClassVar[str] = "forgather_cli.callbacks.diloco:DiLoCoCallback"
    type = "diloco"
    place: ClassVar[int] = ACTS

    server_addr: str | None = None  # HOST:PORT or https://HOST:PORT; null: $DILOCO_SERVER
    token_file: FilePath | None = None  # a copy of the file that the server names when it starts; null: $DILOCO_TOKEN
    ca_file: FilePath | None = None  # certificates to trust under https; null: the system's
    worker_id: str | None = None  # this worker's name; null: $DILOCO_WORKER_ID, else made up once and kept in the run
    # optimizer steps between two exchanges; null: the server's, and another is refused
    sync_every: PositiveInt | None = None
    # bf16, fp32, int8, int4; null: the server's, and another is refused
    compression: Literal["fp32", "bf16", "int8", "int4"] | None = None
    bf16_comm: bool | None = None  # true: compression=bf16; false: fp32
    # parts of the model that are sent in turn; null: the server's, and another is refused
    num_fragments: PositiveInt | None = None
    dylu: bool | None = None  # steps of a round by this worker's speed (async server); null: $DILOCO_DYLU, else false
    heartbeat_interval: PositiveFloat | None = None  # seconds; null: $DILOCO_HEARTBEAT_INTERVAL, else 30
    timeout: PositiveFloat = 600.0  # seconds that the server may be silent, max_sync_retries times
    max_sync_retries: PositiveInt = 3  # then the run is saved and ends with exit code 75
    bandwidth: PositiveFloat | None = None  # bytes per second that this job may send and receive; null: all there is

    def problems(self, config: Any) -> Iterator[str]:
        path = "callbacks.diloco"
        if self.bf16_comm is not None and self.compression is not None:
            yield f"{path}.bf16_comm: says what compression says; leave one of them out"
        if not self.address():
            return
        try:
            self.read_token()
            self.stated()
            self.follows_speed()
            self.interval()
        except ConfigError as error:
            yield from error.problems
        if config.max_steps <= 0:
            yield (
                "max_steps: must be given, since the workers of callbacks.diloco divide the samples among themselves "
                "and none of them has whole epochs; set max_steps"
            )

    def address(self) -> str:
        """Of the server; empty: there is none, and the callback does nothing."""
        return self.server_addr or os.environ.get("DILOCO_SERVER", "")

    def read_token(self) -> str:
        """What the server asks for. Raises ConfigError where nothing holds it."""
        if self.token_file is not None:
            where = "callbacks.diloco.token_file"
            file = Path(self.token_file).expanduser()
            return read_text(file, lambda why: ConfigError(f"{where}: {why}; give a copy of the server's")).strip()
        if token := os.environ.get("DILOCO_TOKEN", "").strip():
            return token
        raise ConfigError(
            "callbacks.diloco.token_file: missing; give a copy of the file that the server names at its start, or its "
            "content as DILOCO_TOKEN"
        )

    def stated(self) -> dict[str, Any]:
        """What config and environment say of what the server decides. Raises ConfigError for a variable's value."""
        bf16 = _from_environment("DILOCO_BF16_COMM", _as_bool) if self.bf16_comm is None else self.bf16_comm
        found = {
            "sync_every": self.sync_every or _from_environment("DILOCO_SYNC_EVERY", int),
            "num_fragments": self.num_fragments or _from_environment("DILOCO_NUM_FRAGMENTS", int),
            "compression": self.compression or {None: None, True: "bf16", False: "fp32"}[bf16],
        }
        return {name: value for name, value in found.items() if value is not None}

    def follows_speed(self) -> bool:
        """Whether its steps in a round follow its speed. Raises ConfigError for a variable's value."""
        return bool(_from_environment("DILOCO_DYLU", _as_bool) if self.dylu is None else self.dylu)

    def interval(self) -> float:
        """Seconds between two heartbeats. Raises ConfigError for a variable's value."""
        return self.heartbeat_interval or _from_environment("DILOCO_HEARTBEAT_INTERVAL", float) or 30.0


def _from_environment(name: str, kind: Callable[[str], Any]) -> Any:
    if not (text := os.environ.get(name, "").strip()):
        return None
    try:
        return kind(text)
    except (ValueError, KeyError) as error:
        wanted = "true or false" if kind is _as_bool else "a number"
        raise ConfigError(f"{name}: must be {wanted}, got {text!r}; mend or unset this variable") from error


def _as_bool(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


@settings
class EarlyStoppingSettings(CallbackPart):
    """The end of a run that no longer gets better."""

    maker: ClassVar[str] = "forgather_cli.callbacks.early_stopping:EarlyStopping"
    type = "early_stopping"
    place: ClassVar[int] = ACTS + 2
    counts: ClassVar[OnlyIf | None] = NEEDS_EVALUATION

    patience: PositiveInt = 3  # evaluations in a row that are no better before the run is ended
    threshold: NonNegative = 0.0  # by how much the metric must get better to count
    metric: str = "eval_loss"  # of the evaluations


@settings
class DivergenceSettings(CallbackPart):
    """The end or a rollback of a run that diverges."""

    maker: ClassVar[str] = "forgather_cli.callbacks.divergence:DivergenceDetector"
    type = "divergence"
    place: ClassVar[int] = ACTS + 1

    smoothing: Annotated[float, Gt(0), Le(1)] = 0.3  # weight of the newest value in the running mean; 1: no mean
    threshold: PositiveFloat | None = 1.0  # nats above the best running mean; null: relative_threshold alone
    # multiple of the best running mean, above 1, for example 1.5
    relative_threshold: Annotated[float, Gt(1)] | None = None
    patience: PositiveInt = 3  # values in a row above the threshold
    warmup: Count = 10  # first values, which are not judged
    # stop: save and end as failed; abort: without saving; rollback: to a healthy checkpoint
    action: Literal["stop", "abort", "rollback"] = "stop"
    # over the life of the run; then it stops
    max_rollbacks: Annotated[PositiveInt, only_if(".action", "rollback")] = 3
    use_eval_loss: bool = False  # judge eval_loss instead of loss
    metric_key: str | None = None  # judge another metric of the logs or evaluations

    def problems(self, config: Any) -> Iterator[str]:
        path = "callbacks.divergence"
        if self.threshold is None and self.relative_threshold is None:
            yield f"{path}.threshold: null without relative_threshold judges nothing; set one of the two"
        if self.action == "rollback" and config.save_strategy == "no":
            yield f"{path}.action: rollback needs checkpoints, got save_strategy=no; set save_strategy=steps"
        if self.use_eval_loss and self.metric_key is not None:
            yield f"{path}.metric_key: names another metric than use_eval_loss=true does; set one of the two"
        judges = "use_eval_loss" if self.use_eval_loss else "metric_key"
        of_evaluations = self.use_eval_loss or (self.metric_key or "").startswith("eval_")
        if of_evaluations and config.eval_strategy == "no" and not config.eval_on_save:
            yield f"{path}.{judges}: needs evaluations, got eval_strategy=no; set eval_strategy=steps"


@settings
class GradNormSettings(CallbackPart):
    """The norm of each parameter's gradient."""

    maker: ClassVar[str] = "forgather_cli.callbacks.grad_norms:GradNormLogger"
    type = "grad_norms"

    # eval: at evaluations; log: with each log; or a number of steps
    every: Literal["eval", "log"] | PositiveInt = "eval"


@settings
class ParameterNormSettings(CallbackPart):
    """Norms and spectral norms of each parameter."""

    maker: ClassVar[str] = "forgather_cli.callbacks.parameter_norms:ParameterNormLogger"
    type = "parameter_norms"

    log_norms: bool = True  # L2 norm of each parameter
    log_spectral_norms: bool = True  # largest singular value of each matrix
    power_iter_steps: PositiveInt = 10  # iterations per evaluation; twice as many at the first


@settings
class WeightNormSettings(CallbackPart):
    """The norm of all weights."""

    maker: ClassVar[str] = "forgather_cli.callbacks.weight_norm:WeightNormLogger"
    type = "weight_norm"
    place: ClassVar[int] = ADDS


@settings
class PeakMemorySettings(CallbackPart):
    """Peaks of each rank's memory."""

    maker: ClassVar[str] = "forgather_cli.callbacks.peak_memory:PeakMemory"
    type = "peak_memory"
    place: ClassVar[int] = ADDS

    show_details: bool = False  # by kind, not the peak alone
    do_log: bool = False  # add each rank's peak to the logs
    enable_memory_snapshot: bool = False  # write what CUDA allocated, for pytorch.org/memory_viz
    file_prefix: str = "memory"  # of the snapshots' names in the run directory


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _FinishedBelow(Settings):
    """What type checkers take for a settings class, and ``finish`` makes one."""


class CallbackSettings(_FinishedBelow):
    """The active callbacks by config name; None is inactive. ``custom`` holds the user's ``_target_`` entries.

    There is a field for each ``CallbackPart``. Those written here are the ones that type checkers know.
    """

    metrics: MetricsSettings | None = None
    info: InfoSettings | None = None
    progress: ProgressSettings | None = None
    json: JsonSettings | None = None
    tensorboard: TensorboardSettings | None = None
    textgen: TextgenSettings | None = None
    early_stopping: EarlyStoppingSettings | None = None
    control: ControlSettings | None = None
    diloco: DilocoSettings | None = None
    divergence: DivergenceSettings | None = None
    profiler: ProfilerSettings | None = None
    trackers: TrackersSettings | None = None
    grad_norms: GradNormSettings | None = None
    parameter_norms: ParameterNormSettings | None = None
    weight_norm: WeightNormSettings | None = None
    peak_memory: PeakMemorySettings | None = None
    custom: dict[str, Annotated[Target, by_type]] = field(default_factory=dict)

    def active(self) -> list[CallbackPart]:
        """Those that there are, in the order in which events reach them."""
        found = [part for part in vars(self).values() if isinstance(part, CallbackPart)]
        return sorted(found, key=lambda part: part.place)


def finish() -> None:
    """Make ``CallbackSettings`` a settings class, once all options are found."""
    part: Any
    for part in CallbackPart.members:
        hint = part | None
        CallbackSettings.__annotations__[part.type] = Annotated[hint, part.counts] if part.counts else hint
        setattr(CallbackSettings, part.type, None)
    settings(CallbackSettings)


def _split_custom(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    custom = {k: v for k, v in value.items() if isinstance(v, dict) and "_target_" in v}
    return {**{k: v for k, v in value.items() if k not in custom}, "custom": custom} if custom else value


CallbackOption = Annotated[CallbackSettings, BeforeValidator(_split_custom)]

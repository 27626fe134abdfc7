"""The event protocol: what a callback sees, what it may ask for, and how events reach it.

Events, arguments and names are those of Hugging Face's ``TrainerCallback`` (transformers 5.23), so a
class written for that library works here unchanged. Forgather adds ``on_forward_backward_begin/_end``,
``on_train_metrics``, ``on_log_step``, ``on_divergence``, ``on_rollback`` and ``on_exception``.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar, cast, get_args, get_origin

from forgather_cli.config.schema import EVENTS, CallbackPart
from forgather_cli.errors import CallbackError, ConfigError, ForgatherError
from forgather_cli.run_dir import RunDir

log = logging.getLogger(__name__)

_DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Divergence:
    """A callback's view that training has diverged; the run ends as failed unless it is rolled back."""

    reason: str
    """What was seen, at which step."""
    action: Literal["stop", "abort", "rollback"] = "stop"
    """Of the loop only rollback asks for more than the flags of the control object."""
    sound_step: int | None = None
    """The last step at which all looked well: a rollback goes back at least so far where it can."""
    max_rollbacks: int = 3
    """Over the life of the run; then it stops."""


@dataclass
class TrainerControl:
    """What callbacks ask of the loop. The loop clears a flag when it has acted on it."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False
    divergence: Divergence | None = None


class CommandCounts(NamedTuple):
    """How many commands of each kind the job was given since it began; save_and_stop counts as a save and as a stop.

    Ranks sum counts, not flags: a sum that is never read loses no command, and a command in two sums acts once.
    """

    saves: int = 0
    stops: int = 0
    """Finish the step, save by ``save_strategy``, leave."""
    aborts: int = 0
    """Leave at once, save nothing."""

    def since(self, earlier: CommandCounts) -> CommandCounts:
        """The commands given after ``earlier``."""
        return CommandCounts(self.saves - earlier.saves, self.stops - earlier.stops, self.aborts - earlier.aborts)


class CommandSource(Protocol):
    """Where commands come from (``control.command_queue``). Read by every rank's main thread; only rank 0's has any."""

    def asked(self) -> CommandCounts:
        """The commands given to this rank so far."""

    def on_agreed(self, all_ranks: CommandCounts) -> None:
        """Called when all ranks have agreed on further commands, and act on them now."""


@dataclass
class TrainerState:
    """Progress of the run; counts are of optimizer steps, tokens and floating-point operations."""

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    num_train_epochs: float = 0
    train_batch_size: int = 0
    num_input_tokens_seen: int = 0
    """Over all ranks, in the whole run, without padding; logs have it as ``total_tokens``."""
    total_flos: float = 0.0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    healthy: bool = True
    """False while training looks diverged to a callback; checkpoints tell it."""
    resumed_step: int = 0
    """Step this process started from; 0 for a fresh run."""
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0
    num_processes: int = 1
    """Ranks of the job."""
    epoch_train_steps: int = 0
    """Optimizer steps in an epoch; 0 where neither the data nor the settings tell."""
    is_hyper_param_search: bool = False
    """Hugging Face's, as the two below: a sweep is runs of their own here."""
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None


class TrainerCallback:
    """Base of Forgather's callbacks. Every event is called as ``event(args, state, control, **kwargs)`` on all ranks,
    or by name where a method takes others first or only some: ``on_log_step(self, state, logs, **kwargs)``.

    ``kwargs`` hold model, processing_class, optimizer, lr_scheduler, train_dataloader, eval_dataloader and trainer
    (the dataloaders are None where there is none yet); besides: metrics (on_evaluate, on_predict), logs (on_log,
    on_log_step; both may add to it), checkpoint (on_save: path of the published checkpoint, whose step
    ``state.global_step`` is there; an asynchronous save is told of some steps later), loss, grad_norm, tokens
    (on_train_metrics: device tensors and an int), reason (on_divergence: the gradient norm is not finite, and the
    run fails unless a callback asks for a rollback), rollback (on_rollback: the run is back at
    ``state.global_step``, states as they were there; before on_train_begin where that happened in a job that was
    killed right after), exception (on_exception). An event may return the control object.

    Ranks other than 0 get every event too: check ``state.is_world_process_zero`` before writing anything. ``model`` is
    what the rank holds, under fsdp2 its rows of each parameter and under pipeline its stages: ``float(p.norm())`` is of
    these alone. ``trainer.full_parameters()`` has whole parameters under every strategy, on all ranks.

    ``on_log`` is for evaluations too, ``on_log_step`` for the records of steps alone. ``control.should_training_stop``
    ends training after this step, with a save.

    ``on_log`` reaches callbacks of one's own before those that show and write the logs: what it adds to ``logs``
    arrives there and in ``state.log_history``. What it changes or takes out is for one's own that come after it.

    A callback with ``state_dict()`` and ``load_state_dict(state)`` is part of the checkpoint under its ``name``. All
    ranks are asked for the state at each save. If it is the same on all, it is stored once and given back to all ranks
    of any layout; if not, each rank's is stored and given back to that rank, and in another layout (other ranks, other
    settings of ``trainer``) it starts fresh, with a warning. Of Forgather's own callbacks rank 0 alone is asked;
    its state is given to all ranks of any layout.
    """

    _given_name: str | None = None

    @property
    def name(self) -> str:
        """Its config name, or one that was set, else its class name; numbered once a Trainer has another of the name.
        A subclass may have one of its own: ``name = "mine"``.
        """
        return self._given_name or vars(type(self)).get("config_name") or type(self).__name__

    @name.setter
    def name(self, name: str) -> None:
        self._given_name = name

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_forward_backward_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...
    def on_forward_backward_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...
    def on_train_metrics(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_log_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_divergence(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_rollback(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...
    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any: ...


S = TypeVar("S", bound=CallbackPart)


class BuiltIn(TrainerCallback, Generic[S]):
    """A callback of Forgather's: ``class JsonLogger(BuiltIn[JsonSettings])``. A config makes it of its settings, a
    script of the same by keyword: ``DivergenceDetector(smoothing=0.3)``. Raises ConfigError for keywords that are none
    of its settings.

    ``run``: where it writes; ``config_tree``: the resolved settings; by default those of the Trainer that takes it.
    ``stream``: where what is meant for people goes.
    """

    config_name: ClassVar[str]
    """Its key under ``callbacks``. A subclass of the user's has none."""
    kind: ClassVar[type[CallbackPart]]

    def __init_subclass__(cls) -> None:
        for base in vars(cls).get("__orig_bases__", ()):
            if get_origin(base) is BuiltIn:
                (cls.kind,) = get_args(base)
                cls.config_name = cls.kind.type

    def __init__(
        self,
        settings: S | None = None,
        run: RunDir | None = None,
        *,
        config_tree: dict[str, Any] | None = None,
        stream: Literal["stdout", "stderr"] = "stdout",
        **keywords: Any,
    ) -> None:
        if settings is None:
            settings = cast(S, self._from_keywords(keywords))
        elif not isinstance(settings, self.kind) or keywords:
            raise ConfigError(
                f"{type(self).__name__}: its settings go by keyword, got {settings!r:.80}; write "
                f"{type(self).__name__}(name=value)"
            )
        self.settings = settings
        self._run, self._tree, self._stream = run, config_tree, stream

    def _from_keywords(self, keywords: dict[str, Any]) -> CallbackPart:
        from forgather_cli.config.decode import decode_settings

        try:
            return decode_settings(self.kind, keywords)
        except ConfigError as error:
            raise ConfigError([f"{type(self).__name__}.{problem}" for problem in error.problems]) from error

    @property
    def run(self) -> RunDir:
        """Where it writes."""
        assert self._run is not None, "a Trainer takes it before anything happens"
        return self._run

    def taken_by(self, run: RunDir, config_tree: dict[str, Any]) -> None:
        """A Trainer with this run directory and these settings has got it."""
        self._run = self._run or run
        self._tree = config_tree if self._tree is None else self._tree


def _failed(name: str, event: str, error: Exception) -> CallbackError:
    return CallbackError(name, event, f"{type(error).__name__}: {error}")


_NAMES = frozenset(
    ("args", "state", "control", "model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader",
     "eval_dataloader", "trainer", "metrics", "logs", "interval", "checkpoint", "loss", "grad_norm", "tokens", "reason",
     "rollback", "exception")
)  # fmt: skip
"""What an event is called with."""


def _handler(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` as ``(args, state, control, **kwargs)``: itself, or, where its first parameters are others of an
    event's names (``on_log_step(self, state, logs, **kwargs)``) or it takes only some, called by name.
    """
    parameters = inspect.signature(method).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    places = [name for name, parameter in parameters.items() if parameter.kind in _BY_PLACE]
    leads = [name == at or name not in _NAMES for name, at in zip(places, ("args", "state", "control"), strict=False)]
    in_place = inspect.Parameter.VAR_POSITIONAL in kinds or (len(leads) == 3 and all(leads))
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    if in_place and takes_all:
        return method

    def by_name(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if not in_place:
            kwargs |= {"args": args, "state": state, "control": control}
        if not takes_all:
            kwargs = {name: value for name, value in kwargs.items() if name in parameters}
        return method(args, state, control, **kwargs) if in_place else method(**kwargs)

    return by_name


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class NoWriter:
    """Takes every call of a TensorBoard writer and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class CallbackList:
    """The run's callbacks by name; an event that nobody handles costs one dictionary look-up."""

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        """``callbacks``: objects, classes, or (name, object) pairs."""
        self.by_name: dict[str, Any] = {}
        self.handlers: dict[str, list[tuple[str, Any]]] = {event: [] for event in EVENTS}
        """By event: (name, method) of the callbacks that handle it, in their order."""
        self.lost: Counter[tuple[str, str]] = Counter()
        """How often (callback, event) could not write, since the disk was full."""
        self.stopped = ""
        """``callback NAME in EVENT`` that has stopped training."""
        for entry in callbacks:
            name, callback = entry if isinstance(entry, tuple) else (None, entry)
            self.add(callback, name)

    def add(self, callback: Any, name: str | None = None) -> str:
        """Append a callback (an object, or a class to instantiate); returns its name, numbered when taken.

        Raises ConfigError for what has a method for no event.
        """
        if isinstance(callback, type):
            callback = callback()
        base = name or getattr(callback, "name", None) or type(callback).__name__
        unique, n = base, 2
        while unique in self.by_name:
            unique, n = f"{base}_{n}", n + 1
        if not any(callable(getattr(callback, event, None)) for event in (*EVENTS, "state_dict")):
            raise ConfigError(
                f"{f'callbacks.{name}' if name else 'callbacks'}: is no callback, got an object of type "
                f"{type(callback).__name__}, which has a method for no event; give one with methods for events: "
                "on_step_end, on_log, on_save, ..."
            )
        self.by_name[unique] = callback
        if isinstance(callback, TrainerCallback) and callback.name != unique:
            with contextlib.suppress(AttributeError):  # a subclass's own that cannot be set
                callback.name = unique
        for event in EVENTS:
            method = getattr(type(callback), event, None)
            # the do-nothing method of a base called TrainerCallback, Hugging Face's too, is none
            if method is not None and not getattr(method, "__qualname__", "").startswith("TrainerCallback."):
                self.handlers[event].append((unique, _handler(getattr(callback, event))))
        return unique

    def pop(self, callback: Any) -> Any:
        """Remove and return a callback: this object, or the first of this class; None if there is none."""
        for name, each in self.by_name.items():
            if (type(each) if isinstance(callback, type) else each) is callback:
                for event, handlers in self.handlers.items():
                    self.handlers[event] = [handler for handler in handlers if handler[0] != name]
                return self.by_name.pop(name)
        return None

    def emit(
        self, event: str, args: Any, state: TrainerState, control: TrainerControl, whose: str = "", **kwargs: Any
    ) -> None:
        """Call every handler in order; ``whose``: those of the user's callbacks alone (own), or of Forgather's (ours).
        Raises CallbackError, naming callback and event, from what a handler raised.

        A full disk is an error in the log: what a callback writes is worth less than the run.
        The callback that first asks to stop is named in the log.
        """
        for name, method in self.handlers[event]:
            if whose and (whose == "ours") != isinstance(self.by_name.get(name), BuiltIn):
                continue
            stopping = control.should_training_stop or control.should_abort_without_save
            try:
                answer = method(args, state, control, **kwargs)
            except ForgatherError:
                raise
            except OSError as error:
                if error.errno not in _DISK_IS_FULL:
                    raise _failed(name, event, error) from error
                if not self.lost[name, event]:
                    what = "callback %s in %s: %s; training continues, what it writes is lost"
                    log.error(what, name, event, error.strerror)
                self.lost[name, event] += 1
                continue
            except Exception as error:
                raise _failed(name, event, error) from error
            if answer is not None and answer is not control and isinstance(answer, TrainerControl):
                control.__dict__.update(answer.__dict__)
            if not stopping and (control.should_training_stop or control.should_abort_without_save):
                self.stopped = f"callback {name} in {event}"
                log.info("callback %s stopped training in %s at step %d", name, event, state.global_step)

    def emit_quietly(self, event: str, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """``emit`` for a run that is failing already: what a handler raises is logged, the first cause stands."""
        try:
            self.emit(event, args, state, control, **kwargs)
        except ForgatherError as error:
            log.error("%s", error)

"""Trackers: the run in wandb, mlflow, comet and the other services that Accelerate knows."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.tensorboard import curve, is_number
from forgather_cli.config.decode import without_tokens
from forgather_cli.config.schema import TRACKERS, TrackersSettings
from forgather_cli.errors import SetupError
from forgather_cli.targets import import_path, is_installed

logger = logging.getLogger(__name__)

_NAMES = "callbacks.trackers.names"
_IN_EXTRA = {"wandb"}  # what forgather[trackers] installs
_MAX_SKIPPED = 64  # records a tracker that fails again and again is spared in a row

_RUN_NAME = {
    "wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name", "clearml": "task_name",
    "dvclive": "exp_name", "aim": "run_name",
}  # fmt: skip
"""What each tracker's init_kwargs call the run's name; Accelerate's own argument is the project."""

_DIRECTORY = {"wandb": ("dir", "WANDB_DIR"), "swanlab": ("logdir", "SWANLAB_LOG_DIR"), "dvclive": ("dir", "")}
"""What init_kwargs call the place of files that would else lie in the working directory, and the variable that says
it too. Aim and TensorBoard are told by Accelerate itself."""

_GO_ON: dict[str, tuple[Callable[[Any], str], Callable[[str], dict[str, Any]]]] = {
    "wandb": (lambda run: str(run.id), lambda known: {"id": known, "resume": "allow"}),
    "mlflow": (lambda run: str(run.info.run_id), lambda known: {"run_id": known}),
}
"""How a service's run is told from others, and what makes it go on with that one."""


_KEEP_CONFIG = {"mlflow"}
"""Services that refuse other settings for a run that goes on."""

_FINISH_FAILED: dict[str, Callable[[Any], Any]] = {
    "wandb": lambda tracker: tracker.tracker.finish(exit_code=1),
    "mlflow": lambda tracker: importlib.import_module("mlflow").end_run("FAILED"),
}
"""Of a run that failed, where a service tells the two apart."""


class Trackers(BuiltIn[TrackersSettings]):
    """Sends the resolved config at the start, then every log's numbers under Hugging Face's names (``train/loss``).

    Only world rank 0 imports a tracker or talks to it. One that cannot be started stops the run before its first step;
    one that fails later is an error in the log, is tried again, and never stops training. A resumed run goes on with
    its run in wandb and mlflow.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._names = ["comet_ml" if name == "comet" else name for name in dict.fromkeys(self.settings.names)]
        for name in self._names:
            if name not in TRACKERS:
                import_path(name, _NAMES)
        self._trackers: list[_Tracker] = []
        self._ids: dict[str, str] = {}

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for name in self._names if state.is_world_process_zero else ():
            if name in TRACKERS and not is_installed(name):
                install = f"pip install 'forgather[trackers]' or pip install {name}"
                install = install if name in _IN_EXTRA else f"pip install {name}"
                raise SetupError(f"{_NAMES}: the package {name} is missing; {install}, or leave it out")

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        config = flat(without_tokens(self._tree or {}))
        for name in self._names:
            tracker = self._started(name)
            self._trackers.append(tracker)
            if not (name in _KEEP_CONFIG and name in self._ids):
                tracker.tell("store_init_configuration", partial(tracker.own.store_init_configuration, config))
            if name in _GO_ON:
                self._ids[name] = _GO_ON[name][0](tracker.own.tracker)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        values = {curve(name): value for name, value in (kwargs.get("logs") or {}).items() if is_number(value)}
        for tracker in self._trackers:
            tracker.log(values, state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._finish({})

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._finish(_FINISH_FAILED)

    def state_dict(self) -> dict[str, Any]:
        return {"run": str(self.run.root.resolve()), "ids": self._ids}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["run"] == str(self.run.root.resolve()):  # a run begun from another's checkpoint is one of its own
            self._ids = dict(state["ids"])

    def _finish(self, own_ways: Mapping[str, Callable[[Any], Any]]) -> None:
        for tracker in self._trackers:
            finish = partial(own_ways[tracker.name], tracker.own) if tracker.name in own_ways else tracker.own.finish
            tracker.tell("finish", finish)
        self._trackers = []

    def _started(self, name: str) -> _Tracker:
        settings, run_name = self.settings, self.settings.run_name or self.run.root.resolve().name
        kwargs = {_RUN_NAME[name]: run_name} if name in _RUN_NAME else {}
        if name in _DIRECTORY and _DIRECTORY[name][1] not in os.environ:
            self.run.trackers.mkdir(parents=True, exist_ok=True)  # else wandb takes a temporary directory
            place = self.run.trackers if name == "wandb" else self.run.trackers / name  # which adds its name itself
            kwargs[_DIRECTORY[name][0]] = str(place)
        if name in self._ids:
            kwargs |= _GO_ON[name][1](self._ids[name])
        kwargs |= settings.init_kwargs.get(name, {})
        try:
            tracker = _construct(name, settings.project, str(self.run.trackers), kwargs)
            if name == "comet_ml":
                tracker.tracker.set_name(run_name)
        except Exception as error:  # whatever a service's package raises: no login, no server, wrong arguments
            raise SetupError(
                f"callbacks.trackers: {name} cannot be started: {type(error).__name__}: {error}; mend it, or leave it "
                f"out of {_NAMES}"
            ) from error
        return _Tracker(name, tracker)


class _Tracker:
    """A service that may fail: each failure doubles how many records it is spared, and the first of them is told."""

    def __init__(self, name: str, own: Any) -> None:
        self.name, self.own = name, own
        self._failures = self._lost = self._skip = 0

    def log(self, values: dict[str, Any], step: int) -> None:
        """Send a record, unless the service is spared. Never raises."""
        if self._skip:
            self._skip -= 1
            self._lost += 1
        elif not self.tell("log", partial(self.own.log, values, step=step)):
            self._lost += 1
            self._skip = min(2**self._failures - 1, _MAX_SKIPPED)

    def tell(self, what: str, call: Callable[[], Any]) -> bool:
        """Call; False if that failed. ``what`` is for messages. Never raises."""
        try:
            call()
        except Exception as error:
            if not self._failures:
                logger.error(
                    "callbacks.trackers: %s failed in %s: %s: %s; training continues, and it is tried again",
                    self.name, what, type(error).__name__, error,
                )  # fmt: skip
            self._failures += 1
            return False
        if self._failures:
            logger.info("callbacks.trackers: %s works again; records that were lost: %d", self.name, self._lost)
        self._failures = self._lost = 0
        return True


def _construct(name: str, project: str, directory: str, kwargs: dict[str, Any]) -> Any:
    """A started tracker, as ``Accelerator.init_trackers`` makes them, without an Accelerator."""
    tracking: Any = importlib.import_module("accelerate.tracking")  # has no type stubs
    # Its own logger (accelerate 1.15, logging.py) raises at every call until a PartialState exists, and making one does
    # more than a tracker should: it picks a device, may refuse the GPU, and may set thread counts (state.py).
    tracking.logger = _PlainLogger(logging.getLogger(tracking.__name__), {})
    found: Any = tracking.LOGGER_TYPE_TO_CLASS[name] if name in TRACKERS else import_path(name, _NAMES)

    class Tracker(found):  # type: ignore[misc]
        main_process_only = False  # it is made on rank 0 only; true would ask PartialState

    if name == "aim":  # takes the run's name where others take the project
        project, kwargs = kwargs.pop("run_name"), {"experiment": project, **kwargs}
    positional = [project, directory] if found.requires_logging_directory else [project]
    tracker = Tracker(*positional, **kwargs)
    if hasattr(tracker, "start"):  # older versions of accelerate start in the constructor
        tracker.start()
    return tracker


class _PlainLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger with Accelerate's ``warning_once``."""

    @functools.cache  # noqa: B019  (there is one for the process)
    def warning_once(self, message: str) -> None:
        self.warning(message)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted path. Trackers take numbers and texts; lists are JSON, and null is the text."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{path}.")
        else:
            found[path] = value if isinstance(value, bool | int | float | str) else json.dumps(value, default=str)
    return found

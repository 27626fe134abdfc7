"""The states of a run's parts as components of its checkpoints; each looks at what it is given back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from forgather_cli.checkpoint.load import Reader
from forgather_cli.documents.encoding import Stateful
from forgather_cli.documents.fields import (
    AMOUNT,
    ANYTHING,
    COUNT,
    NUMBER,
    TEXT,
    FieldError,
    FieldKind,
    check_fields,
    object_of,
    optional,
)
from forgather_cli.trainer.run import TrainingRun


class RunState:
    """Progress counters, the seed, and the open log interval. ``counters``: what the schedule and the data count, for
    ``check_counters``.
    """

    FIELDS: ClassVar[dict[str, FieldKind]] = {
        "global_step": COUNT,
        "best_metric": optional(NUMBER),
        "best_global_step": optional(COUNT),
        "epoch": AMOUNT,
    }

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        run = self._run
        fields = {name: getattr(run.state, name) for name in self.FIELDS}
        counters = {"scheduler": _counts(run.lr_scheduler.state_dict())}
        if not run.epochs.loader.state_is_per_rank:
            counters["data"] = _counts(run.epochs.state_dict())
        return {**fields, "counters": counters, "seed": run.seed, "metrics": run.metrics.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        run = self._run
        check_fields(state, {**self.FIELDS, "metrics": ANYTHING})
        for name in self.FIELDS:
            setattr(run.state, name, state[name])
        run.metrics.load_state_dict(state["metrics"])
        run.state.num_input_tokens_seen = run.metrics.total_tokens


def check_counters(reader: Reader) -> None:
    """Raise CheckpointError where the parts of a checkpoint have come to different steps: its manifest, its trainer's
    state, and by what that says (before 0.3 it did not) the schedule and the data.
    """
    state = reader.state("trainer")
    with reader.loading(reader.file_of("trainer"), "trainer"):
        check_fields({"counters": {}, **state}, {"counters": object_of(object_of(NUMBER))})
        if state["global_step"] != reader.step:
            raise FieldError(f"global_step is {state['global_step']}, the manifest's step {reader.step}")
        for key, counted in state.get("counters", {}).items():
            if key in reader.components() and (there := _counts(reader.state(key))) != counted:
                raise FieldError(f"was saved when {key} was at {counted}, and {key} is at {there}")


def _counts(state: Any) -> dict[str, int]:
    """The whole numbers of a state; a schedule of the user's may have any."""
    return {name: value for name, value in state.items() if type(value) is int} if isinstance(state, Mapping) else {}


class RandomState:
    """The process's generators. The loop seeds torch's for every step; these are for users' own code."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fields(state, {"python": ANYTHING, "torch": ANYTHING, "numpy": ANYTHING})
        words = state["numpy"][1:3] if isinstance(state["numpy"], tuple) else ()
        if len(words) < 2 or len(words[0]) != 624 or not (COUNT.holds(words[1]) and words[1] <= 624):
            raise FieldError("numpy must be 624 words and how many of them are used")  # numpy does not look at that
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


class CallbackStates:
    """The states of Forgather's callbacks by name. Gives back a user's too, which lay here before 0.3."""

    def __init__(self, callbacks: Mapping[str, Any]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        ours = {n: c for n, c in self._callbacks.items() if "config_name" in vars(type(c))}
        return {name: c.state_dict() for name, c in ours.items() if hasattr(c, "state_dict")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fields(state, {})
        for name, callback in self._callbacks.items():
            # 0.3 has those of a script under the names of their classes, Forgather's own too
            key = name if name in state else type(callback).__name__
            if key in state and callable(getattr(callback, "load_state_dict", None)):
                callback.load_state_dict(state[key])


class StrategyState:
    """A strategy's state besides weights; another kind of strategy does not load it."""

    def __init__(self, own: Stateful) -> None:
        self._own = own

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self._own).__name__, "state": self._own.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fields(state, {"kind": TEXT, "state": ANYTHING})
        if state["kind"] == type(self._own).__name__:
            self._own.load_state_dict(state["state"])

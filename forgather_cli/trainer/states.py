"""The states of a run's parts as components of its checkpoints; each looks at what it is given back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from forgather_cli.input_files import AMOUNT, ANYTHING, COUNT, NUMBER, TEXT, FieldError, Kind, check_fields, optional
from forgather_cli.strategies.base import Stateful
from forgather_cli.trainer.run import Run


class TrainerState:
    """Progress counters, the seed, and the open log interval."""

    FIELDS: ClassVar[dict[str, Kind]] = {
        "global_step": COUNT,
        "best_metric": optional(NUMBER),
        "best_global_step": optional(COUNT),
        "epoch": AMOUNT,
    }

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        run = self._run
        fields = {name: getattr(run.state, name) for name in self.FIELDS}
        return {**fields, "seed": run.seed, "metrics": run.metrics.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        run = self._run
        check_fields(state, {**self.FIELDS, "metrics": ANYTHING})
        for name in self.FIELDS:
            setattr(run.state, name, state[name])
        run.metrics.load_state_dict(state["metrics"])
        run.state.num_input_tokens_seen = run.metrics.total_tokens


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
    """The states of all callbacks that have one, by name."""

    def __init__(self, callbacks: Mapping[str, Any]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        stateful = {n: c for n, c in self._callbacks.items() if callable(getattr(c, "state_dict", None))}
        return {name: callback.state_dict() for name, callback in stateful.items()}

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


class ToCompare:
    """State that is saved as a component but not restored as one: optimizer groups, and the identity to compare."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never restored as a whole")

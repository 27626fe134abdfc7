"""A callback that gives commands to its own job over HTTP at chosen instants: ``+callbacks.orders._target_=...``.

An order is ``EVENT STEP COMMAND``: ``step_begin 3 save`` gives ``save`` when the fourth step begins, ``prediction_step
4 stop`` in the evaluation after step 4. Besides commands there are ``hold`` (checkpoints stay unfinished), ``release``
(they are finished), ``spoil`` (the next one fails) and ``raise``.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from users_callbacks import EveryEvent

from forgather_cli.control import client
from forgather_cli.control.command_record import ControlCommand
from forgather_cli.control.registry import resolve


class Tokenizer:
    """The run's own one, that takes as long to be written as it is told."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def save(self, directory: Path) -> None:
        self.may_go_on.wait(120)
        if self.is_broken:
            self.is_broken = False
            raise OSError(5, "the disk is gone")
        self._real.save(directory)


class Orders(EveryEvent):
    """Gives each order once, on world rank 0."""

    def __init__(self, orders: list[str]) -> None:
        self._orders = [order.split() for order in orders]
        self.given: list[str] = []
        """Ids of the commands."""
        self.states: list[str] = []
        """What ``status`` said just before each order."""
        self._tokenizer: Tokenizer

    def happens(self, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        if event == "on_train_begin":
            trainer = kwargs["trainer"]
            self._run = trainer.run_dir.root
            self._tokenizer = trainer.processing_class = Tokenizer(trainer.processing_class)
        due = [o for o in self._orders if event == f"on_{o[0]}" and int(o[1]) == state.global_step]
        self._orders = [o for o in self._orders if o not in due]
        for *_, order in due:
            if order == "raise":
                raise ZeroDivisionError("as ordered")
            if state.is_world_process_zero:
                self._give(order)

    def _give(self, order: str) -> None:
        if order in ("hold", "release"):
            (self._tokenizer.may_go_on.clear if order == "hold" else self._tokenizer.may_go_on.set)()
        elif order == "spoil":
            self._tokenizer.is_broken = True
        else:
            entry = resolve(str(self._run))
            self.states.append(client.status(entry)["state"])
            told: ControlCommand = client.submit(entry, order)
            self.given.append(told.id)

"""Callbacks as users bring them, named by ``_target_=users_callbacks.<class>``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from forgather_cli.callbacks.base import EVENTS, TrainerCallback


class EveryEvent(TrainerCallback):
    """Is told of each by one method."""

    def happens(self, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        raise NotImplementedError


for _event in EVENTS:
    setattr(EveryEvent, _event, lambda self, args, state, control, _e=_event, **given: self.happens(_e, state, given))


class Raises(EveryEvent):
    """Raises in one event of one rank, once that step is reached."""

    def __init__(self, event: str, step: int = 0, rank: int = 0) -> None:
        self._event, self._step, self._rank = event, step, rank
        self._me = dist.get_rank() if dist.is_initialized() else 0

    def happens(self, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        if event == self._event and self._me == self._rank and state.global_step >= self._step:
            raise ZeroDivisionError(f"of the user's in {event}")

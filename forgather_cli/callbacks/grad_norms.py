"""GradNormLogger: the gradient norm of every parameter."""

from __future__ import annotations

import logging
from collections import deque
from functools import cached_property
from typing import Any

from torch import Tensor

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.json_logger import RecordFile
from forgather_cli.callbacks.norms import FullParameters, HostCopy
from forgather_cli.config import schedule
from forgather_cli.config.schema import GradNormSettings

logger = logging.getLogger(__name__)

_DELAY = 2  # steps after which a device is sure to be done with one, as the loop reads its own norm


class GradNormLogger(BuiltIn[GradNormSettings]):
    """Writes the L2 norms of the full parameters' gradients after clipping to ``gradient_norms.jsonl``.

    A record is written with every evaluation, with every log, or every N steps, then two steps late on CUDA: the host
    does not wait for the device. Gradients are gone when an evaluation or a log begins, so they are measured in those
    steps that will be followed by one: an evaluation or a log that a callback asks for has no record. Under
    fuse_optim_with_backward no gradient is left to be measured, and this is off.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters: FullParameters | None = None
        self._newest: tuple[int, Tensor] | None = None  # a step, and what was measured in it
        self._waiting: deque[tuple[int, float, HostCopy]] = deque()

    @cached_property
    def _file(self) -> RecordFile:
        return RecordFile(self.run.gradient_norms)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._newest = None
        self._waiting.clear()
        off = args.fuse_optim_with_backward
        self._parameters = None if off else FullParameters(kwargs["trainer"], trained_only=True)
        if not state.is_world_process_zero:
            return
        self._file.begin(state.resumed_step)
        if off:
            logger.warning("grad_norms: off, since fuse_optim_with_backward=true leaves no gradients to be measured")
        elif self.settings.every == "eval" and args.eval_strategy == "no" and not args.eval_on_save:
            logger.warning("grad_norms.every: eval, of which eval_strategy=no leaves none; set log or a number")

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._parameters is not None and is_due(self.settings.every, args, state):
            self._newest = (state.global_step + 1, self._parameters.gradients())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if isinstance(self.settings.every, int):
            self._keep(state)
            self._write(0 if control.should_save else _DELAY)

    def on_log_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.settings.every == "log" and kwargs.get("interval") is not None:
            self._keep(state)
        self._write()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.settings.every == "eval":
            self._keep(state)
        self._write()

    def on_rollback(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write()
        self._newest = None
        if state.is_world_process_zero:
            self._file.abandon(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write()

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write()

    def _keep(self, state: TrainerState) -> None:
        """Have a record of this step, if it was measured."""
        if self._newest is None or self._newest[0] != state.global_step:
            return
        if state.is_world_process_zero:
            self._waiting.append((state.global_step, state.epoch, HostCopy(self._newest[1].sqrt())))
        self._newest = None

    def _write(self, delay: int = 0) -> None:
        """The records that are waiting, but for those on their way from a device for less than ``delay`` steps."""
        while self._waiting and (len(self._waiting) > delay or self._waiting[0][2].is_here):
            step, epoch, norms = self._waiting.popleft()
            assert self._parameters is not None
            named = dict(zip(self._parameters.shapes, norms.read(), strict=True))
            self._file.add({"norms": named}, step=step, epoch=epoch)


def is_due(every: str | int, args: Any, state: TrainerState) -> bool:
    """True if the optimizer step in progress will, or may, be followed by a record."""
    step = state.global_step + 1
    is_last = step == state.max_steps
    if isinstance(every, int):
        return step % every == 0
    if every == "log":
        return args.logging_strategy == "epoch" or is_last or schedule.log_due(args, step, state.logging_steps)
    saves_evaluate = args.eval_on_save or args.load_best_model_at_end
    saves = args.save_strategy == "epoch" or is_last or schedule.save_due(args, step, state.save_steps)
    evaluates = args.eval_strategy == "epoch" or schedule.eval_due(args, step, state.eval_steps)
    return evaluates or (saves_evaluate and saves)

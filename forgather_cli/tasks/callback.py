"""TasksCallback: benchmarks while the model learns."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.json_logger import RecordFile
from forgather_cli.distributed import NoAnswerError, cpu_group, gather, joined
from forgather_cli.documents.fields import COUNT, check_fields
from forgather_cli.errors import CallbackError, ConfigError
from forgather_cli.tasks.lm import StrategyLM, max_length_of
from forgather_cli.tasks.run import load_tasks, run_tasks
from forgather_cli.tasks.settings import TasksSettings
from forgather_cli.trainer.evaluate import EvaluationStopped

logger = logging.getLogger(__name__)
_PATIENCE = 60.0
"""Seconds that a rank whose tasks have failed waits for the others."""


class TasksCallback(BuiltIn[TasksSettings]):
    """Adds ``tasks/NAME/METRIC`` to each evaluation, or to the logs every N steps, and to ``tasks.jsonl``.

    Collective; generators and modes are as they were afterwards. A failure is agreed on by all ranks, whose next step
    is the same then. Where a rank fails alone while the others wait for it inside the model, the run ends.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises DataError for tasks that cannot be had."""
        super().__init__(*args, **kwargs)
        told = self.settings
        directory = None if told.tasks_dir is None else Path(told.tasks_dir)
        self._tasks = load_tasks(told.tasks, directory, num_fewshot=told.num_fewshot, setting="callbacks.tasks.tasks")
        self._lm: StrategyLM | None = None
        self._newest: dict[str, float] = {}
        self._about: dict[str, Any] = {}  # what tasks.jsonl says of it besides
        self._failures, self._said = 0, ""

    @cached_property
    def _file(self) -> RecordFile:
        return RecordFile(self.run.tasks)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._prepare(kwargs["trainer"])  # what cannot be: now, not at step 100
        if state.is_world_process_zero:
            self._file.begin(state.resumed_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._newest = {}
        if self.settings.every is None or state.global_step % self.settings.every:
            return
        start, trainer = time.perf_counter(), kwargs["trainer"]
        try:
            self._newest = self._run_tasks(trainer)
            trainer.log(dict(self._newest))
            self._write(state)
        except EvaluationStopped:
            logger.info("callbacks.tasks: the report at step %d was stopped and discarded", state.global_step)
        trainer.run.metrics.evaluation_seconds += time.perf_counter() - start

    def measured_at_evaluation(self, trainer: Any) -> dict[str, float]:
        """Collective. What the present evaluation has of tasks: with ``every``, what this step has measured already."""
        if self.settings.every is None:
            self._newest = self._run_tasks(trainer)
        return self._newest

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.settings.every is None:
            self._write(state)

    def on_rollback(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._file.abandon(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._newest = {}  # the weights may be the best model's now

    def state_dict(self) -> dict[str, Any]:
        return {"failures": self._failures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fields(state, {"failures": COUNT}, "tasks")
        self._failures = state["failures"]

    def _write(self, state: TrainerState) -> None:
        if state.is_world_process_zero:
            self._file.add(self._about | self._newest, step=state.global_step, epoch=state.epoch)

    def _prepare(self, trainer: Any) -> StrategyLM:
        """Collective. The model with its tokenizer, as lm-eval asks it, made once."""
        run, progress = trainer.run, trainer.callbacks.by_name.get("progress")
        show = getattr(progress, "show_bar", None) if run.world.rank == 0 else None

        def on_batch(_: str, done: int, total: int) -> None:
            if show is not None:
                with contextlib.redirect_stdout(self._stdout):  # ``run_tasks`` has taken it
                    show("tasks", done, total)
            if run.sync.poll():  # all ranks end it together; and it is progress, and no hang
                raise EvaluationStopped

        if self._lm is None:
            if trainer.processing_class is None:
                raise ConfigError("callbacks.tasks: there is no tokenizer, and tasks are texts; give the data one")
            seq_len, self._group = getattr(run.config.data, "seq_len", 1024), cpu_group()
            with TemporaryDirectory() as folder:  # what a checkpoint has beside the weights
                run.write_model_files(Path(folder))
                longest = gather(max_length_of(Path(folder), seq_len), run.cpu_group)[0]
                self._lm = StrategyLM(
                    trainer.strategy, trainer.processing_class, Path(folder), max_length=longest, group=run.cpu_group,
                    max_tokens=max(longest, run.config.per_device_eval_batch_size * seq_len), on_batch=on_batch,
                )  # fmt: skip
            if self.settings.apply_chat_template and not self._lm.chat_template(True):
                remedy = "set data.chat_template, or leave it out"
                raise ConfigError(f"callbacks.tasks.apply_chat_template: the tokenizer has no chat template; {remedy}")
        return self._lm

    def _run_tasks(self, trainer: Any) -> dict[str, float]:
        """Collective. The metrics, equal on all ranks; of a failure how many there have been."""
        lm, told, failure = self._prepare(trainer), self.settings, None
        self._about = {name: getattr(told, name) for name in ("tasks", "limit", "num_fewshot", "apply_chat_template")}
        found: dict[str, float] = {}
        self._stdout = sys.stdout
        try:
            results = run_tasks(lm, self._tasks, limit=told.limit, apply_chat_template=told.apply_chat_template)
            found = results.metrics
        except EvaluationStopped:
            raise
        except Exception as error:  # of a task's own code, of lm-eval, of the device
            logger.debug("callbacks.tasks", exc_info=True)
            failure = f"{type(error).__name__}: {error}"
        try:
            deadline = None if failure is None else time.monotonic() + _PATIENCE
            agreed = joined(gather(failure, self._group, deadline))
        except NoAnswerError as alone:  # the others stand where this rank does not come any more
            raise CallbackError(self.name, "on_evaluate", f"this rank alone: {failure}") from alone
        if agreed is not None:
            if told.on_failure == "error":
                raise CallbackError(self.name, "on_evaluate", agreed)
            self._failures += 1
            if agreed != self._said and trainer.run.world.rank == 0:
                step = trainer.state.global_step
                logger.warning("callbacks.tasks: failed at step %d (%s); training goes on", step, agreed)
            self._said = agreed
            best = trainer.run.config.metric_for_best_model
            found = {best: math.nan} if best.startswith("tasks/") else {}  # which is never the best
            self._about["failure"] = agreed
        return found | ({"tasks/failures": self._failures} if self._failures else {})

"""TasksCallback: benchmarks while the model learns."""

from __future__ import annotations

import logging
import math
import time
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.json_logger import RecordFile
from forgather_cli.distributed import gather, joined
from forgather_cli.documents.fields import COUNT, check_fields
from forgather_cli.errors import CallbackError, ConfigError, DataError, ForgatherError
from forgather_cli.tasks.lm import StrategyLM, max_length_of
from forgather_cli.tasks.run import load_tasks, run_tasks
from forgather_cli.tasks.settings import TasksSettings
from forgather_cli.trainer.evaluate import EvaluationStopped

logger = logging.getLogger(__name__)


class TasksCallback(BuiltIn[TasksSettings]):
    """Adds ``tasks/NAME/METRIC`` to each evaluation, or to the logs every N steps, and a line to tasks.jsonl.

    Collective; generators and modes are as they were afterwards. All ranks agree on a failure. One inside a
    model that ranks hold together ends the run, as it does in an evaluation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises DataError for tasks that cannot be had."""
        super().__init__(*args, **kwargs)
        names, folder, shots = self.settings.tasks, self.settings.tasks_dir, self.settings.fewshot
        self._tasks = load_tasks(names, folder, num_fewshot=shots, setting="callbacks.tasks.tasks")
        self._lm: StrategyLM | None = None
        self._newest: dict[str, float] = {}
        """What was measured at this step."""
        self._report: dict[str, Any] = {}
        """A line of tasks.jsonl that is to be written."""
        self._failures, self._said = 0, ""

    @cached_property
    def _file(self) -> RecordFile:
        return RecordFile(self.run.tasks)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._prepared(kwargs["trainer"])  # what cannot be: now, not at step 100
        if state.is_world_process_zero:
            self._file.begin(state.resumed_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._newest = {}
        if self.settings.every is not None and state.global_step % self.settings.every == 0:
            start, trainer = time.perf_counter(), kwargs["trainer"]
            try:
                self._newest = self._measure(trainer)
                trainer.log(dict(self._newest))
            except EvaluationStopped:
                logger.info("the tasks at step %d were stopped and their report discarded", state.global_step)
            trainer.run.metrics.evaluation_seconds += time.perf_counter() - start

    def measured_at_evaluation(self, trainer: Any) -> dict[str, float]:
        """Collective. What the present evaluation has of tasks: with ``every``, what this step has measured already."""
        return self._measure(trainer) if self.settings.every is None else self._newest

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._report and state.is_world_process_zero:
            self._file.add(self._report, step=state.global_step, epoch=state.epoch)
        self._report = {}

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

    def _prepared(self, trainer: Any) -> StrategyLM:
        """Collective. The model with its tokenizer, as lm-eval asks it; made once."""
        run, progress = trainer.run, trainer.callbacks.by_name.get("progress")
        show = getattr(progress, "show_bar", None) if run.world.rank == 0 else None

        def on_batch(done: int, total: int) -> None:
            if show is not None:
                show("tasks", done, total)
            if run.sync.poll():  # all ranks end it together; and it is progress, and no hang
                raise EvaluationStopped

        if self._lm is None:
            if trainer.processing_class is None:
                raise ConfigError("callbacks.tasks: there is no tokenizer, and tasks are texts; give the data one")
            seq_len = getattr(run.config.data, "seq_len", 1024)
            with TemporaryDirectory() as folder:  # what a checkpoint has beside the weights
                run.write_model_files(Path(folder))
                length = gather(max_length_of(Path(folder), seq_len), run.cpu_group)[0]
                self._lm = StrategyLM(
                    trainer.strategy, trainer.processing_class, Path(folder), max_length=length,
                    max_tokens=run.config.per_device_eval_batch_size * seq_len, group=run.cpu_group, on_batch=on_batch,
                )  # fmt: skip
            if self.settings.apply_chat_template and not self._lm.chat_template(True):
                raise ConfigError("callbacks.tasks.apply_chat_template: needs a template; set data.chat_template")
        return self._lm

    def _measure(self, trainer: Any) -> dict[str, float]:
        """Collective. The metrics, equal on all ranks; where tasks have failed how often they have."""
        lm, told = self._prepared(trainer), self.settings
        asked: dict[str, Any] = {"limit": told.limit, "apply_chat_template": told.apply_chat_template}
        results: dict[str, Any] = {"metrics": {}}
        failure = None
        try:
            results, _ = run_tasks(lm, self._tasks, **asked)
        except Exception as error:  # of a task's own code, of lm-eval, of the device
            if isinstance(error, EvaluationStopped) or not (lm.holds_whole or isinstance(error, DataError)):
                raise  # inside a model that ranks hold together the others wait for this one: as in an evaluation
            failure = str(error) if isinstance(error, ForgatherError) else f"{type(error).__name__}: {error}"
        answers = gather((failure, results["metrics"]), lm.group)
        metrics: dict[str, float] = answers[0][1]  # a task's own code may say another thing on each
        if failed := joined([each for each, _ in answers]):
            if told.on_failure == "error":
                raise CallbackError(self.name, "on_evaluate", failed)
            if failed != self._said and trainer.run.world.rank == 0:
                logger.warning("tasks failed at step %d (%s); training goes on", trainer.state.global_step, failed)
            self._failures, self._said = self._failures + 1, failed
            best = trainer.run.config.metric_for_best_model
            metrics = {best: math.nan} if best.startswith("tasks/") else {}  # which is never the best
            asked |= {"failure": failed}
        metrics |= {"tasks/failures": self._failures} if self._failures else {}
        self._report = {**asked, **results, "metrics": metrics}
        return metrics

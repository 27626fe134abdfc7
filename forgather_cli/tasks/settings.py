"""The settings of ``callbacks.tasks``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, ClassVar, Literal

from forgather_cli.config.schema import CallbackPart, Count, FilePath, OnlyIf, PositiveInt, at_evaluations, settings


@settings
class TasksSettings(CallbackPart):
    """Benchmarks of lm-evaluation-harness on the weights as they stand, at each evaluation."""

    maker: ClassVar[str] = "forgather_cli.tasks.callback:TasksCallback"
    needs: ClassVar[tuple[str, ...]] = ("tasks", "lm_eval")
    type = "tasks"
    counts: ClassVar[OnlyIf | None] = at_evaluations("tasks", "every")

    tasks: list[str] = field(default_factory=list)  # names of tasks, groups and tags: [arc_easy, mine]
    tasks_dir: FilePath | None = None  # a directory with tasks of your own, as YAML files
    limit: PositiveInt | None = None  # examples of each task; null: all
    fewshot: Count | None = None  # solved examples before each question; null: as the task says
    apply_chat_template: bool = False  # ask as a user of a chat does, by the tokenizer's chat template
    every: PositiveInt | None = None  # optimizer steps between two reports; null: at each evaluation
    # when tasks fail: warn (told, counted as tasks/failures, and training goes on), error (it ends the run)
    on_failure: Literal["warn", "error"] = "warn"

    def problems(self, config: Any) -> Iterator[str]:
        if not self.tasks:
            yield "callbacks.tasks.tasks: is empty; name some, [arc_easy], or remove ~callbacks.tasks"

"""The callback ``tasks``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, ClassVar, Literal

from forgather_cli.config.schema import (
    CallbackPart,
    Count,
    FilePath,
    OnlyIf,
    PositiveInt,
    Void,
    settings,
    without_evaluation,
)


def _never_due(config: Any, owner: Any) -> Void | None:
    """Tasks come at evaluations, where they have no steps of their own."""
    void = without_evaluation(config)
    if void is None or config.callbacks.tasks.every is not None:
        return None
    return Void(void.because, f"{void.remedy}, set callbacks.tasks.every=100")


@settings
class TasksSettings(CallbackPart):
    """Benchmarks of lm-evaluation-harness on the weights as they stand, at each evaluation."""

    maker: ClassVar[str] = "forgather_cli.tasks.callback:TasksCallback"
    needs: ClassVar[tuple[str, ...]] = ("tasks", "lm_eval")
    type = "tasks"
    counts: ClassVar[OnlyIf | None] = OnlyIf(_never_due)

    tasks: list[str] = field(default_factory=list)  # names of tasks, groups and tags: [arc_easy, mine]
    tasks_dir: FilePath | None = None  # a directory with tasks of your own, as YAML files
    limit: PositiveInt | None = None  # examples of each task; null: all
    num_fewshot: Count | None = None  # examples shown before each; null: what the task says, else 0
    apply_chat_template: bool = False  # ask as a user in a chat, by the tokenizer's chat template
    every: PositiveInt | None = None  # optimizer steps between two reports; null: at each evaluation
    # what fails: warn (once; counted as tasks/failures, and training goes on) or error (it ends the run)
    on_failure: Literal["warn", "error"] = "warn"

    def problems(self, config: Any) -> Iterator[str]:
        if not self.tasks:
            yield "callbacks.tasks.tasks: is empty; name some, [arc_easy], or remove the callback"

"""Runs of a crash campaign that start no interpreters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from crash_campaign import Campaign, Trial
from crash_draw import LAYOUTS, Plan, Recipe, draw
from crash_job import Job
from forks import Program
from program import Process

NAMES = [layout.name for layout in LAYOUTS if layout.ranks < 3]


def forked(words: Sequence[str], environment: dict[str, str], output: Path) -> int:
    """A run that nothing interrupts need not start interpreters, as those do that are killed."""
    with Process(*words, env=environment) as job:
        code = job.finish()
    output.write_text(job.output)
    return code


class Forked(Job):
    """A job whose launcher and ranks are forks of a process that has imported torch."""

    def _start(self, command: list[str], environment: dict[str, str]) -> Program:  # type: ignore[override]
        program = Program(tuple(command), str(Path.cwd()), environment, file=str(self._output))
        program.stdout.close()
        return program


def trial_of(recipes: Sequence[Recipe], fits: Callable[[Plan], bool], folder: Path) -> tuple[Trial, Path]:
    """A trial of two kills that ``fits``, of a new seed each time, and the uninterrupted run."""
    runs = Campaign(folder, (), NAMES, forked, job=Forked, recipes=recipes)
    plans = (draw(seed, NAMES, recipes) for seed in itertools.count(int(time.time())))
    plan = next(plan for plan in plans if len(plan.kills) == 2 and fits(plan))
    return runs.trial(plan.seed), runs.reference(plan)

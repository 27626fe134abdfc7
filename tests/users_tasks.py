"""What tests of callbacks.tasks put into a run, by ``_target_=users_tasks.<class>``, and tasks that fail."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from forgather_cli.callbacks.base import TrainerCallback

_FAILING = """
task: failing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
process_results: !function failing_code.results
metric_list: [{{metric: acc}}]
"""
_CODE = """
from users_tasks import act

def results(doc, answers):
    act()
    return {"acc": 1.0}
"""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def write_failing(folder: Path) -> None:
    """The task ``failing``, beside those of ``own_tasks``, whose own code does what ``act`` says."""
    (folder / "failing.yaml").write_text(_FAILING.format(folder=folder))
    (folder / "failing_code.py").write_text(_CODE)


def act() -> None:
    """``FAILS`` names ranks, with a comma between; one of them raises."""
    if str(rank()) in os.environ.get("FAILS", "").split(","):
        raise ZeroDivisionError("of the task's own code")


class Watch(TrainerCallback):
    """Notes after each evaluation and step what training goes on from: generators and modes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("step", state, kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note("evaluate", state, kwargs)

    def _note(self, what: str, state: Any, kwargs: dict[str, Any]) -> None:
        modes = [module.training for part in kwargs["trainer"].strategy.parts for module in part.modules()]
        states = (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist(), modes)
        self.notes.append(f"{what} {state.global_step} {hashlib.sha256(pickle.dumps(states)).hexdigest()}")


class Draws(TrainerCallback):
    """What no callback may do at an evaluation."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._kind == "python":
            random.random()
        elif self._kind == "modes":
            for part in kwargs["trainer"].strategy.parts:
                part.eval()


class Alone(TrainerCallback):
    """From the first step on the last rank's model fails where a task asks it."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0 and rank() == dist.get_world_size() - 1:
            kwargs["trainer"].strategy.logits = self._fail

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("of one rank")


class Kills(TrainerCallback):
    """Ends rank 0 once it has written the report of a step, once."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step and rank() == 0 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Stops(TrainerCallback):
    """Has the job asked to stop as soon as the model is asked by a task, and counts how often it is asked then."""

    def __init__(self) -> None:
        self.asked = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            return
        strategy, job = kwargs["trainer"].strategy, kwargs["trainer"].run.job
        plain = strategy.logits

        def logits(*args: Any, **given: Any) -> Any:
            self.asked += 1
            job.poll = lambda: signal.SIGTERM
            return plain(*args, **given)

        strategy.logits = logits

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (kwargs["trainer"].run_dir.root / "asked").write_text(str(self.asked))

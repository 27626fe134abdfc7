"""Tasks of lm-evaluation-harness: found, built before any model is loaded, and run. Its ``evaluate`` is called, not
``simple_evaluate``: that one seeds the process, asks git and the system who they are, and returns None where LOCAL_RANK
is not 0 (lm_eval 0.4.13, ``evaluator.py``).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tqdm  # type: ignore[import-untyped]
from lm_eval.evaluator import evaluate  # type: ignore[import-untyped]
from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

from forgather_cli.data.text.hf import datasets_library, offline_if_unreachable
from forgather_cli.distributed import rank_in
from forgather_cli.documents.regular_files import FORMATS
from forgather_cli.errors import DataError, ForgatherError, did_you_mean
from forgather_cli.models.parts import evaluation_mode
from forgather_cli.tasks.lm import StrategyLM
from forgather_cli.trainer.states import RandomState

_SEED = 1234
"""Of few-shot examples, as lm-eval's by default, so that its numbers are ours."""


@dataclass(frozen=True)
class TaskResults:
    """``metrics``: numbers by ``tasks/NAME/METRIC``; ``table``: the document of lm-eval's ``evaluate``, its ``samples``
    only if asked for. On all ranks alike, but for standard errors that are resampled: those are rank 0's alone."""

    metrics: dict[str, float]
    table: dict[str, Any]


def load_tasks(
    names: Sequence[str], tasks_dir: Path | None = None, *, num_fewshot: int | None = None, setting: str = "--tasks"
) -> dict[str, Any]:
    """What ``run_tasks`` takes of the tasks, groups and tags of these names (``*`` stands for any letters), those of
    ``tasks_dir`` first. Raises DataError for what cannot be had.
    """
    library = datasets_library()
    with _aside():
        where = [] if tasks_dir is None else [str(tasks_dir)]
        manager = TaskManager(include_path=where, include_defaults=False)
        entries = [manager.task_index.get(name) for name in names]
        if any(entry is None or isinstance((entry.cfg or {}).get("task"), list) for entry in entries):
            manager = TaskManager(include_path=where)  # 14 000 tasks, 15 s
        wanted = {name: manager.match_tasks([name]) or _files(where, name) for name in names}
        for name, found in wanted.items():
            if not found:
                nor = "" if tasks_dir is None else f", and none in the YAML files of {tasks_dir}"
                raise DataError(
                    f"{setting}: lm-eval has no task {name!r}{nor};{did_you_mean(name, manager.all_tasks)} "
                    "lm-eval ls tasks lists them"
                )
        every = list(dict.fromkeys(each for found in wanted.values() for each in found))
        is_local = all(_is_local(manager, name) for name in every)
        try:
            with contextlib.nullcontext() if is_local else offline_if_unreachable(library, told=False):
                loaded: dict[str, Any] = manager.load(every)
        except Exception as error:  # of datasets, of lm-eval, or of a function that a task names
            raise _explained(error, library, setting) from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            why = "runs code that the model writes" if getattr(task, "UNSAFE_CODE", False) else "is not of text alone"
            raise DataError(f"task {name}: {why}, which eval does not; leave it out")
        # as simple_evaluate has it: a task whose YAML says 0 keeps it
        given = task.get_config("num_fewshot")
        if num_fewshot is not None and given != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif given is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def run_tasks(
    lm: StrategyLM,
    tasks: dict[str, Any],
    *,
    limit: int | None = None,
    apply_chat_template: bool = False,
    bootstrap_iters: int = 0,
    with_samples: bool = False,
) -> TaskResults:
    """Collective. Run what ``load_tasks`` has built, with the weights as they stand; as often as one likes.

    ``lm``: a ``StrategyLM`` of a strategy whose model is materialized; the model is in eval mode meanwhile, and each
    module in its own mode afterwards. ``limit``: examples of each task. ``bootstrap_iters``: resamples for the standard
    error of a metric that is no mean; 0: no standard errors. Generators of the process (random, numpy, torch) are left
    as they were. Raises what a task's own code raises.
    """
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(_SEED)
    with _aside(), evaluation_mode(lm.strategy.parts):
        table: dict[str, Any] = evaluate(
            lm=lm,
            task_dict=tasks,
            limit=limit,
            bootstrap_iters=bootstrap_iters if rank_in(lm.group) == 0 else 0,
            log_samples=with_samples,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
        )
    metrics = {}
    for name, values in table["results"].items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")  # acc,none or exact_match,strict-match
            if comma and isinstance(value, int | float):
                metrics[f"tasks/{name}/{metric}" + (f"/{kind}" if kind != "none" else "")] = float(value)
    return TaskResults(metrics, table)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Generators seeded as lm-eval seeds them inside, and as they were afterwards; its lines and bars kept off the
    screen, and no pool of processes forked for the bootstrap."""
    generators, bars = RandomState(), tqdm.tqdm.__init__
    before = generators.state_dict()
    random.seed(0)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    os.environ["DISABLE_MULTIPROC"] = "1"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tqdm.tqdm.__init__ = partialmethod(bars, disable=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.tqdm.__init__ = bars
        generators.load_state_dict(before)


def _is_local(manager: Any, name: str) -> bool:
    """Whether a task is there whose data are files of this machine."""
    entry = manager.task_index.get(name)
    path = str((getattr(entry, "cfg", None) or {}).get("dataset_path"))
    return path in FORMATS.values() or Path(path).exists()


def _files(folders: list[str], name: str) -> list[str]:
    """YAML files of this name: what lm-eval cannot read is in no list of its, and says why when it is loaded."""
    return [str(path) for folder in folders for path in Path(folder).rglob(f"{name}.yaml")]


def _explained(error: Exception, library: Any, setting: str) -> ForgatherError:
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    task = next((each for each in owners if getattr(each, "DATASET_PATH", None)), None)
    if task is None:
        return DataError(f"{setting}: cannot be made ({_first_line(error)}); mend the YAML")
    name = task.config.task
    if not isinstance(error, ConnectionError):
        return DataError(f"task {name}: its data cannot be read ({_first_line(error)}); mend its YAML")
    given = [repr(part) for part in (task.DATASET_PATH, task.DATASET_NAME) if part is not None]
    given += [f"{key}={value!r}" for key, value in (task.config.dataset_kwargs or {}).items()]
    return DataError(
        f"task {name}: its dataset is not in the cache ({library.config.HF_DATASETS_CACHE}), and the hub cannot be "
        "reached; fetch it where there is a network: python -c "
        f'"from datasets import load_dataset; load_dataset({", ".join(given)})"'
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")

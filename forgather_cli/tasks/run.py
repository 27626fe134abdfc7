"""Tasks of lm-evaluation-harness: found, built before any model is loaded, and run. Its ``evaluate`` is called, not
``simple_evaluate``: that one seeds the process, asks git and the system who they are, and returns None where LOCAL_RANK
is not 0 (lm_eval 0.4.13, ``evaluator.py``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tqdm  # type: ignore[import-untyped]
from lm_eval.evaluator import evaluate  # type: ignore[import-untyped]
from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

from forgather_cli.data.text.hf import datasets_library, offline_if_unreachable
from forgather_cli.documents.regular_files import FORMATS
from forgather_cli.errors import DataError, did_you_mean
from forgather_cli.models.parts import evaluation_mode
from forgather_cli.tasks.lm import StrategyLM
from forgather_cli.tasks.lm import __file__ as lm_file
from forgather_cli.trainer.states import RandomState

_SEED = 1234
"""Of few-shot examples, as lm-eval's by default, so that its numbers are ours."""
os.environ.setdefault("DISABLE_MULTIPROC", "1")  # else the bootstrap forks a process for each core
logging.getLogger("lm_eval").setLevel(logging.ERROR)


def load_tasks(
    names: Sequence[str], tasks_dir: str | None = None, *, num_fewshot: int | None = None, setting: str = "--tasks"
) -> dict[str, Any]:
    """What ``run_tasks`` takes of the tasks, groups and tags of these names (``*`` stands for any letters), those of
    ``tasks_dir`` first. ``num_fewshot``: solved examples, but of a task whose YAML says 0. Raises DataError for what
    cannot be had.
    """
    library, folders = datasets_library(), [tasks_dir] if tasks_dir else []
    # a YAML that lm-eval cannot read is loaded by its path, which is how it says why
    unread = {path.stem: [str(path)] for folder in folders for path in Path(folder).rglob("*.yaml")}
    with _aside():
        for with_theirs in (False, True):  # of lm-eval, where a name or a group asks for them: 14 000, 15 s
            index = TaskManager(include_path=folders, include_defaults=with_theirs)
            wanted = {name: index.match_tasks([name]) or unread.get(name, []) for name in names}
            if all(found and not {*found} & {*index.all_groups} for found in wanted.values()):
                break
        if missing := next((name for name, found in wanted.items() if not found), None):
            nor = f", and none in the YAML files of {tasks_dir}" if tasks_dir else ""
            near = did_you_mean(missing, index.all_tasks)
            raise DataError(f"{setting}: lm-eval has no task {missing!r}{nor};{near} lm-eval ls tasks lists them")
        specs = list(dict.fromkeys(spec for found in wanted.values() for spec in found))
        configs = [(spec, getattr(index.task_index.get(spec), "cfg", None) or {}) for spec in specs]
        paths = [str(config.get("dataset_path", spec)) for spec, config in configs]
        is_local = all(path in FORMATS.values() or Path(path).exists() for path in paths)
        try:
            with contextlib.nullcontext() if is_local else offline_if_unreachable(library, told=False):
                loaded: dict[str, Any] = index.load(specs)
        except Exception as error:  # of datasets, of lm-eval, or of a function that a task names
            raise DataError(_why(error, library, specs)) from error
    for task in loaded["tasks"].values():
        given = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=(given if num_fewshot is None or given == 0 else num_fewshot) or 0)
    return loaded


def run_tasks(
    lm: StrategyLM, tasks: dict[str, Any], *, limit: int | None = None, apply_chat_template: bool = False,
    bootstrap_iters: int = 0, with_samples: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Collective. Run what ``load_tasks`` has built, with the weights as they stand; as often as one likes.

    ``lm``: of a strategy whose model is materialized; each module is in eval mode meanwhile and in its own afterwards.
    ``limit``: examples of each task. ``bootstrap_iters``: resamples for the standard error of a metric that is no mean;
    0: no standard errors. Generators of the process (random, numpy, torch) are left as they were.

    Returns a report, whose metrics are numbers by ``tasks/NAME/METRIC``, and lm-eval's samples by task, if asked for;
    on all ranks alike. Raises DataError where a task's own code fails.
    """
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(_SEED)
    try:
        with _aside(), evaluation_mode(lm.strategy.parts):
            table: dict[str, Any] = evaluate(
                lm, tasks, limit=limit, log_samples=with_samples, bootstrap_iters=bootstrap_iters,
                apply_chat_template=apply_chat_template, fewshot_as_multiturn=apply_chat_template,
            )  # fmt: skip
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.filename == lm_file for frame in frames):  # the model failed, or was stopped
            raise
        where = f"{type(error).__name__}: {error}, {frames[-1].filename}:{frames[-1].lineno}"
        raise DataError(f"tasks {', '.join(tasks['tasks'])}: cannot be run ({where}); mend the task") from error
    metrics = {}
    for name, values in table["results"].items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")  # acc,none or exact_match,strict-match
            if comma and isinstance(value, int | float):
                metrics[f"tasks/{name}/{metric}" + (f"/{kind}" if kind != "none" else "")] = float(value)
    counts = {name: each["effective"] for name, each in table["n-samples"].items()}
    return {"fewshot": table["n-shot"], "samples": counts, "metrics": metrics}, table.get("samples", {})


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Generators seeded as lm-eval seeds them, and as they were afterwards; its bars are not shown."""
    generators, init = RandomState(), tqdm.tqdm.__init__
    before = generators.state_dict()
    random.seed(0)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    tqdm.tqdm.__init__ = lambda bar, *args, **kwargs: init(bar, *args, **{**kwargs, "disable": True})
    try:
        yield
    finally:
        tqdm.tqdm.__init__ = init
        generators.load_state_dict(before)


def _why(error: Exception, library: Any, specs: list[str]) -> str:
    """What cannot be had, and for a dataset of the hub the command that fetches it."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    task = next((each for each in owners if getattr(each, "DATASET_PATH", None)), None)
    if task is None or not isinstance(error, ConnectionError):
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"task {task.config.task if task else ', '.join(specs)}: cannot be made ({said}); mend its YAML"
    given = [repr(part) for part in (task.DATASET_PATH, task.DATASET_NAME) if part is not None]
    given += [f"{key}={value!r}" for key, value in (task.config.dataset_kwargs or {}).items()]
    return (
        f"task {task.config.task}: its dataset is not in the cache ({library.config.HF_DATASETS_CACHE}), and the hub "
        "cannot be reached; fetch it where there is a network: python -c "
        f'"from datasets import load_dataset; load_dataset({", ".join(given)})"'
    )

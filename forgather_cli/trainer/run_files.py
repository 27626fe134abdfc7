"""The run directory of a Trainer that a script makes: taken, described and left as ``forgather train`` does; and the
script's metrics there and on the terminal, as Hugging Face's ``log_metrics`` and ``save_metrics`` have them.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgather_cli.callbacks.base import CallbackList, TrainerCallback
from forgather_cli.callbacks.build import build_callbacks
from forgather_cli.config.decode import dump_tree, to_tree
from forgather_cli.config.schema import Config
from forgather_cli.distributed import on_rank_0
from forgather_cli.launch.exit_status import ExitStatus, from_error
from forgather_cli.launch.run_lock import RunLock, begin_training
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.run import Run


class RunFiles:
    """Lock, configs, metrics and ``exit.json`` of one Trainer's run.

    ``config.yaml`` has the names of the objects that the script gave, in angle brackets: commands read the settings,
    and only the script can go on with the run.
    """

    def __init__(self, run_dir: RunDir, config: Config) -> None:
        self._run_dir, self._config = run_dir, config
        self.tree = to_tree(replace(config, output_dir=str(run_dir.root)))
        self._has_trained = False
        self._logger: Any = None

    def callbacks(self, users: list[Any]) -> list[tuple[str, Any]]:
        """What every run shows and writes, but for those that the user gives in their place.

        ``metrics.jsonl`` is written from the first ``train()`` on: who only evaluates leaves no trace in a run.
        """
        built = build_callbacks(self._config.callbacks, self._run_dir, config_tree=self.tree)
        kinds = {given if isinstance(given, type) else type(given) for given in users}
        wanted = {name: callback for name, callback in built if type(callback) not in kinds}
        self._logger = wanted.pop("json", None)
        return [("first_step", _FirstStep(self._run_dir)), *wanted.items()]

    @contextmanager
    def taken(
        self, run: Run, callbacks: CallbackList, finish: Callable[[], ExitStatus], *, resume: bool
    ) -> Iterator[None]:
        """Collective. Hold the directory while training lasts, and leave how it ended. Raises SetupError for one that
        another job holds, and for one with a run that is neither gone on with nor to be overwritten.
        """
        held: RunLock | None = None
        with ExitStack() as stack:

            def take() -> None:
                nonlocal held
                held = stack.enter_context(RunLock(self._run_dir.root))
                started_at = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
                start = {"recipe": self.tree["recipe"], "recipe_path": sys.argv[0], "overrides": [],
                         "directory": str(Path.cwd()), "started_at": started_at}  # fmt: skip
                held.prepare(
                    dump_tree(self.tree),
                    start,
                    overwrite=run.args.overwrite_output_dir and not resume,
                    resume=resume or self._has_trained,
                    ranks=0,
                )
                self._has_trained = True

            on_rank_0(take, run.cpu_group)
            if self._logger is not None:
                callbacks.add(self._logger, "json")
                self._logger = None
            try:
                yield
                status = finish()
            except BaseException as error:
                if held is not None:
                    held.leave(from_error(0, error))
                raise
            if held is not None:
                held.leave(status)


class _FirstStep(TrainerCallback):
    """A run that is to be overwritten goes when settings, data and model were found sound."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._is_done = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_done and state.is_world_process_zero:
            begin_training(self._run)
        self._is_done = True


# ----------------------------------------------------------------------------------------------- a script's own results


def print_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Print a table of the metrics, sorted by name (transformers 5.23, ``trainer_pt_utils.py: log_metrics``)."""
    told = {name: _told(name, value) for name, value in sorted(metrics.items())}
    width, places = max(map(len, told), default=0), max(map(len, told.values()), default=0)
    print(f"***** {split} metrics *****")
    for name, value in told.items():
        print(f"  {name:<{width}} = {value:>{places}}")


def _told(name: str, value: Any) -> str:
    if "_runtime" in name:
        return str(datetime.timedelta(seconds=round(value)))
    return str(round(value, 4) if isinstance(value, float) else value)


def save_metrics(root: Path, split: str, metrics: dict[str, Any], *, combined: bool) -> None:
    """Write ``<split>_results.json``, and with ``combined`` what ``all_results.json`` has not yet or no more."""
    write_json(root / f"{split}_results.json", metrics)
    if combined:
        path = root / "all_results.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_json(path, before | metrics)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=4, sort_keys=True, default=str) + "\n", encoding="utf-8")

"""Every path inside a run directory, once."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather_cli.documents.regular_files import read_yaml
from forgather_cli.errors import CallbackError, PartError, SetupError

ABOUT_THE_RUN = frozenset(
    ("output_dir", "logging_dir", "job_id", "overwrite_output_dir", "resume_from_checkpoint", "resume_components",
     "node_rank", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "max_restarts", "hang_timeout", "hang_report_after")
)  # fmt: skip
"""Settings that say where and how a run was started, and not what was trained."""
_STEP = re.compile(r"step-(\d{8,})$")
_AVERAGE = re.compile(r"step-\d{8,}-average-\d+$")
_LATER_CONFIG = re.compile(r"config\.(\d+)\.yaml$")
_PASSING = re.compile(r".+-rank-\d+\.pickle|\.before-.+|\..+\.deleted")
"""Names of memory snapshots, and of what a start or a removal has hidden."""
CALLED_FROM = "FORGATHER_CALLED_FROM"
"""Environment variable: the user's working directory, while a run goes on in the one that it was begun in."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _In:
    """A path below a run's root, or below its ``logging_dir``."""

    def __init__(self, name: str, *, logging: bool = False) -> None:
        self._name, self._logging = name, logging

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return (run.logging_dir if self._logging and run.logging_dir else run.root) / self._name


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Nothing here touches the disk unless its docstring says so."""

    root: Path
    logging_dir: Path | None = None
    """Where metrics, samples and TensorBoard go; None: ``root``."""

    config = _In("config.yaml")
    """The resolved config the run was started with."""
    origin = _In("origin.yaml")
    """Recipe text, overrides and versions."""
    lock = _In(".lock")
    """Held (a record lock) by the one job that writes this directory."""
    secret = _In(".secret")
    """What the ranks of several nodes sign their messages with."""
    exit = _In("exit.json")
    """How the last job in this directory ended."""
    hang = _In("hang.json")
    """Where the ranks stood the last time that a job made no progress."""
    logs = _In("logs")
    checkpoints = _In("checkpoints")
    rollbacks = _In("rollbacks.jsonl")
    """Each rollback to a checkpoint, with the samples that it skips."""
    mixture = _In("mixture.jsonl")
    """Of a mixture: what each start and save had read of its sources."""
    tasks = _In("tasks.jsonl")
    """Results of benchmarks: a line for each time that some were run."""
    data_files = _In("data_files.json")
    """By the data's fingerprint: hash of each file, by path."""
    control = _In("control")
    """Commands that jobs in this directory were given, with their answers."""
    diloco_worker = _In("diloco_worker")
    """A DiLoCo worker's id, and what it sends of the present round."""
    evaluation = _In("evaluation.json")
    """The request of ``forgather eval``, in a temporary run directory for ranks that only evaluate."""
    report = _In("report.json")
    """The result of that evaluation."""
    set_aside = _In(".overwritten")
    """Where a run that is to be overwritten waits for the first step of the new one."""
    being_set_aside = _In(".overwriting")
    """Where it is while it moves there or back: its files are here or in the run directory, never in both."""

    diloco = _In("diloco.yaml")
    """The settings of a DiLoCo server, whose run this is; ``config.yaml`` is what its workers train."""
    diloco_address = _In("diloco.json")
    """Where that server listens, while it does."""
    diloco_token = _In("diloco.token")
    diloco_control_token = _In("diloco.control-token")
    diloco_workers = _In("workers.json")
    """Who has registered with it."""
    rounds = _In("rounds.jsonl")
    """Its ledger: a line for each published round."""
    dropped_rounds = _In("rounds.dropped.jsonl")
    """Lines of it that a start could not go on from."""
    submissions = _In("submissions")
    weights = _In("weights")
    """What its workers fetch."""

    metrics = _In("metrics.jsonl", logging=True)
    """JsonLogger's file."""
    gradient_norms = _In("gradient_norms.jsonl", logging=True)
    """GradNormLogger's file."""
    parameter_norms = _In("parameter_norms.jsonl", logging=True)
    """ParameterNormLogger's file."""
    samples = _In("samples.txt", logging=True)
    """TextgenCallback's file."""
    tensorboard = _In("tensorboard", logging=True)
    profile = _In("profile", logging=True)
    """ProfilerCallback's traces and tables."""
    trackers = _In("trackers", logging=True)
    """Files of trackers that keep some."""
    plots = _In("plots")
    """Pictures that ``forgather logs plot`` has drawn."""

    def later_config(self, n: int) -> Path:
        """The resolved config of the n-th later start, n >= 1."""
        return self.root / f"config.{n}.yaml"

    def later_starts(self) -> list[int]:
        """Numbers n of the ``config.<n>.yaml`` files, ascending. Reads the directory."""
        if not self.root.is_dir():
            return []
        found = (_LATER_CONFIG.match(path.name) for path in self.root.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def newest_config(self) -> Path:
        """The config of the newest start. Reads the directory."""
        later = self.later_starts()
        return self.later_config(later[-1]) if later else self.config

    def first_directory(self) -> Path | None:
        """The working directory of the run's first start, from which its relative paths count; None if that is not
        known, or not there. Reads ``origin.yaml``.
        """
        told = self.read_origin().get("directory")
        return Path(told) if isinstance(told, str) and os.path.isabs(told) and os.path.isdir(told) else None

    def option_files(self) -> dict[str, str]:
        """By setting: the file that named a part of the user's own at the first start. Reads ``origin.yaml``."""
        told = self.read_origin().get("option_files")
        return {str(key): str(file) for key, file in told.items()} if isinstance(told, dict) else {}

    def given(self) -> frozenset[str]:
        """Paths of the settings that recipe and command line gave at the first start. Reads ``origin.yaml``."""
        told = self.read_origin().get("given")
        return frozenset(map(str, told)) if isinstance(told, list) else frozenset()

    def typed(self) -> dict[str, str]:
        """By setting: what was typed at the first start, ``ABOUT_THE_RUN`` left out. Reads ``origin.yaml``."""
        told = self.read_origin().get("overrides")
        words = (str(word).lstrip("+").partition("=") for word in (told if isinstance(told, list) else ()))
        return {name: value for name, _, value in words if name not in ABOUT_THE_RUN and not name.startswith("~")}

    def read_origin(self) -> dict[str, Any]:
        """What the first start has left in ``origin.yaml``; nothing where that cannot be read."""
        try:
            origin = read_yaml(self.origin)
        except SetupError:
            return {}
        return origin if isinstance(origin, dict) else {}

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def memory_snapshot(self, prefix: str, rank: int) -> Path:
        """PeakMemory's file of one rank."""
        return (self.logging_dir or self.root) / f"{prefix}-rank-{rank}.pickle"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def average(self, step: int, count: int) -> Path:
        """The mean of the last ``count`` checkpoints' weights, a model directory beside that of the last one."""
        return self.checkpoints / f"step-{step:08d}-average-{count}"

    def checkpoint_steps(self) -> list[int]:
        """Steps of the published checkpoints, ascending. Reads the directory."""
        if not self.checkpoints.is_dir():
            return []
        found = (step_of(path) for path in self.checkpoints.iterdir() if path.is_dir())
        return sorted(step for step in found if step is not None)

    def command(self, command_id: str) -> Path:
        """The record of one command."""
        assert is_name(command_id)
        return self.control / f"{command_id}.json"

    def note_set_aside(self) -> str | None:
        """What is to be known while a run waits there; None if none does. Reads the directory."""
        if not (self.set_aside.is_dir() or self.being_set_aside.is_dir()):
            return None
        return (
            f"{shown(self.root)}: a start with overwrite_output_dir=true has not come to its first step; the run from "
            f"before it lies in {self.set_aside.name}, and comes back with the next {resume_command(self)}"
        )

    def own_files(self) -> list[Path]:
        """What Forgather has written into ``root``, the lock and the first config last. Reads the directory."""
        names = [each._name for each in vars(RunDir).values() if isinstance(each, _In)]
        own = [
            path
            for path in sorted(self.root.iterdir())
            if path.name in names or _LATER_CONFIG.match(path.name) or _PASSING.fullmatch(path.name)
        ]
        return sorted(own, key=lambda path: path in (self.config, self.lock))

    def is_used(self) -> bool:
        """True if a run has left metrics or checkpoints here. Reads the directory."""
        return self.metrics.exists() or bool(self.checkpoint_steps())


def step_of(path: Path) -> int | None:
    """The step a checkpoint directory is named after, or None if it is not one."""
    match = _STEP.match(path.name)
    return int(match.group(1)) if match else None


def run_of(source: Path) -> RunDir | None:
    """The run that a run directory, a checkpoint, its model directory or an average belongs to. Reads the disk.

    A directory with ``config.json`` is a model whatever else lies there.
    """
    source = source.resolve()
    runs = [RunDir(source)]
    inside = source.parent if step_of(source.parent) is not None else source
    if step_of(inside) is not None or _AVERAGE.match(inside.name):
        above = RunDir(inside.parent.parent)
        runs += [above] if above.checkpoints == inside.parent else []  # else it was copied away from its run
    return next((run for run in runs if run.config.exists() and not is_model_directory(run.root)), None)


def is_model_directory(path: Path) -> bool:
    """True for a Hugging Face directory. Reads the disk."""
    return (path / "config.json").exists()


def is_adapter_directory(path: Path) -> bool:
    """True for an adapter as PEFT keeps it. Reads the disk."""
    return (path / "adapter_config.json").exists()


def is_checkpoint(path: Path) -> bool:
    """True for a published checkpoint, in its run or copied away from it. Reads the disk."""
    return (path / "manifest.json").exists()


def model_in(path: Path) -> Path:
    """Where the model is that a directory holds: in a checkpoint's ``model/``, else in itself. Reads the disk."""
    return path / "model" if is_checkpoint(path) else path


def shown(path: Path | str) -> str:
    """``path`` as people are shown it: short where it lies below the directory that the command was given in."""
    here = os.environ.get(CALLED_FROM) or os.getcwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)


def resume_command(run: RunDir) -> str:
    """The command that resumes a run, for the directory that the command was given in."""
    return f"forgather resume {shlex.quote(shown(run.root))}"


def name_file(error: PartError | CallbackError, files: Mapping[str, str]) -> None:
    """Have a part's error name its option file, as people are shown it; ``files``: ``RunDir.option_files``."""
    file = Path(files.get(error.part, ""))
    with suppress(OSError, UnicodeDecodeError):
        if error.name.rpartition(".")[2] in file.read_text(encoding="utf-8"):  # a later start may have another part
            error.file = shown(file)


def is_name(text: str) -> bool:
    """True for a valid id of a job or a command: a single path component, such as no ``..``."""
    return _NAME.fullmatch(text) is not None
